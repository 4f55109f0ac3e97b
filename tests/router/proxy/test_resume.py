"""What the router remembers of a stream: exactly what it relayed, whatever the bytes do."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo_engine.protocol import resume as protocol
from octavo_engine.protocol.resume import token_line, unpack
from octavo_router.proxy.resume import BAD_STREAM, LOST_CODES, StreamMemory
from octavo_router.proxy.stream_form import DONE
from octavo_router.residency import native

HOT = native.load()
begin_line = partial(protocol.begin_line, prompt_tokens=40, cached=32)
BEGIN = begin_line(id="chatcmpl-1", created=9, seed=-7, answers=2)


def memory(**options: Any) -> StreamMemory:
    return StreamMemory(HOT.split_token_lines, HOT.find_event_end, **options)


def event(index: int, ids: list[int], text: str = "x", end: str | None = None) -> bytes:
    choice = {"index": index, "delta": {"content": text}, "finish_reason": end}
    data = json.dumps({"choices": [choice]}, separators=(",", ":")).encode()
    return token_line(index, ids) + b"data: " + data + b"\n\n"


def error(code: Any) -> bytes:
    return b'data: {"error":' + json.dumps({"message": "m", "code": code}).encode() + b"}\n\n"


USAGE = b'data: {"id":"chatcmpl-1","choices":[],"usage":{"total_tokens":7}}\n\n'
STREAM = [
    BEGIN + event(0, []),
    event(1, []),
    event(0, [5]),
    event(1, [4_000_000_000, 6], 'says "finish_reason":"stop" and\n\ndata: [DONE]\n\n'),
    event(0, [7, 8, 9], '"choices":[],"usage":\n\ndata: {"error":{"code":"engine_dead"}}'),
    event(0, [], "", "length"),
    event(1, [1], "end", "stop"),
    USAGE,
    DONE,
]


def clean_of(events: list[bytes]) -> bytes:
    lines = b"".join(events).splitlines(keepends=True)
    return b"".join(line for line in lines if not line.startswith(b": octavo "))


def known(reported: StreamMemory) -> dict[str, Any]:
    frame, body = unpack(reported.resume_body(b"the body"))
    assert body == b"the body"
    result: dict[str, Any] = json.loads(frame)
    return result


def test_a_whole_stream_is_relayed_without_our_lines():
    reported = memory()
    assert reported.feed(b"".join(STREAM)) == clean_of(STREAM)
    assert (reported.is_done, reported.is_over, reported.can_resume, reported.missing) == (
        True,
        True,
        False,
        b"",
    )
    assert (reported.num_tokens, reported.num_answers, reported.num_finished) == (7, 2, 2)
    assert reported.feed(b"data: more\n\n") == b""


@pytest.mark.parametrize("size", [1, 2, 7, 64])
def test_portions_change_nothing(size):
    reported, data = memory(), b"".join(STREAM)
    relayed = [reported.feed(data[start : start + size]) for start in range(0, len(data), size)]
    assert b"".join(relayed) == clean_of(STREAM)
    assert reported.is_done and reported.num_tokens == 7


def test_after_a_cut_anywhere_it_knows_what_it_relayed_and_no_more():
    data = b"".join(STREAM)
    for cut in range(len(data)):
        reported = memory()
        relayed = reported.feed(data[: cut // 2]) + reported.feed(data[cut // 2 : cut])
        whole = STREAM[
            : next(n for n in range(len(STREAM)) if cut < len(b"".join(STREAM[: n + 1])))
        ]
        assert relayed == clean_of(whole)
        assert reported.is_untouched == (not whole) and reported.can_resume == (0 < len(whole) < 8)
        if not whole:
            continue
        tokens = [[5], [4_000_000_000, 6], [7, 8, 9], [], [1]][: max(0, len(whole) - 2)]
        first = [token for ids in (tokens[0:1] + tokens[2:4]) for token in ids]
        second = [token for ids in (tokens[1:2] + tokens[4:5]) for token in ids]
        assert known(reported) == {
            "id": "chatcmpl-1",
            "created": 9,
            "seed": -7,
            "tokens": [first, second],
            "finished": [0, 1][: max(0, len(whole) - 5)],
            "opened": [0, 1][: len(whole)],
        }


def test_the_stream_that_follows_goes_on_with_the_memory():
    reported = memory()
    relayed = reported.feed(b"".join(STREAM[:3]) + b": octavo 1 4")
    reported.start_over()
    relayed += reported.feed(BEGIN + b"".join(STREAM[3:]))
    assert relayed == clean_of(STREAM)
    assert reported.is_done and reported.num_tokens == 7 and reported.id == "chatcmpl-1"


@pytest.mark.parametrize(
    "begin",
    [
        begin_line(id="chatcmpl-2", created=9, seed=-7, answers=2),
        begin_line(id="chatcmpl-1", created=8, seed=-7, answers=2),
        begin_line(id="chatcmpl-1", created=9, seed=7, answers=2),
        begin_line(id="chatcmpl-1", created=9, seed=-7, answers=3),
        b"",
    ],
)
def test_a_stream_of_another_generation_is_not_relayed(begin):
    reported = memory()
    reported.feed(b"".join(STREAM[:3]))
    reported.start_over()
    assert reported.feed(begin + STREAM[3]) == b""
    assert reported.lost_with == BAD_STREAM and reported.problem
    assert known(reported)["tokens"] == [[5], []]
    reported.start_over()
    assert reported.feed(BEGIN + b"".join(STREAM[3:])) == clean_of(STREAM[3:])


def test_of_a_stream_that_showed_nothing_nothing_is_kept():
    reported = memory()
    reported.feed(begin_line(id="lie", created=1, seed=1, answers=7) + event(9, [1]))
    assert reported.lost_with == BAD_STREAM and reported.is_untouched and not reported.can_resume
    reported.start_over()
    assert reported.feed(b"".join(STREAM)) == clean_of(STREAM)


# ── ends ──


@pytest.mark.parametrize("code", sorted(LOST_CODES))
def test_the_error_of_a_dying_engine_is_held_back(code):
    reported = memory()
    stream = b"".join(STREAM[:3]) + error(code) + DONE
    assert reported.feed(stream) == clean_of(STREAM[:3])
    assert reported.lost_with == code and reported.can_resume and not reported.is_over
    assert reported.feed(b"".join(STREAM[3:])) == b""  # it was lost: nothing of it counts any more


@pytest.mark.parametrize("code", ["deadline_exceeded", "model_error", "internal_error", 5, None])
def test_any_other_error_is_the_end(code):
    reported = memory()
    stream = [*STREAM[:3], error(code), DONE]
    assert reported.feed(b"".join(stream)) == clean_of(stream)
    assert reported.failed_with == (code if isinstance(code, str) else "unknown")
    assert reported.is_done and not reported.lost_with and not reported.can_resume


def test_an_error_before_all_events_leaves_the_client_untouched():
    reported = memory()
    assert reported.feed(error("queue_full") + DONE) == b""
    assert reported.lost_with == "queue_full" and reported.is_untouched and not reported.can_resume


def test_where_only_done_is_missing_no_engine_is_needed():
    counted, plain, uncounted = memory(), memory(wants_usage=False), memory()
    counted.feed(b"".join(STREAM[:8]))
    plain.feed(b"".join(STREAM[:7]))
    uncounted.feed(b"".join(STREAM[:7]))
    assert (counted.missing, plain.missing, uncounted.missing) == (DONE, DONE, b"")
    assert (counted.can_resume, plain.can_resume, uncounted.can_resume) == (False, False, True)
    assert known(uncounted)["finished"] == [0, 1]  # a resume brings the sum


# ── streams that lie ──


@pytest.mark.parametrize(
    ("events", "relayed"),
    [
        ([STREAM[0], event(2, [1])], 1),  # an answer nobody asked for
        ([STREAM[0], event(0, [1], end="stop"), event(0, [2])], 2),  # goes on after its end
        ([STREAM[0], event(0, [1], end="stop"), event(0, [], end="stop")], 2),  # ends twice
        ([STREAM[0], BEGIN + event(0, [1])], 0),
        ([STREAM[0], event(0, [1]), b'data: {"choices":[{"index":0}]}\n\n'], 2),  # whose?
        ([STREAM[0], event(0, [1]), b'data: {"finish_reason":"stop"}\n\n'], 2),
        ([STREAM[0], event(0, [1]), DONE], 2),  # cut, and said to be whole
        ([STREAM[0], b": octavo 0 1,x\n" + event(0, [])], 0),
        ([STREAM[0], b": octavo 0 1\n" + event(1, [])], 1),  # of two answers
        ([event(0, [1])], 0),
        ([b": octavo begin {}\n" + event(0, [1])], 0),
        ([begin_line(id="a", created=1, seed=True, answers=1) + event(0, [1])], 0),
        ([begin_line(id="a", created=1, seed=1, answers=0) + event(0, [1])], 0),
        ([begin_line(id="a", created=1, seed=1, answers=10**9) + event(0, [1])], 0),
    ],
)
def test_a_stream_against_the_rules_is_left_at_once(events, relayed):
    """What came before in the same read may be left out too; never more than is remembered."""
    together, apart = memory(), memory()
    assert together.feed(b"".join(events)) in (clean_of(events[:relayed]), b"")
    assert together.lost_with == BAD_STREAM and together.problem
    given_out = b"".join(apart.feed(one) for one in events)
    assert given_out == clean_of(events[: len(events) - 1])
    assert apart.lost_with == BAD_STREAM


def test_an_event_without_end_is_not_collected_for_ever():
    reported = memory(max_event_bytes=1000)
    reported.feed(b"".join(STREAM[:3]))
    for _ in range(20):
        reported.feed(b"x" * 100)
    assert reported.lost_with == BAD_STREAM and "larger than 1000 bytes" in reported.problem
    assert known(reported)["tokens"] == [[5], []]


def test_an_engine_that_tells_no_tokens_is_relayed_but_cannot_be_resumed():
    reported = memory()
    stream = clean_of(STREAM)
    assert reported.feed(stream) == stream
    assert reported.is_done and not reported.is_untouched and reported.num_tokens == 0
    broken = memory()
    broken.feed(stream[:200])
    assert not broken.can_resume


@settings(max_examples=150, derandomize=True, deadline=None)
@given(st.data())
def test_whatever_comes_nothing_is_told_twice_and_nothing_of_ours_gets_out(data):
    stream = bytearray(b"".join(STREAM))
    for _ in range(data.draw(st.integers(0, 4))):
        at = data.draw(st.integers(0, len(stream) - 1))
        stream[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    reported, relayed = memory(), b""
    at = 0
    while at < len(stream):
        step = data.draw(st.integers(1, 200))
        relayed += reported.feed(bytes(stream[at : at + step]))
        at += step
    assert b"\n: octavo " not in relayed and not relayed.startswith(b": octavo ")
    assert reported.num_tokens <= 7 + 30
    if reported.can_resume:
        assert len(known(reported)["tokens"]) == reported.num_answers


def test_a_token_costs_a_few_bytes():
    reported = memory()
    reported.feed(BEGIN + event(0, list(range(100_000))))
    assert sum(answer.itemsize * len(answer) for answer in reported._answers) == 400_000


def test_who_goes_on_learns_where_the_blocks_of_the_last_engine_lie():
    reported = memory()
    at = partial(begin_line, id="chatcmpl-1", created=9, seed=-7, answers=2)
    reported.feed(at(kv_address="10.0.0.7:9") + event(0, [5]))
    assert known(reported)["kv_address"] == "10.0.0.7:9"
    reported.start_over()
    assert known(reported)["kv_address"] == "10.0.0.7:9"  # until another one has begun
    reported.feed(at() + event(0, [6]))
    assert "kv_address" not in known(reported)


def test_an_address_that_is_no_text_is_not_trusted():
    reported = memory()
    begin = begin_line(id="a", created=1, seed=1, answers=1, kv_address="7")
    reported.feed(begin.replace(b'"7"', b"7") + event(0, [1]))
    assert reported.lost_with == BAD_STREAM
