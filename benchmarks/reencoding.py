"""What each GGUF type makes of a matrix: plain rounding to the numbers that it can hold.

Encoders that search for better scales, or weigh columns by how large their activations are, lose
less, above all with 2 and 3 bits; so these are upper bounds of what a type costs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from gguf import GGMLQuantizationType
from gguf.quants import IQ4_NL, dequantize, quantize

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    Floats = NDArray[np.float32]

SUPER_BLOCK = 256
TYPES = (
    "Q8_0", "Q6_K", "Q5_K", "Q5_1", "Q5_0", "Q4_K", "Q4_1", "Q4_0", "IQ4_XS", "IQ4_NL", "MXFP4",
    "Q3_K", "Q2_K",
)  # fmt: skip


def round_to(kind: str, matrix: Floats) -> Floats:
    """The values that the matrix [rows, columns] has once it is stored as this type."""
    rows, columns = matrix.shape
    block = 32 if kind not in _ENCODERS or kind == "IQ4_NL" else SUPER_BLOCK
    # Where columns fill no block a file would take another type; here zeros fill it up.
    padded = np.pad(matrix, [(0, 0), (0, -columns % block)])
    if kind in _ENCODERS:
        values = _ENCODERS[kind](padded.reshape(-1, block))
    else:
        of_gguf = GGMLQuantizationType[kind]
        values = np.asarray(dequantize(quantize(padded, of_gguf), of_gguf), np.float32)
    return np.asarray(values.reshape(rows, -1)[:, :columns], np.float32)


def _affine(blocks: Floats, *, subs: int, steps: int, small: int) -> Floats:
    """Codes 0 … steps, with a scale and a minimum for each sub-block, each one of 0 … small."""
    x = blocks.reshape(len(blocks), subs, -1)
    low, high = np.minimum(x.min(-1), 0), np.maximum(x.max(-1), 0)
    scale = _small((high - low) / np.float32(steps), small)[..., None]
    minimum = _small(-low, small)[..., None]
    codes = np.rint(_divided(x + minimum, scale)).clip(0, steps)
    return (codes * scale - minimum).astype(np.float32)


def _centred(blocks: Floats, *, subs: int, half: int, small: int) -> Floats:
    """Codes -half … half - 1, with a scale for each sub-block, which is one of -small … small."""
    x = blocks.reshape(len(blocks), subs, -1)
    scale = _small(_furthest(x) / np.float32(-half), small)[..., None]
    codes = np.rint(_divided(x, scale)).clip(-half, half - 1)
    return (codes * scale).astype(np.float32)


def _nonlinear(blocks: Floats, *, subs: int, small: int | None) -> Floats:
    """The nearest entries of a table, with a scale as above; or with one in half precision."""
    table = np.array(IQ4_NL.kvalues, np.float32)
    x = blocks.reshape(len(blocks), subs, -1)
    exact = _furthest(x) / table[0]
    scale = (_half(exact) if small is None else _small(exact, small))[..., None]
    between = (table[1:] + table[:-1]) / 2
    return np.asarray(table[np.searchsorted(between, _divided(x, scale))] * scale, np.float32)


def _small(scales: Floats, largest: int) -> Floats:
    """Multiples of a number in half precision that the block [blocks, subs] shares."""
    unit = _half(np.abs(scales).max(-1, keepdims=True) / largest)
    return np.rint(_divided(scales, unit)).clip(-largest, largest) * unit


def _furthest(x: Floats) -> Floats:
    """The value furthest from zero, along the last axis."""
    return np.take_along_axis(x, np.abs(x).argmax(-1)[..., None], -1)[..., 0]


def _half(values: Floats) -> Floats:
    return values.astype(np.float16).astype(np.float32)


def _divided(values: Floats, by: Floats) -> Floats:
    return np.asarray(values / np.where(by == 0, np.float32(np.inf), by), np.float32)


_ENCODERS: dict[str, Callable[..., Any]] = {
    "Q2_K": lambda blocks: _affine(blocks, subs=16, steps=3, small=15),
    "Q3_K": lambda blocks: _centred(blocks, subs=16, half=4, small=31),
    "Q4_K": lambda blocks: _affine(blocks, subs=8, steps=15, small=63),
    "Q5_K": lambda blocks: _affine(blocks, subs=8, steps=31, small=63),
    "Q6_K": lambda blocks: _centred(blocks, subs=16, half=32, small=127),
    "IQ4_NL": lambda blocks: _nonlinear(blocks, subs=1, small=None),
    "IQ4_XS": lambda blocks: _nonlinear(blocks, subs=8, small=31),
}
