"""Bad input gets a 4xx that names the field, and the next request is served."""

from __future__ import annotations

import json
from typing import Any

import pytest

from octavo_engine.server.limits import RequestLimits
from octavo_engine.server.settings import ServerSettings
from tests.fakes.server import RunningServer, post, running

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def server():
    limits = RequestLimits(max_body_bytes=2**20, max_json_depth=32)
    with running(settings=ServerSettings(limits=limits)) as server:
        yield server


def assert_still_serves(server: RunningServer) -> None:
    with server.client() as client:
        assert client.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 1}).status_code == 200


def error_of(answer: bytes) -> tuple[int, dict[str, Any]]:
    head, _, body = answer.partition(b"\r\n\r\n")
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return int(head.split()[1]), error


FIELDS: list[tuple[str, dict[str, Any], str]] = [
    (COMPLETIONS, {"prompt": "a", "temperature": "hot"}, "temperature"),
    (COMPLETIONS, {"prompt": "a", "temperature": -1}, "temperature"),
    (COMPLETIONS, {"prompt": "a", "temperature": True}, "temperature"),
    (COMPLETIONS, {"prompt": "a", "max_tokens": -1}, "max_tokens"),
    (COMPLETIONS, {"prompt": "a", "max_tokens": 0}, "max_tokens"),
    (COMPLETIONS, {"prompt": "a", "max_tokens": 1.5}, "max_tokens"),
    (COMPLETIONS, {"prompt": "a", "max_tokens": 10**40}, "max_tokens"),
    (COMPLETIONS, {"prompt": "a", "n": 10**9}, "n"),
    (COMPLETIONS, {"prompt": "a", "n": 0}, "n"),
    (COMPLETIONS, {"prompt": "a", "top_p": 1.5}, "top_p"),
    (COMPLETIONS, {"prompt": "a", "stop": [""]}, "stop"),
    (COMPLETIONS, {"prompt": "a", "stop": ["x"] * 65}, "stop"),
    (COMPLETIONS, {"prompt": "a", "stop": "x" * 1025}, "stop"),
    (COMPLETIONS, {"prompt": "a", "stop": 5}, "stop"),
    (COMPLETIONS, {"prompt": "a", "bad_words": ["x"] * 1025}, "bad_words"),
    (COMPLETIONS, {"prompt": "a", "bad_words": ["x" * 257]}, "bad_words"),
    (COMPLETIONS, {"prompt": "a", "seed": 2**70}, "seed"),
    (COMPLETIONS, {"prompt": "a", "stop_token_ids": [-1]}, "stop_token_ids"),
    (COMPLETIONS, {"prompt": "a", "stop_token_ids": [300]}, "stop_token_ids"),
    (COMPLETIONS, {"prompt": "a", "allowed_token_ids": []}, "allowed_token_ids"),
    (COMPLETIONS, {"prompt": "a", "logit_bias": {"300": 1}}, "logit_bias"),
    (COMPLETIONS, {"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias"),
    (COMPLETIONS, {"prompt": "a", "logprobs": 21}, "logprobs"),
    (COMPLETIONS, {"prompt": "a", "logprobs": -1}, "logprobs"),
    (COMPLETIONS, {"prompt": "a", "logprobs": True}, "logprobs"),
    (COMPLETIONS, {"prompt": "a", "stream_options": {}}, "stream_options"),
    (COMPLETIONS, {"prompt": "a", "stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
    (COMPLETIONS, {"prompt": "a", "stream": "yes"}, "stream"),
    (COMPLETIONS, {"prompt": "a", "priority": 1}, "priority"),
    (COMPLETIONS, {"prompt": "a", "cache_salt": ""}, "cache_salt"),
    (COMPLETIONS, {"prompt": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    (COMPLETIONS, {"prompt": "a", "suffix": "b"}, "suffix"),
    (COMPLETIONS, {"prompt": "a", "use_beam_search": "yes"}, "use_beam_search"),
    (COMPLETIONS, {"prompt": "a", "use_beam_search": True, "n": 3, "stop": "a"}, "stop"),
    (COMPLETIONS, {"prompt": "a", "use_beam_search": True, "stream": True}, "stream"),
    (COMPLETIONS, {"prompt": "a", "use_beam_search": True, "length_penalty": 1e300},
     "length_penalty"),
    (COMPLETIONS, {"prompt": "a", "use_beam_search": True, "logprobs": 1}, "logprobs"),
    (COMPLETIONS, {"prompt": "a", "use_beam_search": True, "structured_outputs": {"regex": "a"}},
     "use_beam_search"),
    (COMPLETIONS, {"prompt": "a", "best_of": 2}, "best_of"),
    (COMPLETIONS, {"prompt": "a", "repetition_detection": {"max_pattern_size": -1}},
     "repetition_detection.max_pattern_size"),
    (COMPLETIONS, {"prompt": "a", "guided_regex": "a"}, "guided_regex"),
    (COMPLETIONS, {"prompt": "a", "response_format": {"type": "json_schema"}},
     "response_format.json_schema"),
    (COMPLETIONS, {"prompt": "a", "structured_outputs": {"regex": "a("}}, "structured_outputs"),
    (COMPLETIONS, {"prompt": "a", "prompt_embeds": "AAAA"}, "prompt_embeds"),
    (COMPLETIONS, {}, "prompt"),
    (COMPLETIONS, {"prompt": ""}, "prompt"),
    (COMPLETIONS, {"prompt": []}, "prompt"),
    (COMPLETIONS, {"prompt": [[]]}, "prompt"),
    (COMPLETIONS, {"prompt": ["a", ""]}, "prompt"),
    (COMPLETIONS, {"prompt": ["a"] * 1025}, "prompt"),
    (COMPLETIONS, {"prompt": None}, "prompt"),
    (COMPLETIONS, {"prompt": [1, "a"]}, "prompt"),
    (COMPLETIONS, {"prompt": ["a", 1]}, "prompt"),
    (COMPLETIONS, {"prompt": [1, 300]}, "prompt"),
    (COMPLETIONS, {"prompt": [-1]}, "prompt"),
    (COMPLETIONS, {"prompt": [10**30]}, "prompt"),
    (COMPLETIONS, {"prompt": [1.5]}, "prompt[0]"),
    (COMPLETIONS, {"prompt": [True]}, "prompt[0]"),
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {}, "messages"),
    (CHAT, {"messages": "hi"}, "messages"),
    (CHAT, {"messages": [{}]}, "messages[0].role"),
    (CHAT, {"messages": [{"role": 1, "content": "a"}]}, "messages[0].role"),
    (CHAT, {"messages": [{"role": "god", "content": "a"}]}, "messages[0].role"),
    (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content"),
    (CHAT, {"messages": [*USER, {"role": "user", "content": [{"type": "text"}]}]},
     "messages[1].content[0].text"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
     "messages[0].content[0].type"),
    (CHAT, {"messages": USER, "max_completion_tokens": -5}, "max_completion_tokens"),
    (CHAT, {"messages": USER, "max_completion_tokens": 5000}, "max_completion_tokens"),
    (CHAT, {"messages": USER, "top_logprobs": 2}, "top_logprobs"),
    (CHAT, {"messages": USER, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    (CHAT, {"messages": USER, "tools": []}, "tools"),
    (CHAT, {"messages": USER, "tools": [{"type": "function"}]}, "tools[0].function"),
    (CHAT, {"messages": USER, "tool_choice": "required"}, "tool_choice"),
    (CHAT, {"messages": USER, "response_format": {"type": "yaml"}}, "response_format"),
    (CHAT, {"messages": USER, "modalities": ["audio"]}, "modalities"),
    (CHAT, {"messages": USER, "chat_template": "{{ x }}"}, "chat_template"),
    (CHAT, {"messages": USER, "chat_template_kwargs": {"a": [1]}}, "chat_template_kwargs.a"),
    (CHAT, {"messages": USER, "chat_template_kwargs": {"messages": "x"}},
     "chat_template_kwargs.messages"),
    *((CHAT, {"messages": USER, "chat_template_kwargs": {name: ""}}, f"chat_template_kwargs.{name}")
      for name in ("self", "template", "guard", "add_special_tokens")),
    (CHAT, {"messages": USER, "continue_final_message": True}, "continue_final_message"),
    ("/tokenize", {}, "prompt"),
    ("/tokenize", {"prompt": "a", "messages": USER}, "prompt"),
    ("/detokenize", {}, "tokens"),
    ("/detokenize", {"tokens": [300]}, "tokens"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "param"), FIELDS, ids=lambda value: str(value)[:60])
def test_a_bad_field_is_a_400_that_names_it(server, path, body, param):
    status, error = error_of(server.raw(post(path, json.dumps(body).encode())))

    assert (status, error["param"]) == (400, param)
    assert error["type"] == "invalid_request_error"


def test_all_that_bad_input_has_left_no_trace(server):
    assert_still_serves(server)
    server.wait_until_idle()


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_an_unknown_model_is_a_404(server, path):
    body = {"model": "gpt-9", "prompt": "a", "messages": USER}

    status, error = error_of(server.raw(post(path, json.dumps(body).encode())))

    assert status == 404
    assert error == {
        "message": "The model `gpt-9` does not exist. There are: `fake`, `alias`.",
        "type": "not_found_error",
        "param": "model",
        "code": "model_not_found",
    }


@pytest.mark.parametrize(
    ("path", "body", "param", "numbers"),
    [
        (COMPLETIONS, {"prompt": "a" * 256}, "prompt", ("256", "256")),
        (COMPLETIONS, {"prompt": [1] * 700}, "prompt", ("256", "700")),
        (COMPLETIONS, {"prompt": "a" * 200, "max_tokens": 57}, "max_tokens", ("256", "257")),
        (CHAT, {"messages": [{"role": "user", "content": "a" * 400}]}, "messages", ("256", "418")),
    ],
)  # fmt: skip
def test_what_exceeds_the_context_is_told_both_numbers(server, path, body, param, numbers):
    status, error = error_of(server.raw(post(path, json.dumps(body).encode())))

    assert (status, error["code"], error["param"]) == (400, "context_length_exceeded", param)
    assert all(number in error["message"] for number in numbers)


def test_a_default_max_tokens_is_cut_to_the_room_there_is(server):
    with server.client() as client:
        answer = client.post(COMPLETIONS, json={"prompt": "a" * 250, "ignore_eos": True}).json()

    assert answer["usage"]["completion_tokens"] == 6


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        (b"", None, "empty"),
        (b"  ", None, "empty"),
        (b"{", None, "valid JSON"),
        (b'{"prompt": "a",}', None, "valid JSON"),
        (b"[]", None, "expected object"),
        (b"null", None, "expected object"),
        (b'{"prompt": "\xff"}', None, "UTF-8"),
        (b'{"prompt": "a", "temperature": NaN}', "temperature", "finite"),
        (b'{"prompt": "a", "temperature": -Infinity}', "temperature", "finite"),
        (b'{"prompt": "a", "temperature": 1e999}', "temperature", "finite"),
        (b'{"prompt": "a", "logit_bias": {"1": NaN}}', "1", "finite"),
        (b'{"prompt": "a", "prompt": "b"}', "prompt", "twice"),
        (b'{"prompt": "a", "x": ' + b"[" * 40 + b"]" * 40 + b"}", None, "nested"),
        (b'{"prompt": "a", "x": ' + b"[" * 40_000 + b"]" * 40_000 + b"}", None, "nested"),
        (b'{"prompt": "a", "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", None, "50000 objects"),
        (b'{"prompt": "a", "n": ' + b"1" * 10_000 + b"}", None, "too long"),
    ],
    ids=range(16),
)
def test_what_is_not_proper_json_is_a_400(server, body, param, words):
    status, error = error_of(server.raw(post(COMPLETIONS, body)))

    assert (status, error["param"]) == (400, param)
    assert words in error["message"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (COMPLETIONS, rb'{"prompt": "a", "model": "\ud800"}', "model"),
        (COMPLETIONS, rb'{"prompt": "a", "cache_salt": "\uDC00"}', "cache_salt"),
        (COMPLETIONS, rb'{"prompt": "a", "\ud800": 1}', None),
        (COMPLETIONS, rb'{"prompt": "a", "\ud800": 1, "\ud800": 1}', "\\ud800"),
        (COMPLETIONS, rb'{"prompt": "a", "\ud800": 1e999}', "\\ud800"),
        (COMPLETIONS, rb'{"prompt": "a", "metadata": {"\ud800": 1}}', "metadata"),
        (COMPLETIONS, rb'{"prompt": "a", "user": "\ud83d\ud83d\ude00"}', "user"),
        (COMPLETIONS, rb'{"prompt": ["a", "\ud800"]}', "prompt[1]"),
        (CHAT, rb'{"messages": [{"role": "\ud800", "content": "a"}]}', "messages[0].role"),
        ("/tokenize", rb'{"prompt": "\ud800"}', "prompt"),
        ("/invocations", rb'{"prompt": "a", "model": "\ud800"}', "model"),
        ("/v1/responses", rb'{"input": "a", "model": "\ud800"}', "model"),
        (COMPLETIONS, rb'"\ud800"', None),
    ],
)
def test_half_a_surrogate_pair_is_a_400_wherever_it_stands(server, path, body, param):
    status, error = error_of(server.raw(post(path, body)))

    assert (status, error["param"], error["code"]) == (400, param, "invalid_json")


def test_a_whole_surrogate_pair_is_a_character(server):
    body = rb'{"prompt": "\ud83d\ude00 \\ud800", "max_tokens": 1}'

    assert server.raw(post(COMPLETIONS, body)).startswith(b"HTTP/1.1 200")


def test_many_brackets_side_by_side_are_not_deep(server):
    body = {"prompt": "a", "max_tokens": 1, "metadata": [[] for _ in range(1000)]}

    with server.client() as client:
        assert client.post(COMPLETIONS, json=body).status_code == 200


@pytest.mark.parametrize("content_type", ["text/plain", "", "application/x-www-form-urlencoded"])
def test_another_content_type_is_a_415(server, content_type):
    answer = server.raw(post(COMPLETIONS, b'{"prompt": "a"}', content_type=content_type))

    status, error = error_of(answer)
    assert (status, error["code"]) == (415, "unsupported_media_type")


def test_a_charset_in_the_content_type_is_fine(server):
    content_type = "Application/JSON; charset=utf-8"
    answer = server.raw(post(COMPLETIONS, b'{"prompt": "a"}', content_type=content_type))

    assert answer.startswith(b"HTTP/1.1 200")


def test_a_compressed_body_is_a_415(server):
    answer = server.raw(post(COMPLETIONS, b"\x1f\x8b", "content-encoding: gzip"))

    assert error_of(answer)[0] == 415


def test_a_body_that_is_too_large_is_refused_by_its_length_alone(server):
    # The body is never sent: the answer comes by the header.
    head = post(COMPLETIONS, b"").replace(b"content-length: 0", b"content-length: 10485760")

    status, error = error_of(server.raw(head))

    assert (status, error["code"]) == (413, "body_too_large")
    assert "1048576" in error["message"]


def test_a_chunked_body_is_counted_while_it_arrives(server):
    head = post(COMPLETIONS, b"").replace(b"content-length: 0", b"transfer-encoding: chunked")
    chunk = b"10000\r\n" + b"x" * 0x10000 + b"\r\n"

    status, error = error_of(server.raw(head + chunk * 17 + b"0\r\n\r\n"))

    assert (status, error["code"]) == (413, "body_too_large")


def test_a_client_that_sends_ten_megabytes_reads_its_413(server):
    with server.client() as client:
        answer = client.post(COMPLETIONS, json={"prompt": "a" * 10_000_000})

    assert answer.status_code == 413
    assert answer.json()["error"]["code"] == "body_too_large"
    assert_still_serves(server)


def test_a_slow_body_is_a_408():
    with running(settings=ServerSettings(limits=RequestLimits(body_timeout_s=0.05))) as server:
        head = post(COMPLETIONS, b"").replace(b"content-length: 0", b"content-length: 10")

        status, error = error_of(server.raw(head + b"{"))

    assert (status, error["code"]) == (408, "body_timeout")


def test_endless_headers_are_a_431(server):
    answer = server.raw(b"GET /health HTTP/1.1\r\nx: " + b"y" * 70_000)

    assert error_of(answer)[0] == 431


def test_what_is_not_http_is_a_400_in_the_same_shape(server):
    status, error = error_of(server.raw(b"\x16\x03\x01hello\r\n\r\n"))

    assert (status, error["code"]) == (400, "invalid_http")


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nope", 404, "route_not_found"),
        ("GET", "/v1/models/nope", 404, "model_not_found"),
        ("GET", COMPLETIONS, 405, "method_not_allowed"),
        ("POST", "/health", 405, "method_not_allowed"),
        ("GET", "/health/", 404, "route_not_found"),
    ],
)
def test_wrong_paths_and_methods_are_answered_in_the_same_shape(server, method, path, status, code):
    with server.client() as client:
        answer = client.request(method, path)

    assert answer.status_code == status
    assert answer.json()["error"]["code"] == code
    assert ("allow" in answer.headers) == (status == 405)
    words = {
        "route_not_found": f"Invalid URL ({method} {path})",
        "model_not_found": "The model `nope` does not exist. There are: `fake`, `alias`.",
        "method_not_allowed": f"{path} does not take {method}.",
    }
    assert answer.json()["error"]["message"] == words[code]


HARMLESS = {
    "watermarking": False, "ec_transfer_params": {}, "return_token_offsets": True,
    "user": "me", "metadata": {"a": "b"}, "store": False, "service_tier": "auto",
    "parallel_tool_calls": True, "tool_choice": "none", "response_format": {"type": "text"},
    "length_penalty": 1.0, "best_of": 1, "use_beam_search": False, "modalities": ["text"],
    "spaces_between_special_tokens": True,
    "no_such_field": {"at": ["all"]}, "logit_bias": {}, "seed": None
}  # fmt: skip


def test_fields_that_change_nothing_are_accepted(server):
    with server.client() as client:
        answer = client.post(CHAT, json={"messages": USER, "max_tokens": 2, **HARMLESS})

    assert answer.status_code == 200
