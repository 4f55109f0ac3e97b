"""Audio files to 16 kHz mono samples: WAV here, all other formats in a process of its own.

The other formats are read by PyAV (the extra `audio`), whose decoders are C code that meets hostile
bytes: the process that runs them has little memory, little time, and nothing to lose.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from octavo_engine.errors import InvalidRequest
from octavo_engine.speech.mel import SAMPLE_RATE
from octavo_engine.speech.resample import resample
from octavo_engine.speech.wav import is_wav, read_wav, too_long, unreadable

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAX_FILE_BYTES = 25 * 2**20
MIN_SAMPLES = SAMPLE_RATE // 100


class AudioLimits(NamedTuple):
    """What a file may take."""

    max_bytes: int = MAX_FILE_BYTES
    max_seconds: float = 3600.0  # of sound
    decode_timeout_s: float = 60.0


def decode_audio(data: bytes, limits: AudioLimits | None = None) -> NDArray[np.float32]:
    """Mono samples at 16 kHz. Blocks; raises InvalidRequest that says what is wrong."""
    limits = limits or AudioLimits()
    if not data:
        raise InvalidRequest("file is empty", param="file")
    if len(data) > limits.max_bytes:
        raise InvalidRequest(
            f"file has {len(data)} bytes; at most {limits.max_bytes} are accepted", param="file"
        )
    if is_wav(data):
        sound = read_wav(data, max_seconds=limits.max_seconds)
        samples = resample(sound.samples, sound.rate, SAMPLE_RATE)
    else:
        samples = _decode_elsewhere(data, limits)
    if len(samples) < MIN_SAMPLES:
        raise InvalidRequest("file has less than 0.01 seconds of sound", param="file")
    return samples


def _decode_elsewhere(data: bytes, limits: AudioLimits) -> NDArray[np.float32]:
    if importlib.util.find_spec("av") is None:
        raise InvalidRequest(
            "file is not a WAV file, and this server has no decoder for other formats: send WAV, "
            "or run on the server: pip install av",
            param="file",
        )
    command = [
        sys.executable, "-m", "octavo_engine.speech.decode_process",
        str(limits.max_seconds), str(limits.decode_timeout_s),
    ]  # fmt: skip
    try:
        done = subprocess.run(
            command, input=data, capture_output=True, check=False, timeout=limits.decode_timeout_s
        )
    except subprocess.TimeoutExpired:
        raise unreadable(f"decoding took more than {limits.decode_timeout_s:.0f} seconds") from None
    if done.returncode == 0:
        return np.frombuffer(done.stdout, np.float32)
    reason = done.stderr.decode("utf-8", "replace").strip().splitlines()
    said = reason[-1] if reason and done.returncode == 1 else ""
    if said == "too long":
        raise too_long(limits.max_seconds)
    raise unreadable(said or "the decoder failed")
