"""logprob_token_ids: what is told of each token are the named ones, wherever tokens are scored."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.fakes.server import running

ASKED = [7, 65, 7]
CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "temperature": 0,
}  # fmt: skip
TEXT: dict[str, Any] = {"prompt": "hi", "max_tokens": 3, "temperature": 0}
MODEL = "fake"
NAMED = {"logprob_token_ids": ASKED, "return_tokens_as_token_ids": True}


def official(server: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def test_a_chat_tells_of_them_whatever_top_logprobs_says():
    with running() as server, official(server) as client:
        wholes = [
            client.chat.completions.create(
                model=MODEL, **CHAT, logprobs=True, top_logprobs=top, extra_body=NAMED
            )
            for top in (0, 5)
        ]
        stream = client.chat.completions.create(
            model=MODEL, **CHAT, logprobs=True, stream=True, extra_body=NAMED
        )
        streamed = [
            entry
            for chunk in stream
            for choice in chunk.choices
            if choice.logprobs is not None
            for entry in choice.logprobs.content or ()
        ]
    for whole in wholes:
        logprobs = whole.choices[0].logprobs
        assert logprobs is not None and logprobs.content is not None
        assert len(logprobs.content) == 3 and logprobs.content == streamed
        for entry in logprobs.content:
            reported = [(one.token, one.logprob) for one in entry.top_logprobs]
            assert reported == [(f"token_id:{i}", -i) for i in ASKED]


def test_a_completion_tells_of_them_and_of_the_token_itself():
    with running() as server, official(server) as client:
        answer = client.completions.create(model=MODEL, **TEXT, logprobs=1, extra_body=NAMED)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.tokens and logprobs.top_logprobs
    for token, top in zip(logprobs.tokens, logprobs.top_logprobs, strict=True):
        assert set(top) == {"token_id:7", "token_id:65", token}


def test_tokens_in_tokens_out_needs_no_number_beside_them():
    body = {"token_ids": [1, 2], "sampling_params": {"max_tokens": 1, "logprob_token_ids": [9]}}
    with running() as server, server.client() as client:
        answer = client.post("/inference/v1/generate", json=body)
    assert answer.status_code == 200, answer.text
    (entry,) = answer.json()["choices"][0]["logprobs"]["content"]
    assert [one["logprob"] for one in entry["top_logprobs"]] == [-9.0]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("chat/completions", {**CHAT, "logprob_token_ids": [1]}),
        ("chat/completions", {**CHAT, "logprobs": True, "logprob_token_ids": [1] * 129}),
        ("completions", {**TEXT, "logprob_token_ids": [1]}),
        ("completions", {**TEXT, "logprobs": 0, "logprob_token_ids": [-1]}),
        ("completions", {**TEXT, "logprobs": 0, "logprob_token_ids": [10**9]}),
        (
            "completions",
            {**TEXT, "max_tokens": 0, "echo": True, "logprobs": 0, "logprob_token_ids": [1]},
        ),
        ("completions", {**TEXT, "use_beam_search": True, "logprob_token_ids": [1]}),
    ],
)
def test_what_cannot_be_told_is_refused_by_name(path, body):
    with running() as server, server.client() as client:
        answer = client.post(f"/v1/{path}", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "logprob_token_ids", answer.text


def test_a_stream_may_come_in_larger_pieces():
    with running() as server, server.client() as client:
        for path, body in (("chat/completions", CHAT), ("completions", TEXT)):
            answer = client.post(f"/v1/{path}", json={**body, "stream_interval": 3})
            assert answer.status_code == 200
            refused = client.post(f"/v1/{path}", json={**body, "stream_interval": 0})
            assert refused.json()["error"]["param"] == "stream_interval"
        assert [params.stream_interval for _, params, _ in server.engine.requests] == [3, 3]
