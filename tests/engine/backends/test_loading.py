"""Loading for both backends: what is stacked, decoded, counted, missing or left over."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize, quantize

from octavo_engine import _native
from octavo_engine.backends.dequantize import to_float32
from octavo_engine.backends.native.loader import NativeLoader
from octavo_engine.backends.text_part import TextPart
from octavo_engine.backends.torch.loader import TorchLoader
from octavo_engine.backends.torch.precision import Precision
from octavo_engine.errors import ModelError
from octavo_engine.weights.checkpoint import Scales, StoredTensor
from octavo_engine.weights.dummy import DummyCheckpoint
from octavo_engine.weights.integer_blocks import q8_0_blocks
from tests.engine.models.tiny import MemoryCheckpoint

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray


class StoredCheckpoint:
    """Tensors exactly as given."""

    def __init__(self, *tensors: StoredTensor) -> None:
        self.tensors = {tensor.name: tensor for tensor in tensors}

    def names(self) -> Iterable[str]:
        return self.tensors

    def read(self, name: str, shape: tuple[int, ...]) -> StoredTensor:
        assert self.tensors[name].shape == shape
        return self.tensors[name]

    @property
    def total_bytes(self) -> int:
        return sum(tensor.data.nbytes for tensor in self.tensors.values())


def numbers(*shape: int, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def stored(name: str, values: NDArray[np.float32], **fields: Any) -> StoredTensor:
    data = np.ascontiguousarray(values).view(np.uint8).reshape(-1)
    return StoredTensor(name, "F32", values.shape, data, **fields)


def native_loader(checkpoint: Any, dtype: Any = "f32", progress: Any = None) -> NativeLoader:
    return NativeLoader(checkpoint, _native.Team(1), dtype, progress)


def test_matrices_and_biases_are_stacked_in_order_at_any_row() -> None:
    parts = {name: numbers(rows, 6, seed=rows) for name, rows in (("q", 20), ("k", 5), ("v", 9))}
    biases = {name: numbers(len(part), seed=99) for name, part in parts.items()}
    checkpoint = StoredCheckpoint(
        *(stored(f"{name}.weight", part) for name, part in parts.items()),
        *(stored(f"{name}.bias", bias) for name, bias in biases.items()),
    )
    loader = native_loader(checkpoint)
    linear = loader.linear(["q", "k", "v"], 6, [20, 5, 9], bias=True)
    loader.finish()
    assert np.array_equal(linear.weight.unpack(), np.concatenate(list(parts.values())))
    assert linear.bias is not None
    assert np.array_equal(linear.bias, np.concatenate(list(biases.values())))
    reference = TorchLoader(checkpoint, Precision()).linear(
        ["q", "k", "v"], 6, [20, 5, 9], bias=True
    )
    assert np.array_equal(reference.weight.numpy(), linear.weight.unpack())
    assert reference.bias is not None
    assert np.array_equal(reference.bias.numpy(), linear.bias)


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_plain_formats_keep_their_values(dtype: str) -> None:
    values = torch.from_numpy(numbers(32, 8))
    checkpoint = MemoryCheckpoint({"w.weight": values}, dtype)
    torch_dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[dtype]
    expected = values.to(torch_dtype).float().numpy()
    assert np.array_equal(to_float32(checkpoint.read("w.weight", (32, 8))), expected)
    assert np.array_equal(native_loader(checkpoint).embedding("w", 32, 8).unpack(), expected)


@pytest.mark.parametrize("dtype", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_quantised_rows_arrive_in_the_order_of_the_row_map(dtype: str) -> None:
    values = numbers(16, 64)
    kind = GGMLQuantizationType[dtype]
    data = quantize(values, kind)
    order = np.random.default_rng(1).permutation(16).astype(np.int32)
    tensor = StoredTensor("w.weight", dtype, (16, 64), data.reshape(-1), row_map=order)
    expected = dequantize(data, kind)[order]
    np.testing.assert_array_equal(to_float32(tensor), expected)
    packed = native_loader(StoredCheckpoint(tensor)).embedding("w", 16, 64)
    np.testing.assert_array_equal(packed.unpack(), expected)


def test_offsets_of_file_and_model_add_up() -> None:
    """GGUF stores Gemma's norms as 1 + w, the model adds 1 to w: together they cancel."""
    values = numbers(8)
    checkpoint = StoredCheckpoint(stored("norm.weight", values, offset=-1.0))
    for loader in (native_loader(checkpoint), TorchLoader(checkpoint, Precision())):
        vector = np.asarray(loader.vector("norm.weight", 8, offset=1.0))
        np.testing.assert_allclose(vector, values, atol=1e-6)


