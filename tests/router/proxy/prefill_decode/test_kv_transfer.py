"""What vLLM's engines are told, and what they answer, byte by byte."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo_router.proxy.prefill_decode.kv_transfer import (
    NotHandedOver,
    Opening,
    opening_of,
    prompt_question,
    with_cache,
)
from octavo_router.routing.request import RouteRequest
from tests.fakes import vllm_pair as recorded

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@pytest.mark.slow
@given(
    st.dictionaries(st.text(), VALUES, min_size=1), st.dictionaries(st.text(), VALUES),
    st.text(" \t\r\n"), st.booleans(),
)  # fmt: skip
def test_only_the_place_of_the_cache_is_added(body, where, space, is_spaced):
    body = {"model": "m", **body}
    body.pop("kv_transfer_params", None)
    sent = json.dumps(body, indent=2 if is_spaced else None) + space
    answer = json.dumps({"id": "x", "kv_transfer_params": where, "usage": {}}).encode()
    joined = with_cache(sent.encode(), answer)
    assert json.loads(joined) == {**body, "kv_transfer_params": where}
    assert joined.startswith(sent.rstrip()[:-1].encode())  # what the client wrote stays as it is


@given(st.binary() | VALUES.map(lambda value: json.dumps(value).encode()))
def test_any_other_answer_is_none(answer):
    try:
        json.loads(answer)["kv_transfer_params"].items()
    except Exception:
        with pytest.raises(NotHandedOver):
            with_cache(b"{}", answer)


@given(st.binary() | VALUES.map(lambda value: json.dumps(value).encode()))
def test_any_body_is_asked_about_or_left_alone(body):
    question = prompt_question(body, RouteRequest(max_tokens=5))
    assert question is None or json.loads(question)["max_tokens"] == 1


def test_the_question_is_the_request_for_one_token():
    body = {
        "model": "m", "messages": [{"role": "user", "content": "ü"}], "stream": True, "n": 1,
        "stream_options": {"include_usage": True}, "max_completion_tokens": 99, "min_tokens": 7,
        "temperature": 0.5, "seed": 12345678901234567890, "tools": [],
    }  # fmt: skip
    question = prompt_question(json.dumps(body).encode(), RouteRequest(max_tokens=99))
    assert question is not None
    requested = json.loads(question)
    assert requested.pop("kv_transfer_params") == {
        "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None,
        "remote_block_ids": None, "remote_host": None, "remote_port": None,
    }  # fmt: skip
    del body["stream_options"], body["min_tokens"]
    assert requested == {**body, "stream": False, "max_tokens": 1, "max_completion_tokens": 1}


def test_where_a_cache_lies_is_passed_on_as_it_was_told():
    body = b'{"model":"m","prompt":"Once","max_tokens":8}'
    expected = body[:-1] + b',"kv_transfer_params":' + recorded.WHERE + b"}"
    assert with_cache(body, recorded.COMPUTED) == expected
    with pytest.raises(NotHandedOver, match="KV connector"):
        with_cache(body, recorded.COMPUTED_WITHOUT_CACHE)


@pytest.mark.parametrize("search", [True, False, None])
def test_a_beam_search_leaves_no_cache_behind(search):
    body = {"model": "m", "prompt": "Once", "max_tokens": 8, "use_beam_search": search}
    question = prompt_question(json.dumps(body).encode(), RouteRequest(max_tokens=8))
    assert (question is None) is bool(search)


@pytest.mark.parametrize("before", [b"", recorded.ROLE], ids=["completion", "chat"])
def test_a_stream_that_begins_with_an_error_has_not_begun(before):
    stream = before + recorded.FAILED_EVENTS
    failed_at = stream.index(b"\n\n", len(before)) + 2
    for size in range(len(stream) + 1):
        expected = Opening.FAILED if size >= failed_at else Opening.NOTHING
        assert opening_of(stream[:size]) is expected, stream[:size]


@pytest.mark.parametrize("events", [recorded.COMPLETION_EVENTS, recorded.CHAT_EVENTS])
def test_the_first_words_of_an_answer_are_not_waited_for_longer_than_needed(events):
    stream = b"".join(events)
    begun_at = len(events[0]) + (len(events[1]) if events[0] == recorded.ROLE else 0)
    for size in range(len(stream) + 1):
        expected = Opening.ANSWERS if size >= begun_at else Opening.NOTHING
        assert opening_of(stream[:size]) is expected, stream[:size]


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b'data: {"error": {"code": 400, "type": "BadRequestError"}}\n\n', Opening.ANSWERS),
        (b'data: {"choices": [{"text": "\\"role\\": \\"error\\""}]}\n\n', Opening.ANSWERS),
        (recorded.DONE, Opening.ANSWERS),  # the relay will say that this is none
        (b": a sign of life\n\n", Opening.NOTHING),
        (b"data: " + b"x" * 70_000, Opening.ANSWERS),  # whatever it is, it is not kept
    ],
)
def test_what_else_a_stream_may_begin_with(data, expected):
    assert opening_of(data) is expected


@given(st.binary(max_size=200))
def test_any_first_bytes_are_judged(data):
    assert opening_of(data) in Opening
