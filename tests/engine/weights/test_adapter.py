"""Adapters as PEFT saves them: what is read, and what is refused by name."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from octavo_engine.errors import ModelError
from octavo_engine.weights.adapter import AdapterMissing, read_adapter
from tests.fakes.adapters import write_adapter

if TYPE_CHECKING:
    from pathlib import Path

Q = "model.layers.0.self_attn.q_proj"
O = "model.layers.0.self_attn.o_proj"  # noqa: E741  (as it is called)


def test_parts_have_the_checkpoints_names_and_the_scale_that_peft_gives_them(
    tmp_path: Path,
) -> None:
    write_adapter(tmp_path, {Q: (16, 8), O: (8, 16)}, rank=4, alpha=6.0)
    files = read_adapter(str(tmp_path))
    assert sorted(files.parts) == [O, Q]
    assert (files.parts[Q].down.shape, files.parts[Q].up.shape) == ((4, 16), (8, 4))
    assert files.parts[Q].scale == 1.5
    assert files.rank == 4
    write_adapter(tmp_path, {Q: (16, 8)}, rank=4, alpha=6.0, use_rslora=True)
    assert read_adapter(str(tmp_path)).parts[Q].scale == 6.0 / math.sqrt(4)


def test_a_layer_may_have_a_rank_and_a_scale_of_its_own(tmp_path: Path) -> None:
    patterns: dict[str, Any] = {
        "rank_pattern": {"q_proj": 2},
        "alpha_pattern": {"self_attn.o_proj": 3},
    }
    write_adapter(tmp_path, {Q: (16, 8), O: (8, 16)}, rank=4, alpha=8.0, **patterns)
    parts = read_adapter(str(tmp_path)).parts
    assert (parts[Q].rank, parts[Q].scale) == (2, 4.0)
    assert (parts[O].rank, parts[O].scale) == (4, 0.75)


def test_the_digest_is_of_what_the_arithmetic_depends_on(tmp_path: Path) -> None:
    def digest(folder: str, **fields: Any) -> str:
        return read_adapter(str(write_adapter(tmp_path / folder, {Q: (16, 8)}, **fields))).digest

    first = digest("a")
    assert digest("b", target_modules=["q_proj", "unused"]) == first, "names do not count"
    others = [digest("c", seed=1), digest("d", alpha=9.0), digest("e", use_rslora=True)]
    assert len({first, *others}) == 4


def test_names_of_a_model_of_several_parts_are_those_of_the_part_that_is_served(
    tmp_path: Path,
) -> None:
    module = "model.language_model.layers.0.self_attn.q_proj"
    assert list(read_adapter(str(write_adapter(tmp_path, {module: (16, 8)}))).parts) == [Q]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
        ({"use_dora": True}, "use_dora: adapters with DoRA are not computed; merge"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save: adapters with whole modules"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"r": 0}, "r must be a whole number above 0; got 0"),
        ({"r": 65}, "r is 65, above --max-lora-rank 64"),
        ({"r": "8"}, "r must be a whole number"),
        ({"lora_alpha": None}, "lora_alpha must be a number"),
        ({"lora_alpha": True}, "lora_alpha must be a number"),
        ({"use_rslora": 1}, "use_rslora must be true or false"),
        ({"rank_pattern": {"q.*|(a+)+": 2}}, "regular expression"),
        ({"rank_pattern": [1]}, "rank_pattern must be an object"),
        ({"rank_pattern": {"q_proj": 3}}, "their rank is 3"),
        ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "parameters of experts"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(
    fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write_adapter(tmp_path, {Q: (16, 8)})
    config = tmp_path / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | fields))
    with pytest.raises(ModelError, match=r"adapter_config\.json|adapter_model") as caught:
        read_adapter(str(tmp_path), max_rank=64)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        (f"base_model.model.{Q}.lora_magnitude_vector", (8,), "no part of a LoRA adapter"),
        ("base_model.model.model.embed_tokens.lora_embedding_A", (4, 8), "no part of a LoRA"),
        (f"base_model.model.{O}.lora_A.weight", (4, 8), f"has no lora_B of {O}"),
        (f"base_model.model.{Q}.lora_A.default.weight", (4, 16), f"has lora_A of {Q} twice"),
        (f"base_model.model.{O}.lora_A.weight", (4, 8, 1), "a matrix is needed"),
    ],
)
def test_tensors_that_do_not_belong_are_refused_by_name(
    name: str, shape: tuple[int, ...], message: str, tmp_path: Path
) -> None:
    write_adapter(tmp_path, {Q: (16, 8)})
    weights = tmp_path / "adapter_model.safetensors"
    save_file(load_file(weights) | {name: np.ones(shape, np.float32)}, weights)
    with pytest.raises(ModelError) as caught:
        read_adapter(str(tmp_path))
    assert message in str(caught.value)


def test_what_is_no_adapter_says_so(tmp_path: Path) -> None:
    for path in (str(tmp_path), str(tmp_path / "none"), "\0", "x" * 5000):
        with pytest.raises(AdapterMissing, match="no folder of a LoRA adapter"):
            read_adapter(path)
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 4, "lora_alpha": 4}')
    (tmp_path / "adapter_model.bin").write_bytes(b"pickle")
    with pytest.raises(ModelError, match="read as safetensors only"):
        read_adapter(str(tmp_path))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=6,
)
FIELDS = st.sampled_from(
    ["peft_type", "r", "lora_alpha", "use_rslora", "bias", "rank_pattern", "alpha_pattern",
     "modules_to_save", "use_dora", "target_modules"]
)  # fmt: skip


@pytest.mark.slow
@given(changes=st.dictionaries(FIELDS, JSON, min_size=1))
@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_any_config_is_read_or_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    write_adapter(tmp_path, {Q: (16, 8)})
    config = tmp_path / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))
    _read_or_refuse(tmp_path)


@pytest.mark.slow
@given(data=st.data())
@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_any_bytes_are_read_or_refused(data: st.DataObject, tmp_path: Path) -> None:
    """Each file with some bytes changed, cut off or repeated."""
    write_adapter(tmp_path, {Q: (16, 8)})
    path = tmp_path / data.draw(
        st.sampled_from(["adapter_config.json", "adapter_model.safetensors"])
    )
    broken = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, min(len(broken) - 1, 400)))
        broken[place] = data.draw(st.integers(0, 255))
    path.write_bytes(broken[: data.draw(st.sampled_from([len(broken), len(broken) // 2, 7]))])
    _read_or_refuse(tmp_path)


def _read_or_refuse(folder: Path) -> None:
    try:
        files = read_adapter(str(folder))
    except ModelError:
        return
    for part in files.parts.values():
        assert part.down.shape[0] == part.up.shape[1] >= 1
        assert math.isfinite(part.scale)
