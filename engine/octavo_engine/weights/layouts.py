"""How checkpoints lay out a quantised matrix: one class for each way."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import numpy as np

from octavo_engine.weights.checkpoint import Scales, StoredTensor
from octavo_engine.weights.integer_blocks import (
    BLOCK,
    q4_1_blocks,
    q8_0_blocks,
    unpack_bits,
    unpack_words,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from octavo_engine.weights.safetensors import SafetensorsCheckpoint

_AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)  # which of a word's eight columns each nibble holds


class Integers(NamedTuple):
    """A matrix [rows, columns] from 0 to 2^bits - 1; scale and zero by [rows, groups]."""

    q: NDArray[np.uint8]
    scales: NDArray[np.float32]
    zeros: NDArray[Any]
    column_map: NDArray[np.int32] | None = None  # as in StoredTensor


class Layout(Protocol):
    """How one kind of checkpoint stores its matrices."""

    suffix: str  # of the tensor that holds a module's values
    scale: str  # of the tensor that only a quantized one has
    stored_types: tuple[str, ...]  # what matrices are read as, StoredTensor.dtype

    def read(
        self, checkpoint: SafetensorsCheckpoint, name: str, module: str, shape: tuple[int, ...]
    ) -> StoredTensor: ...


class _IntegerLayout(Protocol):
    """How one kind of checkpoint stores integers."""

    bits: int
    suffix: str

    def integers(self, checkpoint: SafetensorsCheckpoint, module: str) -> Integers: ...


class AsBlocks:
    """Integers with scales and zero points for groups of columns, as blocks of Q4_1 or Q8_0."""

    def __init__(
        self,
        layout: _IntegerLayout,
        input_dtype: Literal["int8"] | None = None,
        *,
        scale: str = ".weight_scale",
    ) -> None:
        self._layout = layout
        self.scale = scale
        self._input_dtype = input_dtype
        self.suffix = layout.suffix
        # 2 and 3 bits too: a block of 4 holds their values exactly.
        self.stored_types: tuple[str, ...] = ("Q4_1",) if layout.bits <= 4 else ("Q8_0",)

    def read(
        self, checkpoint: SafetensorsCheckpoint, name: str, module: str, shape: tuple[int, ...]
    ) -> StoredTensor:
        q, scales, zeros, column_map = self._layout.integers(checkpoint, module)
        if q.shape != tuple(shape):
            raise checkpoint.error(
                name, f"has shape {list(q.shape)}; the model's config asks for {list(shape)}"
            )
        rows, columns = q.shape
        groups = scales.shape[1] if scales.ndim == 2 else 0
        if len(scales) != rows or groups < 1 or columns % (groups * BLOCK):
            raise checkpoint.error(
                name,
                f"has scales of shape {list(scales.shape)} for {rows} x {columns} values; "
                f"groups must be multiples of {BLOCK} columns",
            )
        if zeros.shape != scales.shape:
            raise checkpoint.error(
                name, f"has zero points of shape {list(zeros.shape)} for scales of {scales.shape}"
            )
        if self.stored_types == ("Q4_1",):
            dtype, data = "Q4_1", q4_1_blocks(q, scales, zeros)
        elif (zeros != 128).any():
            raise checkpoint.error(name, "has 8-bit integers with zero points; symmetric are read")
        else:
            dtype, data = "Q8_0", q8_0_blocks((q ^ 128).view(np.int8), scales)
        return StoredTensor(
            name, dtype, tuple(shape), data,
            column_map=column_map, input_dtype=self._input_dtype,
        )  # fmt: skip


class GPTQ:
    suffix = ".qweight"

    def __init__(self, bits: int, zero_offset: int) -> None:
        self.bits = bits
        self._zero_offset = zero_offset  # what the first version of the format left out

    def integers(self, checkpoint: SafetensorsCheckpoint, module: str) -> Integers:
        q = self._unpacked(checkpoint, f"{module}.qweight", is_transposed=True)
        zeros = self._unpacked(checkpoint, f"{module}.qzeros")
        zeros = zeros + np.uint8(self._zero_offset) & np.uint8(2**self.bits - 1)
        scales = checkpoint.numbers(f"{module}.scales", 2)
        if f"{module}.g_idx" in checkpoint.names():
            return _sorted(checkpoint, f"{module}.g_idx", Integers(q, scales.T, zeros.T))
        return Integers(q, scales.T, zeros.T)

    def _unpacked(
        self, checkpoint: SafetensorsCheckpoint, name: str, *, is_transposed: bool = False
    ) -> NDArray[np.uint8]:
        words = checkpoint.array(name, ("I32",), 2)
        if is_transposed:
            words = np.ascontiguousarray(words.T)
        if words.shape[1] * 32 % self.bits:
            raise checkpoint.error(
                name, f"has {words.shape[1]} words in a line, which values of {self.bits} bits "
                "do not fill"
            )  # fmt: skip
        return (unpack_bits if self.bits == 3 else unpack_words)(words, self.bits)


class AWQ:
    suffix = ".qweight"
    bits = 4

    def integers(self, checkpoint: SafetensorsCheckpoint, module: str) -> Integers:
        q, zeros = (
            self._in_order(unpack_words(checkpoint.array(f"{module}.{part}", ("I32",), 2), 4))
            for part in ("qweight", "qzeros")
        )
        scales = checkpoint.numbers(f"{module}.scales", 2)
        return Integers(np.ascontiguousarray(q.T), scales.T, zeros.T)

    def _in_order(self, values: NDArray[np.uint8]) -> NDArray[np.uint8]:
        eights = values.reshape(len(values), -1, 8)
        ordered = np.empty_like(eights)
        ordered[..., _AWQ_COLUMNS] = eights
        return ordered.reshape(values.shape)


class AwqGemv:
    """AWQ's rows as they are, words in the order of the columns; scales and zero points fill up
    rows of words."""

    suffix = ".qweight"
    bits = 4

    def __init__(self, group_size: int) -> None:
        self._group_size = group_size  # 0: a whole row

    def integers(self, checkpoint: SafetensorsCheckpoint, module: str) -> Integers:
        q = unpack_words(checkpoint.array(f"{module}.qweight", ("I32",), 2), 4)
        zeros = unpack_words(checkpoint.array(f"{module}.qzeros", ("I32",), 2), 4)
        scales = checkpoint.numbers(f"{module}.scales", 2)
        groups = q.shape[1] // (self._group_size or q.shape[1])
        return Integers(q, scales[:, :groups], zeros[:, :groups])


class PackQuantized:
    suffix = ".weight_packed"

    def __init__(self, bits: int) -> None:
        self.bits = bits

    def integers(self, checkpoint: SafetensorsCheckpoint, module: str) -> Integers:
        names = checkpoint.names()
        q = unpack_words(checkpoint.array(f"{module}.weight_packed", ("I32",), 2), self.bits)
        scales = checkpoint.numbers(f"{module}.weight_scale", 2)
        zeros: NDArray[Any] = np.full(scales.shape, 2 ** (self.bits - 1), np.uint8)
        if f"{module}.weight_zero_point" in names:
            words = checkpoint.array(f"{module}.weight_zero_point", ("I32",), 2)
            zeros = unpack_words(np.ascontiguousarray(words.T), self.bits).T[: len(q)]
        if f"{module}.weight_g_idx" in names:
            return _sorted(checkpoint, f"{module}.weight_g_idx", Integers(q, scales, zeros))
        return Integers(q, scales, zeros)


class IntQuantized:
    suffix = ".weight"
    bits = 8

    def integers(self, checkpoint: SafetensorsCheckpoint, module: str) -> Integers:
        q = checkpoint.array(f"{module}.weight", ("I8",), 2).view(np.uint8) ^ np.uint8(128)
        scales = checkpoint.numbers(f"{module}.weight_scale", 2)
        return Integers(q, scales, np.full(scales.shape, 128, np.uint8))


class BitsAndBytes8:
    """A row's largest magnitude, SCB, is its 127. Columns of outliers are among the integers."""

    suffix = ".weight"
    bits = 8

    def integers(self, checkpoint: SafetensorsCheckpoint, module: str) -> Integers:
        q = checkpoint.array(f"{module}.weight", ("I8",), 2).view(np.uint8) ^ np.uint8(128)
        scales = checkpoint.numbers(f"{module}.SCB", 1)[:, None] / np.float32(127)
        return Integers(q, scales, np.full(scales.shape, 128, np.uint8))


