"""What each GGUF type, or format of safetensors, makes of a matrix: plain rounding to the numbers
that it can hold.

Encoders that search for better scales, or weigh columns by how large their activations are, lose
less, above all with 2 and 3 bits; so these are upper bounds of what a type costs. GPTQ, AWQ,
AutoRound and HQQ are such encoders: their rows here are what their files can hold, not what the
methods make of a model.
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


# As config.json names them; g: columns that share a scale.
FORMATS = (
    "int8, rows", "fp8, rows", "fp8, 128x128", "gptq 8, g128", "gptq 4, g128", "awq 4, g128",
    "hqq 4, g64", "gptq 3, g128", "gptq 2, g64", "nvfp4", "mxfp4", "bnb nf4, g64",
)  # fmt: skip


def round_to(kind: str, matrix: Floats) -> Floats:
    """The values that the matrix [rows, columns] has once it is stored as this type."""
    rows, columns = matrix.shape
    if kind in _OF_ROWS:
        return np.asarray(_OF_ROWS[kind](matrix), np.float32)
    if kind in _OF_GROUPS:
        group, of_groups = _OF_GROUPS[kind]
        padded = np.pad(matrix, [(0, 0), (0, -columns % group)])
        values = of_groups(padded.reshape(-1, group))
        return np.asarray(values.reshape(rows, -1)[:, :columns], np.float32)
    kind = kind.upper()
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


def _symmetric(groups: Floats, bits: int) -> Floats:
    """Codes -2^(bits-1) … 2^(bits-1) - 1; the value furthest from zero is the first of them."""
    half = 2 ** (bits - 1)
    scale = _half(_furthest(groups) / np.float32(-half))[..., None]
    return np.rint(_divided(groups, scale)).clip(-half, half - 1).astype(np.float32) * scale


def _with_zeros(groups: Floats, bits: int, *, whole: bool) -> Floats:
    """Codes 0 … 2^bits - 1 and a zero point, which may have to be one of them."""
    steps = 2**bits - 1
    low, high = np.minimum(groups.min(-1), 0), np.maximum(groups.max(-1), 0)
    scale = _half((high - low) / np.float32(steps))[..., None]
    zero = _divided(-low[..., None], scale)
    zero = np.rint(zero).clip(0, steps) if whole else _half(zero)
    codes = np.rint(_divided(groups, scale) + zero).clip(0, steps)
    return np.asarray((codes - zero) * scale, np.float32)


def _to_levels(x: Floats, levels: Floats) -> Floats:
    """The nearest of the levels, which ascend."""
    between = (levels[1:] + levels[:-1]) / 2
    return np.asarray(levels[np.searchsorted(between, x)], np.float32)


def _fp8(matrix: Floats, rows: int, columns: int) -> Floats:
    """e4m3, with a scale for each block."""
    padded = np.pad(matrix, [(0, -matrix.shape[0] % rows), (0, -matrix.shape[1] % columns)])
    blocks = padded.reshape(len(padded) // rows, rows, -1, columns)
    scale = np.abs(blocks).max((1, 3), keepdims=True) / _E4M3[-1]
    rounded = _to_levels(_divided(blocks, scale), _E4M3) * scale
    return np.asarray(rounded.reshape(padded.shape)[: len(matrix), : matrix.shape[1]], np.float32)


def _nvfp4(groups: Floats) -> Floats:
    """e2m1, with a scale in e4m3 for each group and one for the matrix."""
    largest = np.abs(groups).max(-1, keepdims=True)
    whole = _E4M3[-1] * _E2M1[-1] / max(float(largest.max()), 1e-30)
    scale = _to_levels(largest / _E2M1[-1] * np.float32(whole), _E4M3) / np.float32(whole)
    return np.asarray(_to_levels(_divided(groups, scale), _E2M1) * scale, np.float32)


def _nf4(groups: Floats) -> Floats:
    largest = np.abs(groups).max(-1, keepdims=True)
    return np.asarray(_to_levels(_divided(groups, largest), _NF4) * largest, np.float32)


def _both_signs(magnitudes: list[float]) -> Floats:
    return np.array(sorted({*magnitudes, *(-x for x in magnitudes)}), np.float32)


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


_E2M1 = _both_signs([0, 0.5, 1, 1.5, 2, 3, 4, 6])
_E4M3 = _both_signs(
    [m * 2.0**-9 for m in range(8)]
    + [(8 + m) * 2.0 ** (e - 10) for e in range(1, 16) for m in range(8) if (e, m) != (15, 7)]
)
# Quantiles of a normal distribution, as QLoRA's paper has them.
_NF4 = np.array(
    [-1.0, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.09105004, 0.0,
     0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0],
    np.float32,
)  # fmt: skip

_OF_ROWS: dict[str, Callable[[Floats], Floats]] = {
    "int8, rows": lambda matrix: _symmetric(matrix, 8),
    "fp8, rows": lambda matrix: _fp8(matrix, 1, matrix.shape[1]),
    "fp8, 128x128": lambda matrix: _fp8(matrix, 128, 128),
}
_OF_GROUPS: dict[str, tuple[int, Callable[[Floats], Floats]]] = {
    "gptq 8, g128": (128, lambda groups: _symmetric(groups, 8)),
    "gptq 4, g128": (128, lambda groups: _symmetric(groups, 4)),
    "awq 4, g128": (128, lambda groups: _with_zeros(groups, 4, whole=True)),
    "hqq 4, g64": (64, lambda groups: _with_zeros(groups, 4, whole=False)),
    "gptq 3, g128": (128, lambda groups: _symmetric(groups, 3)),
    "gptq 2, g64": (64, lambda groups: _with_zeros(groups, 2, whole=True)),
    "nvfp4": (16, _nvfp4),
    "bnb nf4, g64": (64, _nf4),
}
_ENCODERS: dict[str, Callable[..., Any]] = {
    "Q2_K": lambda blocks: _affine(blocks, subs=16, steps=3, small=15),
    "Q3_K": lambda blocks: _centred(blocks, subs=16, half=4, small=31),
    "Q4_K": lambda blocks: _affine(blocks, subs=8, steps=15, small=63),
    "Q5_K": lambda blocks: _affine(blocks, subs=8, steps=31, small=63),
    "Q6_K": lambda blocks: _centred(blocks, subs=16, half=32, small=127),
    "IQ4_NL": lambda blocks: _nonlinear(blocks, subs=1, small=None),
    "IQ4_XS": lambda blocks: _nonlinear(blocks, subs=8, small=31),
}
