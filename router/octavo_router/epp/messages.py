"""The messages of envoy.service.ext_proc.v3, by their field numbers: read requests, write answers.

ProcessingRequest   2 request_headers   3 response_headers   4 request_body   5 response_body
                    6 request_trailers  7 response_trailers  8 metadata_context
                    10 observability_mode                    11 protocol_config
ProcessingResponse  1..6 the same six   7 immediate_response 8 dynamic_metadata
                    9 mode_override     10 override_message_timeout
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from octavo_router.epp.structs import read_entry, read_struct, write_struct
from octavo_router.epp.wire import BLOB, VARINT, blob, blobs, fields, number_field, varint

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

# what a message is about, as numbered in requests; answers count one less
REQUEST_HEADERS: Final = 2
RESPONSE_HEADERS: Final = 3
REQUEST_BODY: Final = 4
RESPONSE_BODY: Final = 5
REQUEST_TRAILERS: Final = 6
RESPONSE_TRAILERS: Final = 7

# how a gateway sends bodies
NONE: Final = 0
STREAMED: Final = 1
BUFFERED: Final = 2
BUFFERED_PARTIAL: Final = 3
FULL_DUPLEX_STREAMED: Final = 4
GRPC: Final = 5

Pair = tuple[bytes, bytes]  # a header's name and value

_SEND: Final = 1  # HeaderSendMode.SEND
_OVERWRITE: Final = 2  # HeaderAppendAction.OVERWRITE_IF_EXISTS_OR_ADD
_CLEAR_ROUTE_CACHE: Final = number_field(5, 1)  # of CommonResponse
_END_OF_STREAM: Final = number_field(2, 1)  # of StreamedBodyResponse


@dataclass(slots=True)
class BodyProtocol:
    """How this gateway talks. It says so in its first message; the default is what the endpoint
    picker protocol demands."""

    request_body: int = FULL_DUPLEX_STREAMED
    response_body: int = FULL_DUPLEX_STREAMED


@dataclass(slots=True)
class PickerMessage:
    """A ProcessingRequest, its parts still closed."""

    kind: int = 0  # 0: none of those we know
    content: bytes = b""
    metadata: bytes = b""
    protocol: BodyProtocol | None = None
    attributes: bytes = b""  # an entry of the map
    is_observation: bool = False  # no answer is awaited


# -- reading: all raise WireError


def read_message(data: bytes) -> PickerMessage:
    message = PickerMessage()
    for number, wire_type, value, content in fields(data):
        if wire_type == BLOB:
            if REQUEST_HEADERS <= number <= RESPONSE_TRAILERS:
                message.kind, message.content = number, content
            elif number == 8:
                message.metadata += content  # one that comes in pieces is merged
            elif number == 9:
                message.attributes = content
            elif number == 11:
                message.protocol = _protocol(content)
        elif wire_type == VARINT and number == 10:
            message.is_observation = bool(value)
    return message


def _protocol(data: bytes) -> BodyProtocol:
    protocol = BodyProtocol(NONE, NONE)
    for number, _, value, _ in fields(data):
        if number == 1:
            protocol.request_body = value
        elif number == 2:
            protocol.response_body = value
    return protocol


def read_headers(data: bytes) -> tuple[list[Pair], bool]:
    """Of HttpHeaders: the headers, names in lower case, and whether nothing follows them."""
    pairs: list[Pair] = []
    is_end = False
    for number, wire_type, value, content in fields(data):
        if number == 1 and wire_type == BLOB:
            pairs += [_pair(item) for item in blobs(content, 1)]
        elif number == 3 and wire_type == VARINT:
            is_end = bool(value)
    return pairs, is_end


def _pair(data: bytes) -> Pair:
    name = value = raw = b""
    for number, wire_type, _, content in fields(data):
        if wire_type != BLOB:
            continue
        if number == 1:
            name = content
        elif number == 2:
            value = content
        elif number == 3:
            raw = content
    return name.lower(), raw or value


def read_body(data: bytes) -> tuple[bytes, bool]:
    """Of HttpBody: the bytes, and whether they are the last."""
    body, is_end = b"", False
    for number, wire_type, value, content in fields(data):
        if number == 1 and wire_type == BLOB:
            body = content
        elif number == 2 and wire_type == VARINT:
            is_end = bool(value)
    return body, is_end


def read_metadata(data: bytes, namespace: str) -> dict[str, Any] | None:
    """One namespace of the filter metadata; None if it is not there."""
    found = None
    for entry in blobs(data, 1):
        name, content = read_entry(entry)
        if name == namespace:
            found = read_struct(content)
    return found


# -- writing


def headers_answer(
    kind: int,
    *,
    set_headers: Iterable[Pair] = (),
    remove_headers: Sequence[bytes] = (),
    metadata: Mapping[str, Mapping[str, str]] | None = None,
    response_body_mode: int | None = None,
    clear_route_cache: bool = False,
) -> bytes:
    """To headers: pass them on like this. `response_body_mode` asks for another one."""
    common = _mutation(2, set_headers, remove_headers)
    if clear_route_cache:
        common += _CLEAR_ROUTE_CACHE
    answer = blob(kind - 1, blob(1, common))
    if metadata:
        answer += blob(8, write_struct(metadata))
    if response_body_mode is not None:
        # All of a ProcessingMode counts. Waiting for trailers keeps the stream open, though none
        # may come: without that, Envoy ends it here, and the end of the answer is not heard of.
        mode = number_field(2, _SEND) + number_field(4, response_body_mode)
        answer += blob(9, mode + number_field(6, _SEND))
    return answer


def body_answer(
    kind: int,
    body: bytes | None = None,
    *,
    set_headers: Iterable[Pair] = (),
    metadata: Mapping[str, Mapping[str, str]] | None = None,
    clear_route_cache: bool = False,
) -> bytes:
    """To a body that the gateway holds: pass it on, with another one in its place if given."""
    common = _mutation(2, set_headers, ())
    if body is not None:
        common += blob(3, blob(1, body))
    if clear_route_cache:
        common += _CLEAR_ROUTE_CACHE
    answer = blob(kind - 1, blob(1, common))
    if metadata:
        answer += blob(8, write_struct(metadata))
    return answer


def streamed_answer(kind: int, content: bytes) -> bytes:
    """To a piece of a body that the gateway let go of: this is how it goes on.

    `content`: a StreamedBodyResponse. It has the fields of HttpBody, so that an unchanged piece is
    given back as it came. Hot path: once per piece of an answer.
    """
    length = len(content)
    if length < 0x70:  # all lengths around it are one byte long
        return b"%c%c\x0a%c\x1a%c\x1a%c%b" % (
            (kind - 1) << 3 | BLOB, length + 6, length + 4, length + 2, length, content,
        )  # fmt: skip
    return blob(kind - 1, blob(1, blob(3, blob(3, content))))


def streamed_piece(body: bytes, *, is_end: bool) -> bytes:
    """A StreamedBodyResponse."""
    return blob(1, body) + (_END_OF_STREAM if is_end else b"")


def trailers_answer(kind: int) -> bytes:
    """To trailers: pass them on."""
    return blob(kind - 1, b"")


def immediate_answer(status: int, headers: Iterable[Pair], body: bytes, details: str = "") -> bytes:
    """The client gets this, and no engine is called."""
    content = blob(1, number_field(1, status)) + _mutation(2, headers, ()) + blob(3, body)
    if details:
        content += blob(5, details.encode())
    return blob(7, content)


def more_time(seconds: float) -> bytes:
    """Wait for the answer to the last message for so long."""
    whole = int(seconds)
    return blob(10, number_field(1, whole) + number_field(2, int((seconds - whole) * 1e9)))


def _mutation(number: int, set_headers: Iterable[Pair], remove_headers: Sequence[bytes]) -> bytes:
    parts = [
        blob(1, blob(1, blob(1, name) + blob(3, value)) + _OVERWRITES)
        for name, value in set_headers
    ]
    parts += [blob(2, name) for name in remove_headers]
    return blob(number, b"".join(parts)) if parts else b""


_OVERWRITES: Final = varint(3 << 3) + varint(_OVERWRITE)
