"""Token counts are found however an answer is cut into pieces."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo_router.epp.usage_tail import UsageTail
from octavo_router.residency.usage import NO_USAGE, PyUsage

USAGE = {
    "prompt_tokens": 120,
    "completion_tokens": 34,
    "total_tokens": 154,
    "prompt_tokens_details": {"cached_tokens": 96},
}
COUNTS = PyUsage(120, 34, 96)

WHOLE = json.dumps(
    {"choices": [{"message": {"content": 'say "usage": {"prompt_tokens": 9}'}}], "usage": USAGE}
).encode()
EVENTS = (
    b"".join(
        b"data: %b\n\n" % json.dumps(event).encode()
        for event in (
            {"choices": [{"delta": {"content": "usage"}}], "usage": None},
            {"choices": [{"delta": {"content": '"usage":'}}], "usage": None},
            {"choices": [], "usage": USAGE},
        )
    )
    + b"data: [DONE]\n\n"
)


def fed(answer, cuts):
    tail = UsageTail()
    at = 0
    for stop in (*sorted(cuts), len(answer)):
        tail.feed(answer[at:stop])
        at = stop
    return tail


@pytest.mark.parametrize("answer", [WHOLE, EVENTS])
def test_it_is_found_at_every_cut(answer):
    for cut in range(len(answer)):
        assert fed(answer, [cut]).usage == COUNTS
    assert fed(answer, range(len(answer))).usage == COUNTS


@given(st.sampled_from([WHOLE, EVENTS]), st.lists(st.integers(0, 300), max_size=12))
@settings(max_examples=200, derandomize=True)
def test_it_is_found_in_any_pieces(answer, cuts):
    assert fed(answer, [cut for cut in cuts if cut <= len(answer)]).usage == COUNTS


def test_an_answer_without_counts_has_none():
    assert fed(b'{"choices": []}', [3, 7]).usage == NO_USAGE
    assert UsageTail().usage == NO_USAGE


def test_a_long_answer_leaves_a_kilobyte():
    tail = UsageTail()
    tail.feed(b'"usage":' + b"x" * 10)
    for _ in range(1000):
        tail.feed(b"y" * 5000)
    assert len(tail._window) + len(tail._carry) < 1100