class TorchAo8:
    """torchao's Int8Tensor. A zero point of 0 is written with every scale."""

    suffix = "._weight_qdata"
    bits = 8

    def integers(self, checkpoint: SafetensorsCheckpoint, module: str) -> Integers:
        signed = checkpoint.array(module + self.suffix, ("I8",), 2)
        scales = checkpoint.numbers(f"{module}._weight_scale", 2)
        zeros: NDArray[Any] = np.full(scales.shape, 128, np.uint8)
        if f"{module}._weight_zero_point" in checkpoint.names():
            stored = checkpoint.array(f"{module}._weight_zero_point", ("I8",), 2)
            zeros = stored.view(np.uint8) ^ np.uint8(128)
        return Integers(signed.view(np.uint8) ^ np.uint8(128), scales, zeros)


class Float8:
    """Floats of 8 bits with a scale for the matrix, for each row, or for each block."""

    stored_types: tuple[str, ...] = ("F8_E4M3",)

    def __init__(
        self,
        scale: str,
        block: tuple[int, int] | None,
        *,
        suffix: str = ".weight",
        input_dtype: Literal["fp8"] | None = "fp8",
    ) -> None:
        self.scale = scale
        self.suffix = suffix
        self._block = block
        self._input_dtype = input_dtype

    def read(
        self, checkpoint: SafetensorsCheckpoint, name: str, module: str, shape: tuple[int, ...]
    ) -> StoredTensor:
        values = checkpoint.array(module + self.suffix, ("F8_E4M3",), 2)
        if values.shape != tuple(shape):
            raise checkpoint.error(
                name, f"has shape {list(values.shape)}; the model's config asks for {list(shape)}"
            )
        if (values & 127 == 127).any():
            raise checkpoint.error(name, "has values that are not numbers")
        rows, columns = values.shape
        scale_name = module + self.scale
        factors = checkpoint.numbers(scale_name, len(checkpoint.entry(scale_name).shape))
        block = self._block
        if block is None:
            block = (rows, columns) if factors.size == 1 else (1, columns)
            factors = factors.reshape(-1, 1)
        if factors.shape != (-(-rows // block[0]), -(-columns // block[1])):
            raise checkpoint.error(
                scale_name,
                f"has shape {list(factors.shape)}, which does not make scales for "
                f"{rows} x {columns} values in blocks of {block[0]} x {block[1]}",
            )
        return StoredTensor(
            name, "F8_E4M3", tuple(shape), values.reshape(-1),
            scales=Scales(factors, *block), input_dtype=self._input_dtype,
        )  # fmt: skip


def _sorted(checkpoint: SafetensorsCheckpoint, name: str, integers: Integers) -> Integers:
    """With each group's columns side by side; `name` says which column is in which group."""
    groups = checkpoint.array(name, ("I32",), 1)
    q, scales, zeros, _ = integers
    if scales.ndim != 2 or len(groups) != q.shape[1] or q.shape[1] % scales.shape[1]:
        raise checkpoint.error(
            name, f"has {len(groups)} groups of columns for values of shape {list(q.shape)} and "
            f"scales of {list(scales.shape)}"
        )  # fmt: skip
    in_order = np.arange(len(groups)) // (len(groups) // scales.shape[1])
    if (groups == in_order).all() or (groups == -1).all():  # -1: made ready, and not used
        return integers
    order = np.argsort(groups, kind="stable")
    if (groups[order] != in_order).any():
        raise checkpoint.error(name, "must put as many columns into each group as into the others")
    place = np.empty(len(groups), np.int32)
    place[order] = np.arange(len(groups), dtype=np.int32)
    return Integers(np.ascontiguousarray(q[:, order]), scales, zeros, place)
