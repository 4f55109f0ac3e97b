"""Log-mel spectrograms of 16 kHz samples, equal to those that Whisper was trained on."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

SAMPLE_RATE = 16_000
HOP = 160  # samples between frames: a hundredth of a second
_WINDOW = 400  # samples of a frame
_FLOOR = 1e-10
_DYNAMIC_RANGE = 8.0  # what is so many powers of ten below the loudest counts as silence
_MAX_HZ = 8000.0
_LINEAR_HZ = 1000.0  # the mel scale is linear up to here, then logarithmic
_LINEAR_MELS = 15.0
_LOG_STEP = 27.0 / np.log(6.4)


def log_mel(samples: NDArray[np.float32], num_mels: int, num_frames: int) -> NDArray[np.float32]:
    """Of a window of `num_frames` hundredths of a second: [num_frames, num_mels]. Missing samples
    are silence; more than fit are cut off."""
    wanted = num_frames * HOP
    signal = np.zeros(wanted, np.float64)
    signal[: min(len(samples), wanted)] = samples[:wanted]
    padded = np.pad(signal, _WINDOW // 2, mode="reflect")
    frames = np.lib.stride_tricks.sliding_window_view(padded, _WINDOW)[::HOP][:num_frames]
    power = np.abs(np.fft.rfft(frames * _hann(), axis=1)) ** 2
    spectrum = np.log10(np.maximum(power @ _filters(num_mels), _FLOOR))
    spectrum = np.maximum(spectrum, spectrum.max() - _DYNAMIC_RANGE)
    result: NDArray[np.float32] = ((spectrum + 4.0) / 4.0).astype(np.float32)
    return result


def feature_rows(frames: NDArray[np.float32]) -> NDArray[np.float32]:
    """What the encoder reads: [frames / 2, 4 * mels]. Row i has frames 2 i - 1 to 2 i + 2; beside
    the window there are zeros."""
    count, num_mels = frames.shape
    padded = np.zeros((count + 2, num_mels), np.float32)
    padded[1:-1] = frames
    rows = np.lib.stride_tricks.sliding_window_view(padded, 4, axis=0)[::2]
    return np.ascontiguousarray(rows.transpose(0, 2, 1)).reshape(count // 2, 4 * num_mels)


@lru_cache(maxsize=1)
def _hann() -> NDArray[np.float64]:
    """Periodic, as for a frame that goes on."""
    turns: NDArray[np.float64] = np.arange(_WINDOW) / _WINDOW
    return 0.5 - 0.5 * np.cos(2 * np.pi * turns)


@lru_cache(maxsize=4)
def _filters(num_mels: int) -> NDArray[np.float64]:
    """Triangles of equal area on the mel scale, [frequencies, mels]."""
    corners = _to_hz(np.linspace(0.0, _to_mels(_MAX_HZ), num_mels + 2))
    frequencies = np.linspace(0.0, SAMPLE_RATE / 2, _WINDOW // 2 + 1)
    widths = np.diff(corners)
    distance = corners[None, :] - frequencies[:, None]
    rising = -distance[:, :-2] / widths[:-1]
    falling = distance[:, 2:] / widths[1:]
    triangles: NDArray[np.float64] = np.maximum(0.0, np.minimum(rising, falling))
    return triangles * (2.0 / (corners[2:] - corners[:-2]))


def _to_mels(hz: float) -> float:
    if hz < _LINEAR_HZ:
        return hz * _LINEAR_MELS / _LINEAR_HZ
    return float(_LINEAR_MELS + np.log(hz / _LINEAR_HZ) * _LOG_STEP)


def _to_hz(mels: NDArray[np.float64]) -> NDArray[np.float64]:
    linear = mels * _LINEAR_HZ / _LINEAR_MELS
    logarithmic = _LINEAR_HZ * np.exp((mels - _LINEAR_MELS) / _LOG_STEP)
    hz: NDArray[np.float64] = np.where(mels < _LINEAR_MELS, linear, logarithmic)
    return hz
