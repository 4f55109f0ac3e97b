"""ext_proc on the wire: byte for byte what published bindings of Envoy's API write and read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo_router.epp import messages
from octavo_router.epp.hints import read_served, read_subset
from octavo_router.epp.structs import read_struct, write_struct
from octavo_router.epp.wire import ProtobufError, blob, fields, number_field, varint

GOLDEN = json.loads((Path(__file__).parent / "golden.json").read_text())
REQUESTS = {name: bytes.fromhex(text) for name, text in GOLDEN["requests"].items()}
ANSWERS = {name: bytes.fromhex(text) for name, text in GOLDEN["answers"].items()}
DESTINATION = (b"x-gateway-destination-endpoint", b"10.0.0.1:8000,10.0.0.2:8000")
METADATA = {"envoy.lb": {DESTINATION[0].decode(): DESTINATION[1].decode()}}


def read(name):
    return messages.read_message(REQUESTS[name])


def test_request_headers_are_read_with_their_metadata_and_protocol():
    message = read("request headers")
    assert message.kind == messages.REQUEST_HEADERS
    pairs = [(b":method", b"POST"), (b":path", b"/v1/completions?x=1")]
    assert messages.read_headers(message.content) == (pairs, False)
    assert message.protocol == messages.BodyProtocol(
        messages.FULL_DUPLEX_STREAMED, messages.STREAMED
    )
    assert read_subset(message.metadata) == ("10.0.0.1:8000", "10.0.0.2:8000")
    other = messages.read_metadata(message.metadata, "other")
    assert other == {"number": 1.5, "flag": True, "deep": {"a": "b"}}
    assert not message.is_observation


def test_a_protocol_of_zeros_is_told_from_none():
    message = read("request headers, the end")
    assert messages.read_headers(message.content) == ([(b":method", b"GET")], True)
    assert message.protocol == messages.BodyProtocol(messages.NONE, messages.NONE)
    assert read("request body").protocol is None


def test_bodies_and_trailers_are_read():
    message = read("request body")
    assert message.kind == messages.REQUEST_BODY
    assert messages.read_body(message.content) == (b"{" * 200, False)
    assert messages.read_body(read("request body, the end").content) == (b"}", True)
    assert read("request trailers").kind == messages.REQUEST_TRAILERS
    assert read("response trailers").kind == messages.RESPONSE_TRAILERS
    message = read("response body, observed")
    assert message.kind == messages.RESPONSE_BODY
    assert message.is_observation


def test_the_endpoint_that_served_is_read_from_metadata_and_from_a_header():
    message = read("response headers")
    assert read_served(message.metadata, []) == "10.0.0.2:8000"
    header = (b"x-gateway-destination-endpoint-served", b"10.0.0.3:8000")
    assert read_served(b"", [header]) == "10.0.0.3:8000"
    assert read_served(message.metadata, [header]) == "10.0.0.2:8000"
    assert read_served(b"", []) == ""


def piece(body, *, is_end=False):
    return messages.streamed_piece(body, is_end=is_end)


@pytest.mark.parametrize(
    ("name", "written"),
    [
        (
            "placed",
            messages.headers_answer(
                messages.REQUEST_HEADERS,
                set_headers=[DESTINATION, (b"content-length", b"300")],
                remove_headers=[b"x-octavo-resume"],
                metadata=METADATA,
                clear_route_cache=True,
            ),
        ),
        ("passed on", messages.headers_answer(messages.REQUEST_HEADERS)),
        ("short piece", messages.streamed_answer(messages.RESPONSE_BODY, piece(b"short"))),
        (
            "long last piece",
            messages.streamed_answer(messages.REQUEST_BODY, piece(b"x" * 1000, is_end=True)),
        ),
        (
            "buffered body",
            messages.body_answer(
                messages.REQUEST_BODY,
                b"{}",
                set_headers=[DESTINATION],
                metadata=METADATA,
                clear_route_cache=True,
            ),
        ),
        ("request trailers", messages.trailers_answer(messages.REQUEST_TRAILERS)),
        ("response trailers", messages.trailers_answer(messages.RESPONSE_TRAILERS)),
        (
            "keep the body",
            messages.headers_answer(
                messages.RESPONSE_HEADERS,
                set_headers=[(b"x-served-by", b"e")],
                response_body_mode=messages.NONE,
            ),
        ),
        (
            "refused",
            messages.immediate_answer(429, [(b"retry-after", b"3")], b"no", "octavo_queue_full"),
        ),
        ("more time", messages.more_time(31.0)),
    ],
)
def test_answers_are_what_the_published_bindings_write(name, written):
    assert written == ANSWERS[name]


@given(body=st.binary(max_size=300), is_end=st.booleans())
@settings(max_examples=200, derandomize=True)
def test_a_piece_goes_back_as_it_came_whatever_its_length(body, is_end):
    came = blob(1, body) + number_field(2, is_end)
    written = messages.streamed_answer(messages.RESPONSE_BODY, came)
    assert written == blob(4, blob(1, blob(3, blob(3, came))))
    assert messages.read_body(came) == (body, is_end)


@given(st.integers(min_value=0, max_value=2**64 - 1))
@settings(max_examples=200, derandomize=True)
def test_numbers_of_all_sizes(value):
    assert [*fields(varint(7 << 3) + varint(value))] == [(7, 0, value, b"")]


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"\x0a\x05abc", "field 1 ends 2 bytes behind"),
        (b"\x0a", "does not end"),
        (b"\x08" + b"\xff" * 10, "does not end"),
        (b"\x08", "does not end"),
        (b"\x09abc", "field 1 ends 5 bytes behind"),
        (b"\x0b", "wire type 3"),
        (b"\x00\x00", "without a number"),
    ],
)
def test_what_is_no_message_is_refused_with_a_reason(data, problem):
    with pytest.raises(ProtobufError, match=problem):
        messages.read_message(data)


def test_fields_that_are_not_known_are_passed_over():
    newer = blob(99, b"news") + number_field(98, 5) + b"\xa5\x06abcd" + REQUESTS["request headers"]
    assert messages.read_message(newer) == read("request headers")


def test_deep_metadata_is_refused_before_it_hurts():
    deep = write_struct({"a": "b"})
    for _ in range(20):
        deep = blob(1, blob(1, b"a") + blob(2, blob(5, deep)))
    with pytest.raises(ProtobufError, match="deeper than 16"):
        read_struct(deep)
    item = blob(3, b"x")
    for _ in range(20):
        item = blob(6, blob(1, item))
    with pytest.raises(ProtobufError, match="deeper than 16"):
        read_struct(blob(1, blob(1, b"a") + blob(2, item)))


@given(name=st.sampled_from(sorted(REQUESTS)), data=st.data())
@settings(max_examples=400, derandomize=True)
def test_mutilated_messages_are_read_or_refused_and_nothing_else(name, data):
    message = bytearray(REQUESTS[name])
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(message) - 1))
        message[at] = data.draw(st.integers(0, 255))
    del message[data.draw(st.integers(0, len(message))) :]
    try:
        read = messages.read_message(bytes(message))
        messages.read_headers(read.content)
        messages.read_body(read.content)
        read_subset(read.metadata)
        read_served(read.metadata, [])
    except ProtobufError:
        pass
