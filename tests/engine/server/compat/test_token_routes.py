"""Routes in tokens: /tokenize, /tokenizer_info, both renders and /inference/v1/generate."""

from __future__ import annotations

import json
from typing import Any

import pytest

from octavo_engine.server.settings import ServerSettings
from tests.fakes.engine import FakeEngine
from tests.fakes.server import RunningServer, running

HI = [{"role": "user", "content": "hi"}]
GENERATE = "/inference/v1/generate"


@pytest.fixture(scope="module")
def server():
    with running(FakeEngine(), ServerSettings(tokenizer_info=True)) as server:
        yield server


def ask(server: RunningServer, path: str, **body: Any) -> Any:
    with server.client() as client:
        answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def refusal(server: RunningServer, path: str, **body: Any) -> tuple[str, str]:
    with server.client() as client:
        answer = client.post(path, json=body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    return error["param"], error["code"]


def test_tokens_with_their_texts(server):
    assert ask(server, "/tokenize", prompt="ab", return_token_strs=True) == {
        "count": 2, "max_model_len": 256, "tokens": [97, 98], "token_strs": ["▁a", "▁b"],
    }  # fmt: skip


def test_tokens_of_a_conversation_and_back(server):
    tokens = ask(server, "/tokenize", messages=HI, add_generation_prompt=False)["tokens"]
    assert ask(server, "/detokenize", tokens=tokens) == {"prompt": "<user>hi\n"}


def test_the_tokenizer_tells_of_itself_where_it_may(server):
    with server.client() as client:
        reported = client.get("/tokenizer_info").json()
    assert (reported["vocab_size"], reported["model_max_length"], reported["eos_token_ids"]) == (
        300,
        256,
        [257],
    )
    with running() as closed, closed.client() as client:
        assert client.get("/tokenizer_info").status_code == 404


def test_a_rendered_completion_is_what_generate_takes(server):
    body = {"prompt": ["ab", "c"], "max_tokens": 3, "temperature": 0, "stop": "q", "n": 2}
    first, second = ask(server, "/v1/completions/render", **body, request_id="r")

    assert first == {
        "request_id": "cmpl-r-0",
        "token_ids": [97, 98],
        "sampling_params": {"n": 2, "max_tokens": 3, "temperature": 0.0, "stop": ["q"]},
        "model": "fake",
        "stream": False,
        "stream_options": None,
        "cache_salt": None,
        "priority": 0,
        "features": None,
        "kv_transfer_params": None,
    }
    generated = ask(server, GENERATE, **second)
    completed = ask(server, "/v1/completions", **{**body, "prompt": "c"}, return_token_ids=True)
    assert [choice["token_ids"] for choice in generated["choices"]] == [
        choice["token_ids"] for choice in completed["choices"]
    ]


def test_a_rendered_chat_runs_nothing(server):
    before = len(server.engine.requests)
    rendered = ask(server, "/v1/chat/completions/render", messages=HI)
    assert bytes(rendered["token_ids"]) == b"<user>hi\n<assistant>"
    assert rendered["sampling_params"] == {"max_tokens": None}
    assert len(server.engine.requests) == before


def test_a_rendered_grammar_comes_back_as_it_was_asked(server):
    wanted = {"choice": ["x"]}
    body = ask(server, "/v1/completions/render", prompt="a", structured_outputs=wanted)[0]
    assert body["sampling_params"]["structured_outputs"] == wanted
    ask(server, GENERATE, **body)
    assert server.engine.requests[-1][1].grammar.kind == "choice"


def test_generated_tokens_with_logprobs(server):
    params = {"max_tokens": 2, "logprobs": 1, "prompt_logprobs": 0, "temperature": 0}
    answer = ask(server, GENERATE, token_ids=[97, 98], sampling_params=params, request_id="mine")

    (choice,) = answer["choices"]
    assert answer["request_id"] == "mine"
    assert (choice["index"], choice["finish_reason"]) == (0, "length")
    assert [entry["bytes"] for entry in choice["logprobs"]["content"]] == [
        [token] for token in choice["token_ids"]
    ]
    assert answer["prompt_logprobs"][0] is None
    assert list(answer["prompt_logprobs"][1]) == ["98"]
    assert answer["usage"]["completion_tokens"] == 2


def test_streamed_tokens_are_the_same(server):
    body = {"token_ids": [97], "sampling_params": {"max_tokens": 3, "temperature": 0}}
    whole = ask(server, GENERATE, **body)["choices"][0]["token_ids"]
    with server.client() as client:
        options = {"include_usage": True}
        text = client.post(GENERATE, json={**body, "stream": True, "stream_options": options}).text
    frames = text.split("\n\n")
    assert frames[-2:] == ["data: [DONE]", ""]
    *events, last = [json.loads(frame.removeprefix("data: ")) for frame in frames[:-2]]
    assert [event["choices"][0]["token_ids"] for event in events] == [[token] for token in whole]
    assert last["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({}, "token_ids", "invalid_request"),
        ({"token_ids": []}, "token_ids", "invalid_request"),
        ({"token_ids": [300]}, "token_ids", "invalid_request"),
        ({"token_ids": [1] * 256}, "token_ids", "context_length_exceeded"),
        ({"token_ids": [1], "features": {"a": 1}}, "features", "not_supported"),
        ({"token_ids": [1], "kv_transfer_params": {"a": 1}}, "kv_transfer_params",
         "not_supported"),
        ({"token_ids": [1], "sampling_params": {"n": 0}}, "n", "invalid_request"),
    ],
)  # fmt: skip
def test_what_generate_refuses(server, body, param, code):
    assert refusal(server, GENERATE, **body) == (param, code)
