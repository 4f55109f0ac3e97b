"""Rotary embeddings: from a rope's settings to the inverse frequencies that backends turn heads by.

All steps are in float32 in the order that `transformers` takes them, because a small difference in
a frequency is a large one at a late position. Variants whose frequencies depend on a sequence's
length (dynamic, longrope) are settled once, for the longest sequence that the engine serves: a
cached key must not change when its sequence grows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np

from octavo_engine.ops import Rope

if TYPE_CHECKING:
    from numpy.typing import NDArray

RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """A rope as config.json describes it; fields of other kinds keep their defaults."""

    kind: RopeKind = "default"
    theta: float = 10000.0
    rotary_dim: int  # columns of a head that turn
    max_positions: int  # the model's own limit
    factor: float = 1.0
    original_max_positions: int = 0  # before the context was extended
    attention_factor: float | None = None  # None: what the paper recommends
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    short_factor: tuple[float, ...] = ()  # longrope
    long_factor: tuple[float, ...] = ()
    sections: tuple[int, int, int] | None = None  # pairs by axis
    is_interleaved: bool = False  # they lie in turn


def make_rope(config: RopeConfig, max_model_len: int) -> Rope:
    """The rope for sequences of up to `max_model_len` tokens."""
    turned = _turned(config, max_model_len)
    return replace(turned, sections=config.sections, is_interleaved=config.is_interleaved)


def axial_rope(theta: float, head_dim: int, *, alternates: bool = False) -> Rope:
    """Of patches: half of the pairs turn by the line that a patch is in, half by its column. Both
    have the same frequencies, or take turns at those of a whole head."""
    num_pairs = head_dim // 4
    rotary_dim = (4 if alternates else 2) * num_pairs
    config = RopeConfig(theta=theta, rotary_dim=rotary_dim, max_positions=1)
    inverse = _inverse(_powers(config))
    by_axis = [inverse[0::2], inverse[1::2]] if alternates else [inverse, inverse]
    return Rope(np.concatenate(by_axis), sections=(0, num_pairs, num_pairs))


def _turned(config: RopeConfig, max_model_len: int) -> Rope:
    match config.kind:
        case "default":
            return Rope(_inverse(_powers(config)))
        case "linear":
            return Rope(_inverse(_powers(config)) / np.float32(config.factor))
        case "dynamic":
            return Rope(_dynamic(config, max_model_len))
        case "llama3":
            return Rope(_llama3(config))
        case "yarn":
            return Rope(_yarn(config), _yarn_attention_factor(config))
        case "longrope":
            return Rope(_longrope(config, max_model_len), _longrope_attention_factor(config))


def _powers(config: RopeConfig, theta: float | None = None) -> NDArray[np.float32]:
    exponents = np.arange(0, config.rotary_dim, 2, dtype=np.float32) / np.float32(config.rotary_dim)
    base = np.float32(config.theta if theta is None else theta)
    return np.asarray(base**exponents, dtype=np.float32)


def _inverse(powers: NDArray[np.float32]) -> NDArray[np.float32]:
    return np.asarray(1 / powers, dtype=np.float32)


def _dynamic(config: RopeConfig, max_model_len: int) -> NDArray[np.float32]:
    """NTK-aware: a larger base stretches the slow frequencies and keeps the fast ones."""
    length = max(max_model_len, config.max_positions)
    stretch = config.factor * length / config.max_positions - (config.factor - 1)
    dim = config.rotary_dim
    return _inverse(_powers(config, config.theta * stretch ** (dim / (dim - 2))))


def _llama3(config: RopeConfig) -> NDArray[np.float32]:
    """Slow frequencies divided by the factor, fast ones kept, those between blended."""
    inv_freq = _inverse(_powers(config))
    length = np.float32(config.original_max_positions)
    low, high = np.float32(config.low_freq_factor), np.float32(config.high_freq_factor)
    factor = np.float32(config.factor)
    wavelength = np.float32(2 * math.pi) / inv_freq
    slow, fast = wavelength > length / low, wavelength < length / high
    # With equal factors, as Llama 4 has them, nothing lies between.
    share = (length / wavelength - low) / (high - low if high > low else np.float32(1))
    blended = (1 - share) * inv_freq / factor + share * inv_freq
    kept = np.where(fast, inv_freq, blended)
    return np.asarray(np.where(slow, inv_freq / factor, kept), dtype=np.float32)


def _yarn(config: RopeConfig) -> NDArray[np.float32]:
    """Frequencies that turn often within the original context are kept, slow ones interpolated."""
    dim = config.rotary_dim

    def pair_that_turns(times: float) -> float:
        turns = math.log(config.original_max_positions / (times * 2 * math.pi))
        return dim * turns / (2 * math.log(config.theta))

    first, last = pair_that_turns(config.beta_fast), pair_that_turns(config.beta_slow)
    if config.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    if first == last:
        last += 0.001  # a step, not a division by zero
    pairs = np.arange(dim // 2, dtype=np.float32)
    ramp = np.clip((pairs - np.float32(first)) / np.float32(last - first), 0, 1)
    powers = _powers(config)
    keep = 1 - ramp
    interpolated = _inverse(np.float32(config.factor) * powers)
    return np.asarray(interpolated * (1 - keep) + _inverse(powers) * keep, dtype=np.float32)


def _yarn_attention_factor(config: RopeConfig) -> float:
    if config.attention_factor is not None:
        return config.attention_factor

    def magnitude(mscale: float) -> float:
        return 1.0 if config.factor <= 1 else 0.1 * mscale * math.log(config.factor) + 1.0

    if config.mscale and config.mscale_all_dim:
        return magnitude(config.mscale) / magnitude(config.mscale_all_dim)
    return magnitude(1.0)


def _longrope(config: RopeConfig, max_model_len: int) -> NDArray[np.float32]:
    is_long = max_model_len > config.original_max_positions
    factors = np.array(config.long_factor if is_long else config.short_factor, dtype=np.float32)
    return _inverse(factors * _powers(config))


def _longrope_attention_factor(config: RopeConfig) -> float:
    if config.attention_factor is not None:
        return config.attention_factor
    if config.factor <= 1:
        return 1.0
    return math.sqrt(1 + math.log(config.factor) / math.log(config.original_max_positions))
