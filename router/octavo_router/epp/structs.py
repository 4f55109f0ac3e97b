"""google.protobuf.Struct, the JSON of Protocol Buffers: how gateways carry dynamic metadata."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, Final

from octavo_router.epp.wire import BLOB, FIXED64, VARINT, ProtobufError, blob, blobs, fields

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_DEPTH: Final = 16  # what metadata needs is two

_NUMBER, _STRING, _BOOL, _STRUCT, _LIST = 2, 3, 4, 5, 6


def read_struct(data: bytes, depth: int = 0) -> dict[str, Any]:
    """Raises ProtobufError."""
    if depth >= MAX_DEPTH:
        raise ProtobufError(f"a struct is nested deeper than {MAX_DEPTH} levels")
    found: dict[str, Any] = {}
    for entry in blobs(data, 1):
        name, value = read_entry(entry)
        found[name] = _value(value, depth)
    return found


def read_entry(data: bytes) -> tuple[str, bytes]:
    """An entry of a map with text for keys and messages for values."""
    name, value = b"", b""
    for number, wire_type, _, content in fields(data):
        if wire_type == BLOB and number == 1:
            name = content
        elif wire_type == BLOB and number == 2:
            value = content
    return name.decode("utf-8", "replace"), value


def write_struct(value: Mapping[str, str | Mapping[str, str]]) -> bytes:
    """A struct of text, and of structs of text."""
    entries = []
    for name, item in value.items():
        content = blob(_STRING, item.encode()) if isinstance(item, str) else (
            blob(_STRUCT, write_struct(item))
        )  # fmt: skip
        entries.append(blob(1, blob(1, name.encode()) + blob(2, content)))
    return b"".join(entries)


def _value(data: bytes, depth: int) -> Any:
    found: Any = None
    for number, wire_type, value, content in fields(data):
        if wire_type == BLOB:
            if number == _STRING:
                found = content.decode("utf-8", "replace")
            elif number == _STRUCT:
                found = read_struct(content, depth + 1)
            elif number == _LIST:
                if depth >= MAX_DEPTH:
                    raise ProtobufError(f"a list is nested deeper than {MAX_DEPTH} levels")
                found = [_value(item, depth + 1) for item in blobs(content, 1)]
        elif wire_type == FIXED64 and number == _NUMBER:
            (found,) = struct.unpack("<d", content)
        elif wire_type == VARINT and number == _BOOL:
            found = bool(value)
    return found
