"""Linear layers of integers, slowly: exact integers, then floats in the promised order.

What a stored block's integers are, the gguf package tells: its values where the block's scale is
one and its minimum zero, and the other way round. NVFP4's are read here, scales by
torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float32]
    Bytes = NDArray[np.uint8]

GROUP = 32
HIGHEST = {16: np.float32(16383), 8: np.float32(127)}  # by bits of activations
ONE_AS_EXPONENT = 128  # of MXFP4, whose integers are doubled


class Form(NamedTuple):
    """A packing and the stored type it holds: where a block's scale and minimum lie."""

    stored_type: str
    scale_at: int
    minimum_at: int | None = None
    minima: int = 0  # of a group
    sign: int = 1  # of what the minimum is multiplied by
    sums: int = 1  # of a group, each with a scale of its own


FORMS = {
    "q8": Form("Q8_0", 0),
    "q4": Form("Q4_1", 0, 2, 1),
    "q4_0": Form("Q4_0", 0),
    "q5_0": Form("Q5_0", 0),
    "q5_1": Form("Q5_1", 0, 2, 1),
    "q2_k": Form("Q2_K", 80, 82, 2, -1),
    "q3_k": Form("Q3_K", 108),
    "q4_k": Form("Q4_K", 0, 2, 1, -1),
    "q5_k": Form("Q5_K", 0, 2, 1, -1),
    "q6_k": Form("Q6_K", 208),
    "iq4_nl": Form("IQ4_NL", 0),
    "iq4_xs": Form("IQ4_XS", 0),
    "mxfp4": Form("MXFP4", 0),
    "nvfp4": Form("NVFP4", 4, sums=2),
}
LARGEST_E4M3 = 126
NVFP4_BYTES = 22  # the row's factor, two scales, 32 codes of which neighbours share a byte
FLOAT4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


