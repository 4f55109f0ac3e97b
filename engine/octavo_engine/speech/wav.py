"""WAV files without a decoder package: integers of 8 to 32 bits, floats, any number of channels.

Trusts no number in the file; sizes that promise more than there is are cut.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from octavo_engine.errors import InvalidRequest

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAX_CHANNELS = 32
MIN_RATE = 1_000
MAX_RATE = 768_000
_INTEGERS, _FLOATS, _EXTENSIBLE = 1, 3, 0xFFFE


class Sound(NamedTuple):
    """Mono samples from -1 to 1."""

    samples: NDArray[np.float32]
    rate: int


class _Format(NamedTuple):
    kind: int
    channels: int
    rate: int
    bits: int


def is_wav(data: bytes) -> bool:
    return data[:4] == b"RIFF" and data[8:12] == b"WAVE"


def read_wav(data: bytes, *, max_seconds: float) -> Sound:
    """Raises InvalidRequest that says what is wrong."""
    form, body = _chunks(data)
    frame_bytes = form.channels * form.bits // 8
    count = len(body) // frame_bytes
    if count == 0:
        raise unreadable("the WAV file has no samples")
    if count > max_seconds * form.rate:
        raise too_long(max_seconds)
    values = _values(body[: count * frame_bytes], form).reshape(count, form.channels)
    mono = values[:, 0] if form.channels == 1 else values.mean(axis=1, dtype=np.float32)
    if not np.isfinite(mono).all():
        raise unreadable("the WAV file has samples that are not finite numbers")
    return Sound(np.clip(mono, -1.0, 1.0).astype(np.float32), form.rate)


def unreadable(why: str) -> InvalidRequest:
    return InvalidRequest(f"file cannot be read as audio: {why}", param="file")


def too_long(max_seconds: float) -> InvalidRequest:
    return InvalidRequest(
        f"file is longer than {max_seconds:g} seconds; send it in parts", param="file"
    )


def _chunks(data: bytes) -> tuple[_Format, memoryview]:
    """The format and the bytes of the samples."""
    view, place = memoryview(data), 12
    form: _Format | None = None
    while place + 8 <= len(data):
        name = bytes(view[place : place + 4])
        size = int.from_bytes(view[place + 4 : place + 8], "little")
        body = view[place + 8 : place + 8 + size]
        if name == b"fmt ":
            form = _format(body)
        elif name == b"data":
            if form is None:
                raise unreadable("the WAV file has samples before their format")
            return form, body
        place += 8 + size + size % 2
    raise unreadable("the WAV file has no samples")


def _format(body: memoryview) -> _Format:
    if len(body) < 16:
        raise unreadable("the format of the WAV file is cut off")
    kind, channels, rate, _, _, bits = struct.unpack("<HHIIHH", body[:16])
    if kind == _EXTENSIBLE and len(body) >= 26:
        kind = int.from_bytes(body[24:26], "little")
    if not (
        (kind == _INTEGERS and bits in (8, 16, 24, 32)) or (kind == _FLOATS and bits in (32, 64))
    ):
        raise unreadable(
            f"the WAV file has samples of format {kind} with {bits} bits; formats 1 (integers of "
            "8, 16, 24 or 32 bits) and 3 (floats of 32 or 64 bits) are supported"
        )
    if not 1 <= channels <= MAX_CHANNELS:
        raise unreadable(f"the WAV file has {channels} channels; 1 to {MAX_CHANNELS} are supported")
    if not MIN_RATE <= rate <= MAX_RATE:
        raise unreadable(
            f"the WAV file has {rate} samples a second; {MIN_RATE} to {MAX_RATE} are supported"
        )
    return _Format(kind, channels, rate, bits)


def _values(body: memoryview, form: _Format) -> NDArray[np.float32]:
    if form.kind == _FLOATS:
        with np.errstate(over="ignore", invalid="ignore"):
            return np.frombuffer(body, f"<f{form.bits // 8}").astype(np.float32)
    match form.bits:
        case 8:
            return (np.frombuffer(body, np.uint8).astype(np.float32) - 128.0) / 128.0
        case 16:
            return np.frombuffer(body, "<i2").astype(np.float32) / 2.0**15
        case 32:
            return (np.frombuffer(body, "<i4") / 2.0**31).astype(np.float32)
    words = np.zeros((len(body) // 3, 4), np.uint8)
    words[:, 1:] = np.frombuffer(body, np.uint8).reshape(-1, 3)
    return (words.view("<i4")[:, 0] / 2.0**31).astype(np.float32)
