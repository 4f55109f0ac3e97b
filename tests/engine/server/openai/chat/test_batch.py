"""POST /v1/chat/completions/batch: one answer to each conversation, all or none."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fakes.server import RunningServer, running

PATH = "/v1/chat/completions/batch"
ONE, TWO = [{"role": "user", "content": "one"}], [{"role": "user", "content": "two!"}]


@pytest.fixture(scope="module")
def server():
    with running() as server:
        yield server


def post(server: RunningServer, path: str = PATH, **body: Any) -> Any:
    with server.client() as client:
        return client.post(path, json=body)


def test_answers_are_those_of_the_chat_endpoint_in_order(server):
    fields: dict[str, Any] = {"max_tokens": 4, "temperature": 0}
    batch = post(server, messages=[ONE, TWO], **fields).json()
    single = [
        post(server, "/v1/chat/completions", messages=each, **fields).json() for each in (ONE, TWO)
    ]

    assert (batch["object"], batch["id"][:9]) == ("chat.completion", "chatcmpl-")
    assert [choice["index"] for choice in batch["choices"]] == [0, 1]
    for choice, alone in zip(batch["choices"], single, strict=True):
        assert choice["message"] == alone["choices"][0]["message"]
    for count in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert batch["usage"][count] == sum(alone["usage"][count] for alone in single)


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({}, "messages", "invalid_request"),
        ({"messages": []}, "messages", "invalid_request"),
        ({"messages": ONE}, "messages[0]", "invalid_request"),
        ({"messages": [ONE, []]}, "messages[1]", "invalid_request"),
        ({"messages": [ONE, [{"role": "king", "content": "x"}]]}, "messages[1][0].role",
         "invalid_request"),
        ({"messages": [ONE] * 1025}, "messages", "invalid_request"),
        ({"messages": [ONE], "stream": True}, "stream", "not_supported"),
        ({"messages": [ONE], "n": 2}, "n", "not_supported"),
        ({"messages": [ONE], "tools": [{}]}, "tools", "not_supported"),
        ({"messages": [ONE], "use_beam_search": True}, "use_beam_search", "not_supported"),
        ({"messages": [ONE, TWO], "temperature": -1}, "temperature", "invalid_request"),
    ],
)  # fmt: skip
def test_what_is_refused_names_the_field(server, body, param, code):
    answer = post(server, **body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error["param"], error["code"]) == (param, code)


def test_one_bad_conversation_leaves_no_other_running(server):
    post(server, messages=[ONE, ONE, []], max_tokens=50)
    server.wait_until_idle()
    assert len(server.service.running) == 0
