"""Bodies of many small things are refused by their bytes; no body is refused for what it says."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo_engine.errors import RequestError
from octavo_engine.server.http.json_size import check_size
from octavo_engine.server.limits import RequestLimits
from tests.fakes.server import post, running

JSON = st.recursive(
    st.none() | st.integers() | st.text('ab"\\{[,:', max_size=6),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text('"\\{', max_size=3), inner),
    max_leaves=20,
)


def sizes(value: object) -> tuple[int, int]:
    """Objects and lists, and commas."""
    if not isinstance(value, dict | list):
        return 0, 0
    inner = [sizes(each) for each in (value.values() if isinstance(value, dict) else value)]
    commas = max(len(value) - 1, 0)
    return 1 + sum(one for one, _ in inner), commas + sum(two for _, two in inner)


@pytest.mark.slow
@settings(max_examples=400, derandomize=True)
@given(JSON, st.booleans())
def test_what_is_counted_is_what_there_is(value, is_ascii):
    body = json.dumps(value, ensure_ascii=is_ascii).encode()
    objects, commas = sizes(value)
    check_size(body, max_objects=objects, max_values=commas + 1)
    if objects:
        with pytest.raises(RequestError, match="objects and lists"):
            check_size(body, max_objects=objects - 1, max_values=commas + 1)
    if commas:
        with pytest.raises(RequestError, match="values"):
            check_size(body, max_objects=objects, max_values=commas)


@pytest.mark.parametrize(
    "what",
    [b"{},", b"[],", b'"",', b"1,", b'{"":1},', b'"\\"",', b"[" * 40 + b"]" * 40 + b","],
    ids=["objects", "lists", "texts", "numbers", "pairs", "quotes", "nests"],
)
def test_many_small_things_are_refused_quickly(what):
    limits = RequestLimits()
    body = b'{"prompt":[' + what * (limits.max_body_bytes // len(what) - 10) + b"1]}"
    began = time.process_time()
    with pytest.raises(RequestError):
        check_size(body, max_objects=limits.max_json_objects, max_values=limits.max_json_values)
    assert time.process_time() - began < 1.0  # to build them takes five


def test_the_server_refuses_them_and_long_code_is_read():
    with running() as server:
        many = b'{"prompt":"a","metadata":[' + b"{}," * 1_000_000 + b"{}]}"
        answer = server.raw(post("/v1/completions", many))
        assert b" 400 " in answer.split(b"\r\n")[0] and b"--max-json-objects" in answer
        code = json.dumps({"prompt": "a", "max_tokens": 1, "user": '{[,\\"' * 400_000})
        assert b" 200 " in server.raw(post("/v1/completions", code.encode())).split(b"\r\n")[0]
