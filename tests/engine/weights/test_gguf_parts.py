"""Models in several GGUF files: as one file, with every way in which the parts may not fit."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import gguf
import huggingface_hub
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo_engine.errors import ModelError
from octavo_engine.weights.fingerprint import fingerprint
from octavo_engine.weights.gguf_parts import (
    MAX_PARTS,
    all_parts,
    models_among,
    open_gguf,
    part_name,
    without_number,
)
from octavo_engine.weights.open import open_checkpoint
from octavo_engine.weights.source import resolve_model
from tests.engine.weights.test_source import FakeHub

if TYPE_CHECKING:
    from pathlib import Path

NUM_PARTS = 4


def write_llama(path: Path, *, max_tensors: int = 0, seed: int = 0, blocks: int = 1) -> Path:
    """A llama with four tensors a layer and three more; in parts where `max_tensors` says so."""
    writer = gguf.GGUFWriter(str(path), "llama", split_max_tensors=max_tensors)
    for name, value in (
        ("block_count", blocks), ("embedding_length", 64), ("feed_forward_length", 128),
        ("context_length", 256), ("attention.head_count", 4), ("attention.head_count_kv", 2),
    ):  # fmt: skip
        writer.add_uint32(f"llama.{name}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    rng = np.random.default_rng(seed)
    shapes = {"token_embd.weight": (5, 64), "output_norm.weight": (64,), "output.weight": (5, 64)}
    for block in range(blocks):
        shapes |= {
            f"blk.{block}.attn_q.weight": (64, 64), f"blk.{block}.attn_k.weight": (32, 64),
            f"blk.{block}.attn_norm.weight": (64,), f"blk.{block}.ffn_up.weight": (128, 64),
        }  # fmt: skip
    for name, shape in shapes.items():
        writer.add_tensor(name, rng.standard_normal(shape, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def parts(tmp_path) -> list[Path]:
    write_llama(tmp_path / "m.gguf", max_tensors=2)
    found = sorted(tmp_path.glob("m-*.gguf"))
    assert [path.name for path in found] == list(all_parts(f"m-00001-of-0000{NUM_PARTS}.gguf"))
    return found


def test_names_of_parts():
    assert part_name("a/b-Q4_K_M-00002-of-00003.gguf") == ("a/b-Q4_K_M", 2, 3)
    singles = [
        "m.gguf", "m-00001-of-00002.safetensors", "m-1-of-2.gguf", "m-00000-of-00002.gguf",
        "m-00003-of-00002.gguf", f"m-00001-of-{MAX_PARTS + 1:05d}.gguf",
    ]  # fmt: skip
    for name in singles:
        assert part_name(name) is None and all_parts(name) == (name,)
    assert without_number("m-00002-of-00003.gguf") == "m.gguf"
    names = ["b.gguf", "a-00002-of-00002.gguf", "a-00001-of-00002.gguf", "c-00002-of-00002.gguf"]
    assert models_among(names) == ["a-00001-of-00002.gguf", "b.gguf", "c-00001-of-00002.gguf"]


@pytest.mark.parametrize("number", range(NUM_PARTS))
def test_any_part_opens_the_whole_model(parts, tmp_path, number):
    whole = open_gguf(write_llama(tmp_path / "w.gguf"))
    file = open_gguf(parts[number])

    assert file.path == parts[0]
    assert file.metadata["llama.block_count"] == 1
    assert file.tensors.keys() == whole.tensors.keys() and len(file.tensors) == 7
    for name, tensor in file.tensors.items():
        assert file.data(tensor).tobytes() == whole.data(whole.tensors[name]).tobytes()


def test_a_checkpoint_of_parts_is_that_of_one_file(parts, tmp_path):
    split = open_checkpoint(resolve_model(str(parts[0])))
    whole = open_checkpoint(resolve_model(str(write_llama(tmp_path / "w.gguf"))))

    assert set(split.names()) == set(whole.names())
    assert split.total_bytes == whole.total_bytes
    name = "model.layers.0.mlp.up_proj.weight"
    read = [each.read(name, (128, 64)).data.tobytes() for each in (split, whole)]
    assert read[0] == read[1]


def test_a_folder_of_one_model_in_parts_is_that_model(parts):
    assert resolve_model(str(parts[0].parent)).path == parts[0]
    write_llama(parts[0].with_name("other.gguf"))
    with pytest.raises(ModelError, match=r"name one of them: m-00001-of-00004.gguf, other.gguf"):
        resolve_model(str(parts[0].parent))


def test_the_fingerprint_covers_every_part(parts):
    before = {fingerprint(part) for part in parts}
    assert len(before) == 1
    last = bytearray(parts[-1].read_bytes())
    last[-1] ^= 1
    parts[-1].write_bytes(last)
    assert fingerprint(parts[0]) not in before


def test_missing_parts_are_named(parts):
    parts[1].unlink()
    with pytest.raises(ModelError, match=r"^m-00002-of-00004.gguf is missing from .*into 4 files"):
        open_gguf(parts[0])
    parts[0].unlink()
    with pytest.raises(ModelError, match=r"m-00001-of-00004.gguf, m-00002-of-00004.gguf are"):
        resolve_model(str(parts[0].parent))


def test_many_missing_parts_are_counted(tmp_path):
    path = tmp_path / "m-00001-of-00100.gguf"
    path.write_bytes(b"")
    with pytest.raises(ModelError, match=r"m-00006-of-00100.gguf and 94 more are missing"):
        open_gguf(path)


def test_a_part_that_is_there_twice_is_named(parts):
    shutil.copy(parts[1], parts[2])
    message = r"m-00003-of-00004.gguf says that it is part 2 of 4, and its name says part 3"
    with pytest.raises(ModelError, match=message):
        open_gguf(parts[0])


def test_a_part_of_another_number_of_parts_is_named(parts, tmp_path):
    (tmp_path / "other").mkdir()
    write_llama(tmp_path / "other" / "m.gguf", max_tensors=3)
    shutil.copy(tmp_path / "other" / "m-00002-of-00003.gguf", parts[1])
    with pytest.raises(ModelError, match=r"m-00002-of-00004.gguf says that it is one of 3 parts"):
        open_gguf(parts[0])


def test_a_whole_file_under_a_part_s_name_is_named(parts, tmp_path):
    shutil.copy(write_llama(tmp_path / "w.gguf"), parts[0])
    with pytest.raises(ModelError, match="says that it is no part of a model"):
        open_gguf(parts[0])


def test_a_part_of_another_model_is_named(parts, tmp_path):
    (tmp_path / "other").mkdir()
    write_llama(tmp_path / "other" / "m.gguf", max_tensors=3, blocks=2)
    others = sorted((tmp_path / "other").glob("*.gguf"))
    assert len(others) == NUM_PARTS
    original = parts[3].read_bytes()
    shutil.copy(others[3], parts[3])  # its tensors are of the second layer
    with pytest.raises(ModelError, match="promises 7 tensors in all parts, which have 8"):
        open_gguf(parts[0])
    parts[3].write_bytes(original)
    shutil.copy(others[2], parts[2])
    message = r"tensor blk.0.ffn_up.weight is in .*m-00003-of-00004.gguf and in m-00004-of-00004"
    with pytest.raises(ModelError, match=message):
        open_gguf(parts[0])


def test_a_part_under_another_name_says_what_it_is(parts):
    renamed = parts[1].rename(parts[1].with_name("second.gguf"))
    with pytest.raises(ModelError, match=r"second-00001-of-00004.gguf and so on"):
        open_gguf(renamed)


@pytest.mark.slow
@settings(
    max_examples=250, derandomize=True, suppress_health_check=list(HealthCheck), deadline=None
)
@given(data=st.data())
def test_mutated_parts_raise_model_errors_only(tmp_path, data):
    folder = tmp_path / "valid"
    if not folder.exists():
        folder.mkdir()
        write_llama(folder / "m.gguf", max_tensors=2)
    originals = sorted(folder.glob("*.gguf"))
    for original in originals:
        shutil.copy(original, tmp_path / original.name)
    name = data.draw(st.sampled_from([path.name for path in originals]))
    mutated = bytearray((folder / name).read_bytes())
    for _ in range(data.draw(st.integers(0, 6))):
        # Heads and infos come first; behind them are only numbers.
        place = data.draw(st.integers(0, min(len(mutated) - 1, 700)))
        mutated[place] = data.draw(st.sampled_from([0, 1, 8, 9, 127, 128, 255]))
    (tmp_path / name).write_bytes(mutated[: data.draw(st.integers(0, len(mutated)))])
    try:
        file = open_gguf(tmp_path / originals[0].name)
    except ModelError:
        return
    for tensor in file.tensors.values():
        assert len(file.data(tensor)) == tensor.end - tensor.begin


# -- from the hub


def test_a_repository_s_parts_are_fetched_together(tmp_path, monkeypatch):
    write_llama(tmp_path / "m.gguf", max_tensors=2)
    names = sorted(path.name for path in tmp_path.glob("*.gguf"))
    for reference in ("hf://org/name", f"hf://org/name/{names[2]}"):
        hub = FakeHub(monkeypatch, tmp_path, files=[*names, "README.md"])
        assert resolve_model(reference).path == tmp_path / names[0]
        assert hub.requested[-1]["allow_patterns"] == names
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert resolve_model("hf://org/name").path == tmp_path / names[0]


def test_parts_that_a_repository_lacks_are_named(tmp_path, monkeypatch):
    FakeHub(monkeypatch, tmp_path, files=["m-00001-of-00002.gguf"])
    (tmp_path / "m-00001-of-00002.gguf").write_bytes(b"")
    with pytest.raises(ModelError, match=r"m-00002-of-00002.gguf is missing from org/name"):
        resolve_model("hf://org/name/m-00001-of-00002.gguf")
