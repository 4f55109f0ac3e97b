"""HQQ's matrices: integers with scales and zero points that need not be whole numbers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from octavo_engine.weights.checkpoint import StoredTensor
from octavo_engine.weights.integer_blocks import BLOCK, q4_1_blocks

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from octavo_engine.weights.safetensors import SafetensorsCheckpoint

# What a module's tensors are called besides; most describe the others.
HQQ_PARTS = tuple(
    f".{name}"
    for name in (
        "scale", "zero", "shape", "axis", "group_size", "nbits", "packing", "view_as_float",
        "unpack_view_dtype", "compute_dtype", "quant_scale", "quant_zero", "channel_wise",
        "optimize", "round_zero", "offload_meta", "encoded_state_dict", "stores_quant_config",
    )
)  # fmt: skip


class _Packing(NamedTuple):
    bits: int
    dtype: str
    per_word: int  # numbers; the first is in the highest bits that are used


_PACKINGS = {
    "8bit_u8": _Packing(8, "U8", 1),
    "4bit_u8": _Packing(4, "U8", 2),
    "3bit_32": _Packing(3, "I32", 10),
    "2bit_u8": _Packing(2, "U8", 4),
    "1bit_u8": _Packing(1, "U8", 8),
}


class Hqq:
    """Each module says itself how it is packed. Groups along the input whose zero points a block
    of Q4_1 can hold keep 4 bits; other matrices are widened."""

    suffix = ".W_q"
    scale = ".scale"
    stored_types: tuple[str, ...] = ("Q4_1", "F32")

    def read(
        self, checkpoint: SafetensorsCheckpoint, name: str, module: str, shape: tuple[int, ...]
    ) -> StoredTensor:
        if _integers(checkpoint, f"{module}.shape") != list(shape):
            raise checkpoint.error(
                f"{module}.shape", f"does not say {list(shape)}, as the model's config asks for"
            )
        packing = _packing(checkpoint, module)
        rows, columns = shape
        axis = _integer(checkpoint, f"{module}.axis")
        if axis not in (0, 1):
            raise checkpoint.error(f"{module}.axis", f"must be 0 or 1; got {axis}")
        size = columns if axis == 1 else rows
        if f"{module}.group_size" in checkpoint.names():
            size = _integer(checkpoint, f"{module}.group_size")
        count = math.prod(shape)
        if size < 1 or count % size:
            raise checkpoint.error(
                f"{module}.group_size", f"is {size}, which does not divide {count} values"
            )
        # Groups are rows, or columns, of the matrix in another shape.
        lines = (count // size, size) if axis == 1 else (size, count // size)
        q = _unpacked(checkpoint, module + self.suffix, packing, lines)
        wanted = (lines[0], 1) if axis == 1 else (1, lines[1])
        scales, zeros = (
            _factors(checkpoint, f"{module}.{part}", wanted) for part in ("scale", "zero")
        )
        if axis == 1 and packing.bits <= 4 and size % BLOCK == 0 and columns % size == 0:
            own = (rows, columns // size)
            data = q4_1_blocks(q.reshape(shape), scales.reshape(own), zeros.reshape(own))
            return StoredTensor(name, "Q4_1", tuple(shape), data)
        values = (q.astype(np.float32) - zeros) * scales
        data = np.ascontiguousarray(values).view(np.uint8).reshape(-1)
        return StoredTensor(name, "F32", tuple(shape), data)


def _packing(checkpoint: SafetensorsCheckpoint, module: str) -> _Packing:
    for flag in ("view_as_float", "quant_scale", "quant_zero"):
        name = f"{module}.{flag}"
        if name in checkpoint.names() and _integer(checkpoint, name) != 0:
            raise checkpoint.error(name, "is set: HQQ's files of this form are not read")
    name = f"{module}.packing"
    spelling = checkpoint.array(name, ("U8",), 1).tobytes().decode("latin-1")
    if spelling not in _PACKINGS:
        raise checkpoint.error(name, f"must be one of {', '.join(_PACKINGS)}; got {spelling!r:.20}")
    return _PACKINGS[spelling]


def _unpacked(
    checkpoint: SafetensorsCheckpoint, name: str, packing: _Packing, shape: tuple[int, int]
) -> NDArray[np.uint8]:
    """A word holds numbers of rows that are as far apart as there are rows of words."""
    words = checkpoint.array(name, (packing.dtype,), 2)
    rows = -(-shape[0] // packing.per_word)
    if words.shape != (rows, shape[1]):
        raise checkpoint.error(
            name, f"has shape {list(words.shape)} for {shape[0]} x {shape[1]} values of "
            f"{packing.bits} bits"
        )  # fmt: skip
    shifts = packing.bits * np.arange(packing.per_word - 1, -1, -1)
    fields = words[None] >> shifts[:, None, None].astype(words.dtype)
    values = (fields & (2**packing.bits - 1)).astype(np.uint8)
    return np.ascontiguousarray(values.reshape(-1, shape[1])[: shape[0]])


def _factors(
    checkpoint: SafetensorsCheckpoint, name: str, shape: tuple[int, int]
) -> NDArray[np.float32]:
    factors = checkpoint.numbers(name, len(checkpoint.entry(name).shape))
    if factors.size == 1:
        return np.broadcast_to(factors.reshape(1, 1), shape)
    if factors.shape != shape:
        raise checkpoint.error(name, f"has shape {list(factors.shape)}; it must be {list(shape)}")
    return factors


def _integer(checkpoint: SafetensorsCheckpoint, name: str) -> int:
    values = _integers(checkpoint, name)
    if len(values) != 1:
        raise checkpoint.error(name, f"must be one number; got {values!r:.40}")
    return values[0]


def _integers(checkpoint: SafetensorsCheckpoint, name: str) -> list[int]:
    entry = checkpoint.entry(name)
    array = checkpoint.array(name, ("U8", "I32", "I64"), len(entry.shape))
    return [int(value) for value in array.reshape(-1)[:8]]
