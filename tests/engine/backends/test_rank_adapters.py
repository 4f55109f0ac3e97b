"""Adapters over several ranks or stages: an answer's bits are those of one process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from octavo_engine.errors import ModelError
from octavo_engine.models.decoder_names import adapted_layers
from octavo_engine.weights.adapter import read_adapter
from tests.engine.backends.driver import random_tokens
from tests.engine.backends.ranks import ThreadRanks
from tests.engine.backends.stages import ChainedStages
from tests.engine.backends.test_adapters import LIMITS, AdaptedDriver, native, place
from tests.engine.models.tiny import TinyModel, tiny_model
from tests.fakes.adapters import write_adapter

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from octavo_engine.backends.native.backend import NativeBackend

# Ranks, and every how many-th layer each has: a layer has some of them, none or all.
ADAPTERS = ((4, 1), (33, 2), (7, 3))
BF16: dict[str, Any] = {"dtype": "bf16", "adapters": LIMITS}
TOKENS = (40, 33, 61, 50, 3, 21, 70, 12)


def shapes_of(backend: NativeBackend) -> dict[str, tuple[int, int]]:
    """The columns and outputs of each linear layer, by the model's own names."""
    return {
        name: (site.columns, size)
        for site in backend._sites
        for name, size in zip(site.names, site.sizes, strict=True)
    }


def write_adapters(backend: NativeBackend, folder: Path) -> list[Path]:
    shapes = shapes_of(backend)
    known = {name for name in shapes if adapted_layers(backend.config, name)[0].name == name}
    return [
        write_adapter(
            folder / str(seed),
            {name: shapes[name] for index, name in enumerate(sorted(known)) if index % every == 0},
            rank=rank,
            seed=seed,
        )
        for seed, (rank, every) in enumerate(ADAPTERS)
    ]


def mixed_logits(backend: Any, folders: list[Path]) -> NDArray[np.float32]:
    """Row r has adapter r % 4, and every fourth row none: prompts, then single tokens of all, then
    with adapters that have changed places."""
    driver = AdaptedDriver(backend)
    for slot, folder in enumerate(folders):
        place(backend, slot, folder)
    driver.slots = {row: row % 4 if row % 4 < len(folders) else -1 for row in range(8)}
    requests = [
        driver.add(row, random_tokens(count, seed=count)) for row, count in enumerate(TOKENS)
    ]
    driver.step([(request, len(request.token_ids) - 2) for request in requests])
    driver.step([(request, 1) for request in reversed(requests)])
    backend.set_adapter(1, None)
    if folders:
        place(backend, 1, folders[0])
    driver.step([(request, 1) for request in requests])
    return np.concatenate([request.logits for request in requests])


def check(model: TinyModel, folder: Path, made: Any, **options: Any) -> None:
    alone = native(model, **options)
    folders = write_adapters(alone, folder)
    expected = mixed_logits(alone, folders)
    changed = np.any(expected != mixed_logits(alone, []), axis=1)
    rows = np.repeat([row % 4 < 3 for row in range(8)], TOKENS)
    np.testing.assert_array_equal(changed, rows)
    np.testing.assert_array_equal(mixed_logits(made, folders), expected)
    made.close()


# Layers side by side in one matrix, gates, biases, other names, one KV head, a gate of one row,
# latents.
FAMILIES = ["llama", "qwen3", "phi3", "gpt2", "gemma2", "bigcode", "qwen2-moe", "deepseek-v3"]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", FAMILIES)
def test_ranks_give_the_bits_of_one_process(name: str, size: int, tmp_path: Path) -> None:
    model = tiny_model(name)
    check(model, tmp_path, ThreadRanks(model, size, num_threads=size, **BF16), **BF16)


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "f32"},
        {"quantization": "int8", "dtype": "f32"},
        {"quantization": "int4"},
        {"quantization": "int4", "activation_bits": 8},
        {"kv_cache_dtype": "int8"},
    ],
    ids=lambda options: " ".join(map(str, options.values())),
)
def test_formats_over_four_ranks(options: dict[str, Any], tmp_path: Path) -> None:
    """Of which two have the same KV head."""
    model, options = tiny_model("llama"), BF16 | options
    check(model, tmp_path, ThreadRanks(model, 4, num_threads=1, **options), **options)


def test_ranks_with_experts_of_their_own(tmp_path: Path) -> None:
    model = tiny_model("qwen3-moe")
    ranks = ThreadRanks(model, 3, num_threads=1, spreads_experts=True, **BF16)
    check(model, tmp_path, ranks, **BF16)


@pytest.mark.parametrize("name", ["llama", "gpt2", "lfm2"])
def test_stages_give_the_bits_of_one_process(name: str, tmp_path: Path) -> None:
    model = tiny_model(name)
    check(model, tmp_path, ChainedStages(model, 2, **BF16), **BF16)


def test_each_keeps_only_its_part(tmp_path: Path) -> None:
    """The up matrices of its outputs, or all of its layers."""
    model = tiny_model("llama")
    (folder, *_) = write_adapters(native(model), tmp_path)
    files = read_adapter(str(folder))
    whole = native(model).pack_adapter(files).nbytes
    down = sum(4 * part.down.shape[1] * 16 for part in files.parts.values())
    ranks = ThreadRanks(model, 2, num_threads=1, adapters=LIMITS, dtype="f32")
    sizes = [packed.nbytes for packed in ranks.pack_adapter(files)]
    assert max(sizes) < whole < sum(sizes) < whole + down
    ranks.close()
    stages = ChainedStages(model, 2, adapters=LIMITS, dtype="f32")
    sizes = [packed.nbytes for packed in stages.pack_adapter(files)]
    assert min(sizes) > 0 and sum(sizes) == whole
    stages.close()


@pytest.mark.parametrize("kind", [ThreadRanks, ChainedStages])
def test_all_refuse_an_adapter_of_another_model(kind: Any, tmp_path: Path) -> None:
    model = tiny_model("llama")
    options = {"num_threads": 1} if kind is ThreadRanks else {}
    made = kind(model, 2, adapters=LIMITS, **options)
    layer = f"model.layers.{model.config['num_hidden_layers'] - 1}.self_attn.q_proj"
    files = read_adapter(str(write_adapter(tmp_path, {layer: (8, 8)})))
    backends = made.ranks if kind is ThreadRanks else made.stages
    for backend in backends:
        with pytest.raises(ModelError, match="the adapter is of another model"):
            backend.pack_adapter(files)
    made.close()
