"""SageMaker's paths, the load, the model cards, and routes that say why they do nothing."""

from __future__ import annotations

from typing import Any

import pytest

from octavo_engine.server.compat.sagemaker import handler_of
from octavo_engine.server.limits import RequestLimits
from octavo_engine.server.settings import ServerSettings
from tests.fakes.engine import FakeEngine
from tests.fakes.server import running

HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def server():
    with running() as server:
        yield server


@pytest.mark.parametrize(
    ("body", "tasks", "endpoint"),
    [
        ({"prompt": "a"}, ("generate",), "completions"),
        ({"messages": HI}, ("generate",), "chat_completions"),
        ({"messages": HI}, ("embed",), "embeddings"),
        ({"token_ids": [1]}, ("generate",), "token_generate"),
        ({"input": "a"}, ("embed",), "embeddings"),
        ({"input": "a"}, ("classify",), "classify"),
        ({"input": "a"}, ("token_classify",), "pooling"),
        ({"input": "a", "task": "embed"}, ("embed",), "pooling"),
        ({"query": "a", "documents": []}, ("score",), "rerank"),
        ({"text_1": "a", "text_2": "b"}, ("score",), "score"),
        ({"queries": "a", "items": "b"}, ("score",), "score"),
        ({"texts": ["a"]}, ("embed",), "cohere_embed"),
    ],
)
def test_a_body_finds_its_endpoint_by_its_shape(body, tasks, endpoint):
    assert handler_of(body, tasks).__name__ == endpoint


def test_an_invocation_is_answered_whole_or_streamed(server):
    body = {"prompt": "a", "max_tokens": 2, "temperature": 0}
    with server.client() as client:
        direct = client.post("/v1/completions", json=body).json()
        whole = client.post("/invocations", json=body).json()
        streamed = client.post("/invocations", json={**body, "stream": True})
    assert whole["choices"] == direct["choices"]
    assert streamed.headers["content-type"].startswith("text/event-stream")
    assert streamed.text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize(
    "body", [{"prompt": "a", "max_tokens": -1}, {"foo": 1}, [], "x", {"input": "a"}]
)
def test_an_invocation_that_cannot_be(server, body):
    with server.client() as client:
        answer = client.post("/invocations", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"]


def test_an_error_inside_an_invoked_stream_is_an_event():
    from octavo_engine.errors import GenerationFailed

    engine = FakeEngine(error=GenerationFailed("odd numbers"), news_before_error=1)
    with running(engine) as server, server.client() as client:
        answer = client.post("/invocations", json={"prompt": "a", "stream": True})
        assert server.service.metrics is not None
    assert '"code":"model_error"' in answer.text
    assert answer.text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_a_ping_is_a_health_check(server, method):
    with server.client() as client:
        assert client.request(method, "/ping").status_code == 200
    with running(FakeEngine(state="dead")) as dead, dead.client() as client:
        assert client.request(method, "/ping").status_code == 503


def test_the_load_is_the_requests_in_flight(server):
    with server.client() as client:
        assert client.get("/load").json() == {"server_load": 0}


def test_a_models_card(server):
    with server.client() as client:
        cards = client.get("/v1/models").json()["data"]
    card: dict[str, Any] = cards[0]
    assert [card["id"] for card in cards] == ["fake", "alias"]
    assert (card["object"], card["parent"], card["max_model_len"]) == ("model", None, 256)
    assert card["tasks"] == ["generate"]
    assert card["permission"][0]["allow_sampling"] is True


@pytest.mark.parametrize("path", ["/v1/audio/transcriptions", "/v1/audio/translations"])
def test_audio_is_refused_before_the_file_is_read(server, path):
    with server.client() as client:
        sound = client.post(path, files={"file": b"\0" * 2**20}, data={"model": "fake"})
        other = client.post(path, json={})
    assert (sound.status_code, sound.json()["error"]["code"]) == (400, "wrong_task")
    assert "not a speech model" in sound.json()["error"]["message"]
    assert other.status_code == 415


def test_streamed_speech_is_answered_with_why_not(server):
    upgrade = {"connection": "Upgrade", "upgrade": "websocket", "sec-websocket-version": "13",
               "sec-websocket-key": "dGhlIHNhbXBsZSBub25jZQ=="}  # fmt: skip
    with server.client() as client:
        for headers in ({}, upgrade):
            answer = client.get("/v1/realtime", headers=headers)
            assert (answer.status_code, answer.json()["error"]["code"]) == (501, "not_implemented")


@pytest.mark.parametrize(("rank", "status"), [("0", 200), ("1", 400), ("", 400), ("x", 400)])
def test_the_only_rank_is_the_first(server, rank, status):
    with server.client() as client:
        headers = {"x-data-parallel-rank": rank}
        answer = client.post("/v1/completions", json={"prompt": "a"}, headers=headers)
    assert answer.status_code == status
    if status == 400:
        error = answer.json()["error"]
        assert (error["code"], error["param"]) == ("invalid_header", "x-data-parallel-rank")


def test_all_alternatives_are_there_where_the_server_allows_it():
    limits = RequestLimits(max_logprobs=-1)
    body = {"prompt": "ab", "max_tokens": 1, "logprobs": -1, "prompt_logprobs": 25, "echo": True}
    with running(settings=ServerSettings(limits=limits)) as server, server.client() as client:
        choice = client.post("/v1/completions", json=body).raise_for_status().json()["choices"][0]
        assert len(choice["prompt_logprobs"][1]) >= 300  # the vocabulary
        chat = {"messages": HI, "max_tokens": 1, "logprobs": True, "top_logprobs": -1}
        reported = client.post("/v1/chat/completions", json=chat).raise_for_status().json()
        assert len(reported["choices"][0]["logprobs"]["content"][0]["top_logprobs"]) == 300
    with running() as server, server.client() as client:
        body["prompt_logprobs"] = -1
        refused = client.post("/v1/completions", json=body).json()["error"]
        assert "--max-logprobs -1" in refused["message"]
