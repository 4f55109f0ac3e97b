"""Protocol Buffers' encoding: fields out of bytes, and bytes out of fields.

Only what ext_proc and gRPC's health protocol need. Reading is strict about what cannot be read and
lenient about what is not known: a newer gateway may say more than this router understands.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

VARINT: Final = 0
FIXED64: Final = 1
BLOB: Final = 2  # text, bytes or a message
FIXED32: Final = 5

_MAX_VARINT_BYTES: Final = 10


class ProtobufError(ValueError):
    """These bytes are no message; says what is wrong and where."""


def fields(data: bytes) -> Iterator[tuple[int, int, int, bytes]]:
    """Each field as (number, wire type, its value if it is a number, its bytes if it is not).

    Raises ProtobufError.
    """
    at, end = 0, len(data)
    while at < end:
        tag = data[at]
        if tag < 0x80:
            at += 1
        else:
            tag, at = _varint(data, at)
        number, wire_type = tag >> 3, tag & 7
        if not number:
            raise ProtobufError(f"a field without a number at byte {at}")
        if wire_type == BLOB:
            length, at = _varint(data, at)
            stop = at + length
            if stop > end:
                raise ProtobufError(f"field {number} ends {stop - end} bytes behind the message")
            yield number, BLOB, 0, data[at:stop]
            at = stop
        elif wire_type == VARINT:
            value, at = _varint(data, at)
            yield number, VARINT, value, b""
        elif wire_type in (FIXED64, FIXED32):
            stop = at + (8 if wire_type == FIXED64 else 4)
            if stop > end:
                raise ProtobufError(f"field {number} ends {stop - end} bytes behind the message")
            yield number, wire_type, 0, data[at:stop]
            at = stop
        else:
            raise ProtobufError(f"field {number} has wire type {wire_type}")


def blobs(data: bytes, wanted: int) -> Iterator[bytes]:
    """The contents of one repeated field."""
    for number, wire_type, _, content in fields(data):
        if number == wanted and wire_type == BLOB:
            yield content


def _varint(data: bytes, at: int) -> tuple[int, int]:
    if at < len(data) and data[at] < 0x80:  # nearly all of them
        return data[at], at + 1
    value = shift = 0
    for place in range(at, min(at + _MAX_VARINT_BYTES, len(data))):
        byte = data[place]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & 0xFFFF_FFFF_FFFF_FFFF, place + 1
        shift += 7
    raise ProtobufError(f"a number at byte {at} does not end")


def varint(value: int) -> bytes:
    """A number that is not negative."""
    if value < 0x80:
        return _SMALL[value]
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def blob(number: int, content: bytes) -> bytes:
    """A field of text, bytes or a message, empty ones included."""
    return b"%b%b%b" % (varint(number << 3 | BLOB), varint(len(content)), content)


def number_field(number: int, value: int) -> bytes:
    """A field of a number, an enum or a boolean; nothing for 0, which is what its absence means."""
    return varint(number << 3 | VARINT) + varint(value) if value else b""


_SMALL: Final = tuple(bytes((value,)) for value in range(0x80))
