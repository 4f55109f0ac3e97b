"""Whatever a client sends, it is never our fault: no status of 500, and the server goes on."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo_engine.errors import RequestError
from octavo_engine.server.http import strict_json
from octavo_engine.server.openai.schemas import (
    ChatCompletionRequest,
    CompletionRequest,
    SamplingFields,
)
from tests.fakes.server import post, running

PATHS = ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"]
NAMES = sorted(
    {*CompletionRequest.__struct_fields__, *ChatCompletionRequest.__struct_fields__, "tokens"}
)

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.integers(-2, 40)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5)
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)
messages = st.lists(
    st.fixed_dictionaries(
        {},
        optional={
            "role": st.sampled_from(["user", "assistant", "system", "tool", "x"]) | values,
            "content": st.text(max_size=9) | values,
            "tool_calls": values,
        },
    ),
    max_size=3,
)
bodies = st.fixed_dictionaries(
    {},
    optional={name: values for name in NAMES if name not in ("messages", "prompt", "max_tokens")}
    | {
        "prompt": st.text(max_size=9) | st.lists(st.integers(-1, 300), max_size=5) | values,
        "messages": messages | values,
        "max_tokens": st.integers(-1, 9),
    },
)  # fmt: skip


@pytest.fixture(scope="module")
def server():
    with running() as server:
        yield server


@pytest.mark.slow
@settings(max_examples=120, deadline=None, derandomize=True,
          suppress_health_check=[HealthCheck.too_slow])  # fmt: skip
@given(path=st.sampled_from(PATHS), body=bodies | values)
def test_any_json_is_answered_or_refused(server, path, body):
    answer = server.raw(post(path, json.dumps(body).encode()))

    status = int(answer.split()[1])
    assert status in (200, 400, 404), answer
    if status != 200:
        error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert "Traceback" not in error["message"]
    server.wait_until_idle()


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.binary(max_size=60) | values.map(json.dumps).map(str.encode))
def test_any_bytes_are_parsed_or_refused(body):
    try:
        strict_json.decode(body, CompletionRequest, max_depth=8)
    except RequestError as error:
        assert error.status == 400
        assert error.message


@pytest.mark.slow
@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.dictionaries(st.text(max_size=3), values, max_size=5))
def test_proper_json_is_read_as_the_standard_library_reads_it(value: Any):
    body = json.dumps(value).encode()
    assert strict_json.parse(body, max_depth=64) == json.loads(body)


BODIES = st.one_of(
    values.map(json.dumps),
    st.dictionaries(st.text(max_size=3), values, max_size=4).map(json.dumps),
    st.sampled_from(
        [
            '{"a":1,"a":2}', '{"a":"b:c"}', '{"a":NaN}', '{"a":1e999}', '{"a":-0}', '{"a":01}',
            '{"a":1}x', '{"a":' + "9" * 30 + "}", '{"a":' + "9" * 5000 + "}", '{"a":"\\ud800"}',
            '{"a":"\\u0000"}', '{"a":[[[[[[[[1]]]]]]]]}', '{"a":[1,2.0,"x"],"b":null}', "{}", "",
        ]
    ),
)  # fmt: skip


@settings(max_examples=300, deadline=None, derandomize=True)
@given(BODIES, st.sampled_from([3, 8, 64]))
def test_plain_objects_are_read_the_quick_way_as_the_strict_one_reads_them(text, depth):
    def outcome(parse: Any) -> Any:
        try:
            return repr(parse(text.encode(), depth))
        except RequestError as error:
            return error.message, error.param, error.code

    def either(body: bytes, depth: int) -> Any:
        return strict_json.parse(body, max_depth=depth)

    assert outcome(either) == outcome(strict_json._strictly)


def test_every_sampling_field_has_the_name_it_is_documented_under():
    # A rename of a field would make clients' requests silently lose it.
    documented = {
        "model", "n", "temperature", "top_p", "top_k", "min_p", "presence_penalty",
        "frequency_penalty", "repetition_penalty", "seed", "stop", "stop_token_ids",
        "include_stop_str_in_output", "ignore_eos", "max_tokens", "min_tokens", "logit_bias",
        "bad_words", "allowed_token_ids", "skip_special_tokens", "prompt_logprobs", "stream",
        "stream_options", "truncate_prompt_tokens", "add_special_tokens", "priority", "cache_salt",
        "return_token_ids", "return_tokens_as_token_ids", "user", "logits_processors",
    }  # fmt: skip
    assert documented <= set(SamplingFields.__struct_fields__)
