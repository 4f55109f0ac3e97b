"""Bytes of an engine's stream into frames: length-prefixed msgpack, bounded, typed."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from octavo_engine.protocol.stream import (
    DELTA,
    DRAINING,
    HELLO,
    KEY_BYTES,
    MAX_FRAME_BYTES,
    SNAPSHOT,
    STORED_BYTES,
    Delta,
    Draining,
    Hello,
    Snapshot,
)
from octavo_router.errors import Unreachable

Frame: TypeAlias = Hello | Snapshot | Delta | Draining

_LENGTH_BYTES = 4


class FrameReader:
    """Feed it whatever arrives; it gives whole frames and keeps the rest, one frame at most."""

    def __init__(self, *, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        self._max_frame_bytes = max_frame_bytes
        self._rest = bytearray()
        self._envelope = msgspec.msgpack.Decoder(tuple[str, msgspec.Raw])
        self._decoders: dict[str, msgspec.msgpack.Decoder[Frame]] = {
            HELLO: msgspec.msgpack.Decoder(Hello),
            SNAPSHOT: msgspec.msgpack.Decoder(Snapshot),
            DELTA: msgspec.msgpack.Decoder(Delta),
            DRAINING: msgspec.msgpack.Decoder(Draining),
        }

    def feed(self, data: bytes) -> list[Frame]:
        """The frames that are complete now. Raises `Unreachable` on what cannot be a frame."""
        # Nearly always a piece holds exactly one small frame: then nothing is copied.
        buffer: bytes | bytearray = data
        if self._rest:
            self._rest += data
            buffer = self._rest
        frames: list[Frame] = []
        start, size = 0, len(buffer)
        while size - start >= _LENGTH_BYTES:
            begin = start + _LENGTH_BYTES
            length = int.from_bytes(buffer[start:begin], "little")
            if length > self._max_frame_bytes:
                raise Unreachable(f"a frame of {length} bytes exceeds {self._max_frame_bytes}")
            if size - begin < length:
                break
            frame = self._decode(bytes(buffer[begin : begin + length]))
            if frame is not None:
                frames.append(frame)
            start = begin + length
        if self._rest:
            del self._rest[:start]
        else:
            self._rest += data[start:]
        return frames

    def _decode(self, payload: bytes) -> Frame | None:
        try:
            kind, fields = self._envelope.decode(payload)
            decoder = self._decoders.get(kind)
            if decoder is None:
                return None  # a newer engine's word: what we need comes in those we know
            frame = decoder.decode(fields)
        except (ValueError, RecursionError) as error:
            raise Unreachable(f"a frame cannot be read: {error}") from error
        _check(frame)
        return frame


def _check(frame: Frame) -> None:
    if isinstance(frame, Snapshot | Delta) and len(frame.stored) % STORED_BYTES:
        raise Unreachable(f"stored holds {len(frame.stored)} bytes, no multiple of {STORED_BYTES}")
    for medium, entries in frame.tiers.items() if isinstance(frame, Snapshot | Delta) else ():
        if len(entries) % STORED_BYTES:
            raise Unreachable(
                f"tiers holds {len(entries)} bytes for {medium}, no multiple of {STORED_BYTES}"
            )
    if isinstance(frame, Delta) and len(frame.evicted) % KEY_BYTES:
        raise Unreachable(f"evicted holds {len(frame.evicted)} bytes, no multiple of {KEY_BYTES}")
