"""Samples of any rate brought to another one by a windowed sinc, phase by phase."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

_ZERO_CROSSINGS = 24  # of the sinc, on either side
_BETA = 9.0  # of the Kaiser window
_CHUNK = 1 << 16  # outputs of a phase at a time: what bounds the memory


def resample(samples: NDArray[np.float32], rate: int, wanted: int) -> NDArray[np.float32]:
    """The same sound at `wanted` samples a second."""
    if rate == wanted or not len(samples):
        return samples
    common = math.gcd(rate, wanted)
    up, down = wanted // common, rate // common
    cut = min(1.0, wanted / rate)  # nothing above half of the lower rate
    reach = math.ceil(_ZERO_CROSSINGS / cut)
    count = -(-len(samples) * up // down)
    padded = np.concatenate(
        [np.zeros(reach, np.float32), samples, np.zeros(reach + down + 1, np.float32)]
    )
    windows = np.lib.stride_tricks.sliding_window_view(padded, 2 * reach + 1)
    result = np.empty(count, np.float32)
    for phase in range(min(up, count)):
        first, offset = divmod(phase * down, up)
        taps = _taps(offset / up, reach, cut)
        num_outputs = len(range(phase, count, up))
        for begin in range(0, num_outputs, _CHUNK):
            end = min(begin + _CHUNK, num_outputs)
            own = windows[first + begin * down : first + (end - 1) * down + 1 : down]
            result[phase + begin * up : phase + (end - 1) * up + 1 : up] = own @ taps
    return result


def _taps(fraction: float, reach: int, cut: float) -> NDArray[np.float32]:
    """Weights of the samples around a point that lies so far behind one of them."""
    distance = np.arange(-reach, reach + 1) - fraction
    inside = np.clip(1.0 - (distance * cut / _ZERO_CROSSINGS) ** 2, 0.0, None)
    window = np.i0(_BETA * np.sqrt(inside)) / np.i0(_BETA)
    weights = cut * np.sinc(distance * cut) * window
    taps: NDArray[np.float32] = (weights / weights.sum()).astype(np.float32)
    return taps