def test_a_tied_head_shares_the_embedding() -> None:
    checkpoint = StoredCheckpoint(stored("e.weight", numbers(16, 4)))
    native = native_loader(checkpoint)
    table = native.embedding("e", 16, 4)
    assert native.tied(table).weight is table
    reference = TorchLoader(checkpoint, Precision())
    tensor = reference.embedding("e", 16, 4)
    assert isinstance(tensor, torch.Tensor)
    assert reference.tied(tensor).weight.data_ptr() == tensor.data_ptr()


@pytest.mark.parametrize("is_native", [True, False])
def test_all_missing_names_are_listed_at_once(is_native: bool) -> None:
    checkpoint = StoredCheckpoint(stored("b.weight", numbers(4, 4)))
    loader = native_loader(checkpoint) if is_native else TorchLoader(checkpoint, Precision())
    loader.linear(["a", "b", "c"], 4, [4, 4, 4])
    loader.vector("norm.weight", 4)
    with pytest.raises(ModelError, match=r"lacks 3 tensors.*: a\.weight, c\.weight, norm\.weight"):
        loader.finish()


def test_a_wrong_shape_is_refused_at_once() -> None:
    checkpoint = MemoryCheckpoint({"a.weight": torch.zeros(4, 4)})
    with pytest.raises(ModelError, match=r"a\.weight has shape \(4, 4\), not \(5, 4\)"):
        native_loader(checkpoint).linear("a", 4, 5)


def test_unused_names_are_told_and_computed_ones_are_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    checkpoint = StoredCheckpoint(
        stored("a.weight", numbers(4, 4)),
        stored("stranger.weight", numbers(1)),
        stored("model.layers.0.self_attn.rotary_emb.inv_freq", numbers(2)),
    )
    loader = native_loader(checkpoint)
    loader.linear("a", 4, 4)
    with caplog.at_level(logging.WARNING):
        loader.finish()
    (message,) = [record.getMessage() for record in caplog.records]
    assert "Ignored 1 tensor of" in message
    assert "stranger.weight" in message


def test_progress_counts_stored_bytes_up_to_the_total() -> None:
    seen: list[tuple[int, int]] = []
    checkpoint = StoredCheckpoint(
        stored("a.weight", numbers(4, 4)), stored("b.weight", numbers(8)), stored("c", numbers(1))
    )
    loader = native_loader(checkpoint, progress=lambda done, total: seen.append((done, total)))
    loader.linear("a", 4, 4)
    loader.vector("b.weight", 8)
    loader.finish()
    assert seen == [(64, 100), (96, 100), (100, 100)]


def test_a_dummy_checkpoint_has_every_name() -> None:
    loader = native_loader(DummyCheckpoint(seed=3), "bf16")
    assert loader.linear("a", 8, 16).weight.nbytes == 16 * 8 * 2
    loader.finish()


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model.", "model."])
def test_the_text_part_has_its_plain_names(prefix: str) -> None:
    layer = stored(f"{prefix}layers.0.mlp.up_proj.weight", numbers(4, 4))
    part = TextPart(StoredCheckpoint(layer, stored("vision_tower.x.weight", numbers(2))))
    assert list(part.names()) == ["model.layers.0.mlp.up_proj.weight"]
    assert part.read("model.layers.0.mlp.up_proj.weight", (4, 4)) is layer
    assert part.total_bytes == 72


def test_forms_that_no_kernel_knows_are_packed_as_numbers() -> None:
    """FP8 with scales, and integers whose columns were sorted by their groups."""
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 126, (32, 64)).astype(np.uint8)
    scales = Scales(rng.uniform(0.5, 2, (2, 2)).astype(np.float32), 16, 32)
    blocks = q8_0_blocks(rng.integers(-127, 128, (32, 64)).astype(np.int8), np.ones((32, 2), "f4"))
    place = rng.permutation(64).astype(np.int32)
    for stored in (
        StoredTensor("w.weight", "F8_E4M3", (32, 64), codes.reshape(-1), scales=scales),
        StoredTensor("w.weight", "Q8_0", (32, 64), blocks, column_map=place),
    ):
        loader = NativeLoader(StoredCheckpoint(stored), _native.Team(1), "f32")
        np.testing.assert_array_equal(
            loader.linear("w", 64, 32).weight.unpack(), to_float32(stored)
        )
