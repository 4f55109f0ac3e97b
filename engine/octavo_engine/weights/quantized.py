"""Safetensors whose matrices are integers or 8-bit floats: GPTQ, AWQ, compressed-tensors, FP8."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from octavo_engine.errors import ModelError
from octavo_engine.weights.checkpoint import StoredTensor
from octavo_engine.weights.integer_blocks import (
    BLOCK,
    f8_e4m3_blocks,
    q4_1_blocks,
    q8_0_blocks,
    unpack_words,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from numpy.typing import NDArray

    from octavo_engine.weights.safetensors import SafetensorsCheckpoint

_AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)  # which of a word's eight columns each nibble holds
_COMPANIONS = (
    ".qzeros", ".scales", ".g_idx", ".weight_scale", ".weight_zero_point", ".weight_shape",
    ".weight_g_idx", ".weight_scale_inv", ".input_scale", ".input_zero_point",
)  # fmt: skip


class Integers(NamedTuple):
    """A matrix [rows, columns] from 0 to 2^bits - 1; scale and zero by [rows, groups]."""

    q: NDArray[np.uint8]
    scales: NDArray[np.float32]
    zeros: NDArray[Any]


class Floats8(NamedTuple):
    """A matrix [rows, columns] of 8-bit floats, as bits; scale by [rows, blocks of 32]."""

    q: NDArray[np.uint8]
    scales: NDArray[np.float32]


class Layout(Protocol):
    """How one kind of checkpoint stores its integers or 8-bit floats."""

    bits: int
    suffix: str  # of the tensor that holds a module's integers

    def read(self, checkpoint: SafetensorsCheckpoint, module: str) -> Integers | Floats8: ...


class QuantizedCheckpoint:
    """A checkpoint's tensors, its quantised matrices as blocks under their plain names."""

    def __init__(self, inner: SafetensorsCheckpoint, layout: Layout) -> None:
        self._inner = inner
        self._layout = layout
        names = frozenset(inner.names())
        suffix = layout.suffix
        modules = {name.removesuffix(suffix) for name in names if name.endswith(suffix)}
        if suffix == ".weight":  # as for matrices that were left alone
            scales = (".weight_scale", ".weight_scale_inv")
            modules = {m for m in modules if any(m + scale in names for scale in scales)}
        self._modules = {f"{module}.weight": module for module in modules}
        hidden = {module + part for module in modules for part in (*_COMPANIONS, suffix)}
        self._names = (names - hidden) | self._modules.keys()

    def names(self) -> Iterable[str]:
        return self._names

    def read(self, name: str, shape: tuple[int, ...]) -> StoredTensor:
        module = self._modules.get(name)
        if module is None:
            return self._inner.read(name, shape)
        matrix = self._layout.read(self._inner, module)
        if matrix.q.shape != tuple(shape):
            raise self._inner.error(
                name, f"has shape {list(matrix.q.shape)}; the model's config asks for {list(shape)}"
            )
        if isinstance(matrix, Floats8):
            return StoredTensor(name, "F8_E4M3", tuple(shape), f8_e4m3_blocks(*matrix))
        return self._integers(name, matrix)

    def _integers(self, name: str, matrix: Integers) -> StoredTensor:
        q, scales, zeros = matrix
        rows, columns = q.shape
        groups = scales.shape[1] if scales.ndim == 2 else 0
        if len(scales) != rows or groups < 1 or columns % (groups * BLOCK):
            raise self._inner.error(
                name,
                f"has scales of shape {list(scales.shape)} for {rows} x {columns} values; "
                f"groups must be multiples of {BLOCK} columns",
            )
        if zeros.shape != scales.shape:
            raise self._inner.error(
                name, f"has zero points of shape {list(zeros.shape)} for scales of {scales.shape}"
            )
        if self._layout.bits == 4:
            return StoredTensor(name, "Q4_1", q.shape, q4_1_blocks(q, scales, zeros))
        if (zeros != 128).any():
            raise self._inner.error(name, "has 8-bit integers with zero points; symmetric are read")
        return StoredTensor(name, "Q8_0", q.shape, q8_0_blocks((q ^ 128).view(np.int8), scales))

    @property
    def total_bytes(self) -> int:
        return self._inner.total_bytes


