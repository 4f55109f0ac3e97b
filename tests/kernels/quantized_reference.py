"""8- and 4-bit linear layers, slowly: exact integers, then floats in the promised order."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float32]

GROUP = 32


class Blocks(NamedTuple):
    """A matrix as GGUF stores it: integers [rows, groups, 32], a scale and a minimum a group."""

    q: NDArray[np.int64]
    scale: Floats
    minimum: Floats

    def values(self) -> Floats:
        """[rows, columns]"""
        values = self.q.astype(np.float32) * self.scale[..., None] + self.minimum[..., None]
        return values.reshape(len(self.q), -1)


def random_blocks(dtype: str, rows: int, groups: int, seed: int) -> Blocks:
    rng = np.random.default_rng(seed)
    low, high = (-128, 128) if dtype == "q8" else (0, 16)
    scale = rng.uniform(-0.1, 0.1, (rows, groups)).astype(np.float16).astype(np.float32)
    minimum = rng.uniform(-0.5, 0.5, (rows, groups)).astype(np.float16).astype(np.float32)
    q = rng.integers(low, high, (rows, groups, GROUP))
    return Blocks(q, scale, minimum if dtype == "q4" else np.zeros_like(scale))


def stored(dtype: str, blocks: Blocks) -> tuple[NDArray[np.uint8], str]:
    """The blocks' bytes as Q8_0 or Q4_1, and that type's name."""
    scale = blocks.scale.astype(np.float16)[..., None].view(np.uint8)
    if dtype == "q8":
        parts, name = [scale, blocks.q.astype(np.int8).view(np.uint8)], "Q8_0"
    else:
        minimum = blocks.minimum.astype(np.float16)[..., None].view(np.uint8)
        nibbles = (blocks.q[..., :16] | blocks.q[..., 16:] << 4).astype(np.uint8)
        parts, name = [scale, minimum, nibbles], "Q4_1"
    return np.ascontiguousarray(np.concatenate(parts, axis=-1)).reshape(-1), name


def fma(a: Floats, b: Floats, c: Floats) -> Floats:
    """a * b + c rounded once: the product and the sum of two floats' product fit a long double."""
    wide = [np.asarray(v, np.longdouble) for v in (a, b, c)]
    return (wide[0] * wide[1] + wide[2]).astype(np.float32)


class Activations(NamedTuple):
    q: NDArray[np.int64]  # [rows, groups, 32]
    scale: Floats


def quantize(x: Floats) -> Activations:
    """Each group of 32 columns by its largest value."""
    padded = np.pad(x, [(0, 0), (0, -x.shape[1] % GROUP)]).reshape(len(x), -1, GROUP)
    largest = np.abs(padded).max(-1)
    is_zero = largest < np.float32(1e-30)
    safe = np.where(is_zero, np.float32(1), largest)
    scale = np.where(is_zero, np.float32(0), largest / np.float32(32767))
    factor = np.where(is_zero, np.float32(0), np.float32(32767) / safe)
    # Products of floats are exact as doubles, and so they are rounded once, ties to even.
    exact = padded.astype(np.float64) * factor[..., None].astype(np.float64)
    return Activations(np.rint(exact).astype(np.int64), scale)


def linear(x: Floats, weight: Blocks) -> Floats:
    """x · wᵀ: a chain over ascending groups, of exact integer dot products times both scales."""
    a = quantize(x)
    total = np.zeros((len(x), len(weight.q)), np.float32)
    for g in range(weight.q.shape[1]):
        dot = (a.q[:, g] @ weight.q[:, g].T).astype(np.float32)
        total = fma(dot, weight.scale[:, g] * a.scale[:, g, None], total)
        if weight.minimum.any():
            group_sum = a.scale[:, g] * a.q[:, g].sum(-1).astype(np.float32)
            total = fma(
                np.broadcast_to(weight.minimum[:, g], total.shape), group_sum[:, None], total
            )
    return total
