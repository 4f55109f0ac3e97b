"""The wire format between router and engine of another version: golden bytes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from octavo_engine.protocol.resume import (
    MAX_RESUME_BYTES,
    Resume,
    begin_line,
    pack,
    token_line,
    unpack,
)

KNOWN = Resume("cmpl-1", 9, -7, [[5, 6], []], finished=[0], opened=[0, 1])
TOLD = b'{"id":"cmpl-1","created":9,"seed":-7,"tokens":[[5,6],[]],"finished":[0],"opened":[0,1]}'


def test_lines_have_the_form_that_routers_read():
    begin = begin_line(id="cmpl-1", created=9, seed=-7, answers=2, prompt_tokens=40, cached=32)
    assert begin == (
        b': octavo begin {"id": "cmpl-1", "created": 9, "seed": -7, "answers": 2, '
        b'"prompt_tokens": 40, "cached": 32}\n'
    )
    assert token_line(3, [17, 204, 9]) == b": octavo 3 17,204,9\n"
    assert token_line(0, []) == b": octavo 0\n"


def test_a_frame_stands_before_the_body_byte_for_byte():
    golden = b"\x57\0\0\0" + TOLD
    assert pack(KNOWN, b'{"a": 1}\r\n') == golden + b'{"a": 1}\r\n'
    assert unpack(golden + b'{"a": 1}\r\n') == (TOLD, b'{"a": 1}\r\n')
    assert unpack(golden) == (TOLD, b"")


@pytest.mark.parametrize("cut", range(10))
def test_a_frame_that_did_not_come_whole_is_refused(cut):
    with pytest.raises(ValueError, match="frame"):
        unpack(pack(KNOWN, b"")[:cut])


def test_a_frame_above_the_limit_is_refused_before_it_is_read():
    too_long = MAX_RESUME_BYTES + 1
    with pytest.raises(ValueError, match=f"{too_long} bytes is above the limit"):
        unpack(too_long.to_bytes(4, "little") + b"{" * too_long)


def test_where_the_blocks_lie_is_said_only_where_they_are_served():
    begin = begin_line(
        id="cmpl-1", created=9, seed=-7, answers=2, prompt_tokens=40, cached=32,
        kv_address="10.0.0.7:14579",
    )  # fmt: skip
    assert begin.endswith(b'"cached": 32, "kv_address": "10.0.0.7:14579"}\n')
    placed = pack(replace(KNOWN, kv_address="[::1]:9"), b"")
    assert placed[4:] == TOLD[:-1] + b',"kv_address":"[::1]:9"}'
