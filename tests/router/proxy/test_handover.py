"""What vLLM's engines are told, and what they answer, byte by byte."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo_router.proxy.handover import NotHandedOver, prompt_question, with_cache
from octavo_router.routing.request import RouteRequest

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


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
    asked = json.loads(question)
    assert asked.pop("kv_transfer_params") == {
        "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None,
        "remote_block_ids": None, "remote_host": None, "remote_port": None,
    }  # fmt: skip
    del body["stream_options"], body["min_tokens"]
    assert asked == {**body, "stream": False, "max_tokens": 1, "max_completion_tokens": 1}