class _GPTQ:
    suffix = ".qweight"

    def __init__(self, bits: int, zero_offset: int) -> None:
        self.bits = bits
        self._zero_offset = zero_offset  # what the first version of the format left out

    def read(self, checkpoint: SafetensorsCheckpoint, module: str) -> Integers:
        words = checkpoint.array(f"{module}.qweight", ("I32",), 2)
        q = unpack_words(np.ascontiguousarray(words.T), self.bits)
        zeros = unpack_words(checkpoint.array(f"{module}.qzeros", ("I32",), 2), self.bits)
        zeros = zeros + np.uint8(self._zero_offset) & np.uint8(2**self.bits - 1)
        scales = checkpoint.numbers(f"{module}.scales", 2)
        if f"{module}.g_idx" in checkpoint.names():
            order = checkpoint.array(f"{module}.g_idx", ("I32",), 1)
            group_size = max(1, len(order) // len(scales))
            if (order != np.arange(len(order)) // group_size).any():
                raise checkpoint.error(
                    f"{module}.g_idx",
                    "puts columns into groups out of order (desc_act), which is not supported",
                )
        return Integers(q, scales.T, zeros.T)


class _AWQ:
    suffix = ".qweight"
    bits = 4

    def read(self, checkpoint: SafetensorsCheckpoint, module: str) -> Integers:
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


class _PackQuantized:
    suffix = ".weight_packed"

    def __init__(self, bits: int) -> None:
        self.bits = bits

    def read(self, checkpoint: SafetensorsCheckpoint, module: str) -> Integers:
        names = checkpoint.names()
        if f"{module}.weight_g_idx" in names:
            raise checkpoint.error(
                f"{module}.weight_g_idx", "permutes columns (actorder), which is not supported"
            )
        q = unpack_words(checkpoint.array(f"{module}.weight_packed", ("I32",), 2), self.bits)
        scales = checkpoint.numbers(f"{module}.weight_scale", 2)
        zeros: NDArray[Any] = np.full(scales.shape, 2 ** (self.bits - 1), np.uint8)
        if f"{module}.weight_zero_point" in names:
            words = checkpoint.array(f"{module}.weight_zero_point", ("I32",), 2)
            zeros = unpack_words(np.ascontiguousarray(words.T), self.bits).T[: len(q)]
        return Integers(q, scales, zeros)


class _IntQuantized:
    suffix = ".weight"
    bits = 8

    def read(self, checkpoint: SafetensorsCheckpoint, module: str) -> Integers:
        q = checkpoint.array(f"{module}.weight", ("I8",), 2).view(np.uint8) ^ np.uint8(128)
        scales = checkpoint.numbers(f"{module}.weight_scale", 2)
        return Integers(q, scales, np.full(scales.shape, 128, np.uint8))


class _Floats8:
    """With one scale, one for each row, or one for each block of rows and columns."""

    suffix = ".weight"
    bits = 8

    def __init__(self, block: tuple[int, int] | None) -> None:
        self._block = block

    def read(self, checkpoint: SafetensorsCheckpoint, module: str) -> Floats8:
        name = f"{module}.weight"
        q = checkpoint.array(name, ("F8_E4M3",), 2)
        rows, columns = q.shape
        if columns % BLOCK:
            raise checkpoint.error(name, f"has {columns} columns; multiples of {BLOCK} are read")
        if (q & 127 == 127).any():
            raise checkpoint.error(name, "has values that are not numbers")
        of_scale = f"{module}.weight_scale"
        if of_scale not in checkpoint.names():
            of_scale += "_inv"
        shape = checkpoint.entry(of_scale).shape
        scales = checkpoint.numbers(of_scale, len(shape))
        scales = scales if scales.ndim == 2 else scales.reshape(-1, 1)
        height, width = self._block or (1 if len(scales) == rows else rows, columns)
        wanted = (-(-rows // height), -(-columns // width))
        if scales.shape != wanted:
            raise checkpoint.error(
                of_scale,
                f"has shape {list(shape)} for {rows} x {columns} values; it must be {list(wanted)}",
            )
        by_row = scales.repeat(height, axis=0)[:rows]
        return Floats8(q, by_row.repeat(width // BLOCK, axis=1)[:, : columns // BLOCK])


def layout_of(config: object) -> Layout:
    """The layout that config.json's quantization_config describes; ModelError if it is not read."""
    if not isinstance(config, dict):
        raise _refused(f"{config!r:.40}")
    method = config.get("quant_method")
    bits = config.get("bits", config.get("w_bit"))
    match method:
        case "gptq" if bits in (4, 8):
            return _GPTQ(bits, 0 if config.get("checkpoint_format") == "gptq_v2" else 1)
        case "awq" if bits == 4 and str(config.get("version", "gemm")).lower() == "gemm":
            return _AWQ()
        case "compressed-tensors":
            return _compressed_tensors(config)
        case "fp8":
            return _Floats8(_block_size(config.get("weight_block_size")))
    raise _refused(f"quant_method {method!r:.40} with {bits!r:.20} bits")


def _compressed_tensors(config: Mapping[str, Any]) -> Layout:
    groups = config.get("config_groups")
    kinds = list(groups.values()) if isinstance(groups, dict) else []
    schemes = [kind.get("weights") for kind in kinds if isinstance(kind, dict)]
    found = {
        (scheme.get("type"), scheme.get("num_bits")) if isinstance(scheme, dict) else None
        for scheme in schemes
    }
    kind = config.get("format")
    if kind == "pack-quantized" and found in ({("int", 4)}, {("int", 8)}):
        return _PackQuantized(4 if ("int", 4) in found else 8)
    if kind == "int-quantized" and found == {("int", 8)}:
        return _IntQuantized()
    if kind == "float-quantized" and found == {("float", 8)}:
        blocks = {str(scheme.get("block_structure")): scheme for scheme in schemes if scheme}
        if len(blocks) == 1:
            return _Floats8(_block_size(next(iter(blocks.values())).get("block_structure")))
    raise _refused(f"compressed-tensors of format {kind!r:.40}")


def _block_size(sizes: object) -> tuple[int, int] | None:
    """Rows and columns that share a scale; None if the config does not say."""
    if sizes is None:
        return None
    if isinstance(sizes, str):  # such as "128x128"
        sizes = [int(size) if size.isdigit() else size for size in sizes.split("x")]
    match sizes:
        case [int(height), int(width)] if height > 0 and width > 0 and width % BLOCK == 0:
            return height, width
    raise _refused(f"8-bit floats in blocks of {sizes!r:.40}")


def _refused(what: str) -> ModelError:
    return ModelError(
        f"config.json: quantization_config: {what} is not supported; there are: gptq with 4 and 8 "
        "bits, awq (gemm) with 4, compressed-tensors pack-quantized with 4 and 8, int-quantized "
        "and float-quantized with 8, fp8; or use the original model, or a GGUF file of it"
    )