@dataclass(frozen=True)
class Blocks:
    """A matrix as a file has it: bytes [rows, blocks, bytes of a block]."""

    packing: str
    data: Bytes

    @property
    def form(self) -> Form:
        return FORMS[self.packing]

    @property
    def rows(self) -> int:
        return len(self.data)

    @property
    def columns(self) -> int:
        return int(self.data.shape[1]) * block_values(self.packing)

    def values(self) -> Floats:
        """[rows, columns]"""
        return self._dequantized(self.data)

    def integers(self) -> NDArray[np.int64]:
        """With their small scales: [rows, groups, 32]."""
        if self.packing == "nvfp4":
            return (2 * self._floats()).astype(np.int64)
        return self._with(1, 0).astype(np.int64).reshape(self.rows, -1, GROUP)

    def scales(self) -> Floats:
        """[rows, groups, sums of a group]"""
        return self._scales().reshape(self.rows, -1, self.form.sums)

    def _scales(self) -> Floats:
        if self.packing == "nvfp4":
            return np.asarray(self._eight_bit_scales() * (self._factors() / 2), np.float32)
        if self.packing == "mxfp4":
            return np.ldexp(np.float32(1), self.data[..., 0].astype(np.int32) - ONE_AS_EXPONENT)
        return self._halves(self.form.scale_at)

    def minima(self) -> Floats:
        """[rows, groups, minima of a group]"""
        form = self.form
        assert form.minimum_at is not None
        small = self._with(0, form.sign).reshape(self.rows, -1, form.minima, GROUP // form.minima)
        halves = self._halves(form.minimum_at)[..., None] * np.float32(form.sign)
        return np.asarray(halves * small[..., 0], np.float32)

    def _floats(self) -> Floats:
        """[rows, groups, 32]"""
        codes = self.data[..., 6:]
        return FLOAT4[np.stack([codes & 15, codes >> 4], -1)].reshape(self.rows, -1, GROUP)

    def _eight_bit_scales(self) -> Floats:
        """[rows, groups, 2]"""
        bits = np.ascontiguousarray(self.data[..., 4:6])
        return torch.from_numpy(bits).view(torch.float8_e4m3fn).float().numpy()

    def _factors(self) -> Floats:
        """[rows, groups, 1]"""
        return np.ascontiguousarray(self.data[..., :4]).view(np.float32)

    def _halves(self, at: int) -> Floats:
        halves = np.ascontiguousarray(self.data[..., at : at + 2]).view(np.float16)[..., 0]
        return halves.astype(np.float32).repeat(block_values(self.packing) // GROUP, axis=1)

    def _with(self, scale: int, minimum: int) -> Floats:
        data = self.data.copy()
        set_scales(self.packing, data, np.float16(scale), np.float16(minimum))
        return self._dequantized(data)

    def _dequantized(self, data: Bytes) -> Floats:
        if self.packing == "nvfp4":
            scales = np.asarray(self._eight_bit_scales() * self._factors(), np.float32)
            return (self._floats() * scales.repeat(16, axis=2)).reshape(self.rows, -1)
        values = dequantize(data.reshape(-1), GGMLQuantizationType[self.form.stored_type])
        return np.asarray(values, np.float32).reshape(self.rows, -1)


def block_sizes(packing: str) -> tuple[int, int]:
    """Values and bytes."""
    if packing == "nvfp4":
        return GROUP, NVFP4_BYTES
    values, num_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[FORMS[packing].stored_type]]
    return int(values), int(num_bytes)


def block_values(packing: str) -> int:
    return block_sizes(packing)[0]


def set_scales(packing: str, data: Bytes, scale: NDArray[np.float16] | np.float16,
               minimum: NDArray[np.float16] | np.float16) -> None:  # fmt: skip
    """Of all blocks."""
    form = FORMS[packing]
    if packing == "mxfp4":
        data[..., 0] = ONE_AS_EXPONENT
        return
    if packing == "nvfp4":
        data[..., 4:6] = LARGEST_E4M3
        data[..., :4] = np.ones((len(data), 1, 1), np.float32).view(np.uint8)
        return
    for at, value in ((form.scale_at, scale), (form.minimum_at, minimum)):
        if at is not None:
            halves = np.broadcast_to(value, data.shape[:-1]).astype(np.float16)
            data[..., at : at + 2] = halves[..., None].view(np.uint8)


def random_blocks(packing: str, rows: int, blocks: int, seed: int) -> Blocks:
    """Every bit of the integers and small scales at random; blocks of very different sizes."""
    _, num_bytes = block_sizes(packing)
    rng = np.random.default_rng(seed)
    data = rng.integers(0, 256, (rows, blocks, num_bytes), dtype=np.uint8)
    scale, minimum = (rng.uniform(-0.1, 0.1, (rows, blocks)).astype(np.float16) for _ in range(2))
    set_scales(packing, data, scale, minimum)
    if packing == "mxfp4":
        data[..., 0] = rng.integers(120, 132, (rows, blocks))
    if packing == "nvfp4":  # all scales that are numbers, also subnormal ones
        data[..., 4:6] = rng.integers(0, LARGEST_E4M3 + 1, (rows, blocks, 2))
        factors = rng.uniform(1e-4, 1e-2, (rows, 1, 1)).astype(np.float32)
        data[..., :4] = factors.view(np.uint8)
    return Blocks(packing, data)


def fma(a: Floats, b: Floats, c: Floats) -> Floats:
    """a * b + c rounded once: the product and the sum of two floats' product fit a long double."""
    wide = [np.asarray(v, np.longdouble) for v in (a, b, c)]
    return (wide[0] * wide[1] + wide[2]).astype(np.float32)


class Activations(NamedTuple):
    q: NDArray[np.int64]  # [rows, groups, 32]
    scale: Floats

    def values(self) -> Floats:
        return (self.q * self.scale[..., None]).astype(np.float32).reshape(len(self.q), -1)

    def sums(self, parts: int) -> Floats:
        """Of each part of each group: [rows, groups, parts]."""
        integers = self.q.reshape(*self.q.shape[:2], parts, -1).sum(-1).astype(np.float32)
        return np.asarray(self.scale[..., None] * integers, np.float32)


def quantize(x: Floats, bits: int = 16) -> Activations:
    """Each group of 32 columns by its largest value."""
    highest = HIGHEST[bits]
    padded = np.pad(x, [(0, 0), (0, -x.shape[1] % GROUP)]).reshape(len(x), -1, GROUP)
    largest = np.abs(padded).max(-1)
    is_zero = largest < np.float32(1e-30)
    safe = np.where(is_zero, np.float32(1), largest)
    scale = np.where(is_zero, np.float32(0), largest / highest)
    factor = np.where(is_zero, np.float32(0), highest / safe)
    # Products of floats are exact as doubles, and so they are rounded once, ties to even.
    exact = padded.astype(np.float64) * factor[..., None].astype(np.float64)
    return Activations(np.rint(exact).astype(np.int64), scale)


def linear(x: Floats, weight: Blocks, bits: int = 16) -> Floats:
    """x · wᵀ: a chain over ascending groups, of exact integer dot products times both scales."""
    a = quantize(x, bits)
    q, scales = weight.integers(), weight.scales()
    total = np.zeros((len(x), weight.rows), np.float32)
    num_minima, num_sums = weight.form.minima, weight.form.sums
    minima, sums = (weight.minima(), a.sums(num_minima)) if num_minima else (None, None)
    for g in range(q.shape[1]):
        for part in range(num_sums):
            columns = slice(part * GROUP // num_sums, (part + 1) * GROUP // num_sums)
            dot = (a.q[:, g, columns] @ q[:, g, columns].T).astype(np.float32)
            total = fma(dot, scales[:, g, part] * a.scale[:, g, None], total)
        for part in range(num_minima):
            assert minima is not None
            assert sums is not None
            minimum = np.broadcast_to(minima[:, g, part], total.shape)
            total = fma(minimum, sums[:, g, part, None], total)
    return total
