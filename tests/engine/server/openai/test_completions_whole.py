"""What /v1/completions takes beyond a prompt: scoring, both sides of truncation, ids, grammars."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.fakes.engine import FakeEngine
from tests.fakes.server import RunningServer, running

PATH = "/v1/completions"


@pytest.fixture(scope="module")
def server():
    with running() as server:
        yield server


def ask(server: RunningServer, **body: Any) -> dict[str, Any]:
    return server.answer(PATH, body)


def stream(server: RunningServer, **body: Any) -> list[dict[str, Any]]:
    with server.client() as client:
        answer = client.post(PATH, json={**body, "stream": True})
    assert answer.status_code == 200, answer.text
    frames = answer.text.split("\n\n")
    assert frames[-2:] == ["data: [DONE]", ""]
    return [json.loads(frame.removeprefix("data: ")) for frame in frames[:-2]]


def refusal(server: RunningServer, **body: Any) -> tuple[str, str]:
    with server.client() as client:
        answer = client.post(PATH, json=body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    return error["param"], error["code"]


SCORED = {"prompt": ["ab", "c"], "echo": True, "max_tokens": 0, "logprobs": 1}


def test_a_prompt_is_scored_without_an_answer(server):
    answer = ask(server, **SCORED)

    first, second = answer["choices"]
    assert (first["text"], first["finish_reason"], first["stop_reason"]) == ("ab", "length", None)
    assert first["logprobs"] == {
        "text_offset": [0, 1],
        "tokens": ["a", "b"],
        "token_logprobs": [None, -0.5],
        "top_logprobs": [None, {"A": -1.0, "b": -0.5}],
    }
    assert second["logprobs"]["token_logprobs"] == [None]
    assert answer["usage"]["completion_tokens"] == 0


def test_a_streamed_score_is_the_same(server):
    whole = ask(server, **SCORED)["choices"]
    *events, last = stream(server, **SCORED, stream_options={"include_usage": True})

    reported = {event["choices"][0]["index"]: event["choices"][0] for event in events}
    assert len(events) == 2
    for index, choice in enumerate(whole):
        assert reported[index]["text"] == choice["text"]
        assert reported[index]["logprobs"] == choice["logprobs"]
        assert reported[index]["finish_reason"] == "length"
    assert last["usage"]["completion_tokens"] == 0


def test_text_offsets_go_on_behind_the_echo(server):
    body = {"prompt": "abc", "echo": True, "max_tokens": 2, "logprobs": 0, "temperature": 0}
    whole = ask(server, **body)["choices"][0]
    events = [event["choices"][0] for event in stream(server, **body)]

    assert whole["logprobs"]["text_offset"] == [0, 1, 2, 3, 4]
    assert whole["logprobs"]["tokens"] == list(whole["text"])
    streamed = [at for event in events for at in event["logprobs"]["text_offset"]]
    assert streamed == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(("side", "kept"), [(None, "cd"), ("left", "cd"), ("right", "ab")])
def test_a_prompt_is_cut_where_it_is_told(server, side, kept):
    answer = ask(
        server, prompt="abcd", max_tokens=1, truncate_prompt_tokens=2, truncation_side=side,
        return_token_ids=True,
    )  # fmt: skip
    assert bytes(answer["choices"][0]["prompt_token_ids"]).decode() == kept


def test_an_id_in_the_body_is_the_answers_id(server):
    assert ask(server, prompt="a", max_tokens=1, request_id="mine")["id"] == "cmpl-mine"


def test_prompts_times_n_are_numbered_in_order(server):
    body = {"prompt": ["a", "b"], "n": 2, "max_tokens": 2, "seed": 1, "echo": True}
    choices = ask(server, **body)["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    assert [choice["text"][0] for choice in choices] == ["a", "a", "b", "b"]


def test_a_grammar_reaches_the_engine(server):
    ask(server, prompt="a", max_tokens=1, structured_outputs={"choice": ["x", "y"]})
    grammar = server.engine.requests[-1][1].grammar
    assert (grammar.kind, json.loads(grammar.text)) == ("choice", ["x", "y"])


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({"max_tokens": 0}, "max_tokens", "invalid_request"),
        ({"suffix": "x"}, "suffix", "not_supported"),
        ({"best_of": 2}, "best_of", "not_supported"),
        ({"thinking_token_budget": 5}, "thinking_token_budget", "not_supported"),
        ({"watermarking": True}, "watermarking", "not_supported"),
        ({"ec_transfer_params": {"a": 1}}, "ec_transfer_params", "not_supported"),
        ({"prompt_embeds": "x"}, "prompt_embeds", "not_supported"),
        ({"use_beam_search": True, "min_tokens": 2}, "min_tokens", "not_supported"),
        ({"truncation_side": "top"}, "truncation_side", "invalid_request"),
        ({"request_id": "a b"}, "request_id", "invalid_request"),
        ({"response_format": {"type": "odd"}}, "response_format", "invalid_request"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs", "invalid_request"),
        ({"guided_regex": "a"}, "guided_regex", "not_supported"),
        ({"logprobs": 21}, "logprobs", "invalid_request"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "invalid_request"),
        ({"stream_options": {}}, "stream_options", "invalid_request"),
        ({"priority": 1}, "priority", "invalid_request"),
    ],
)
def test_what_is_refused_names_the_field(server, body, param, code):
    assert refusal(server, prompt="a", **body) == (param, code)


def test_a_model_that_embeds_says_so():
    with running(FakeEngine(tasks=("embed",))) as server:
        assert refusal(server, prompt="a") == ("model", "wrong_task")
