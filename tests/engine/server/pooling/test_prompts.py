"""What a model's makers want before a text is put there, by what the text is for."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fakes.engine import FakeEngine
from tests.fakes.server import RunningServer, running

PROMPTS = {"query": "q:", "document": "d:", "odd": "o:"}


@pytest.fixture(scope="module")
def server():
    engine = FakeEngine(tasks=("embed", "classify"), prompts=PROMPTS, default_prompt="document")
    with running(engine) as server:
        yield server


def read(server: RunningServer, path: str, **body: Any) -> list[str]:
    """The texts as the model saw them."""
    with server.client() as client:
        answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return [bytes(item.token_ids).decode() for item in server.engine.pooled[-1][0]]


@pytest.mark.parametrize(
    ("body", "seen"),
    [
        ({"input": "a"}, "d:a"),  # the default of the model's
        ({"input": "a", "prompt_name": "query"}, "q:a"),
        ({"input": [97], "prompt_name": "query"}, "a"),  # tokens are what they are
    ],
)
def test_embeddings_take_a_named_prompt(server, body, seen):
    assert read(server, "/v1/embeddings", **body) == [seen]


@pytest.mark.parametrize(
    ("input_type", "seen"),
    [("search_query", "q:a"), ("search_document", "d:a"), ("odd", "o:a"), ("clustering", "a"),
     (None, "d:a")],
)  # fmt: skip
def test_coheres_input_type_chooses_one(server, input_type, seen):
    assert read(server, "/v2/embed", texts=["a"], input_type=input_type) == [seen]


def test_a_ranking_knows_query_from_documents(server):
    assert read(server, "/rerank", query="a", documents=["b"]) == ["q:a", "d:b"]
    assert read(server, "/score", queries="a", items="b") == ["q:a", "d:b"]
    assert read(server, "/score", text_1="a", text_2="b") == ["d:a", "d:b"]


def test_a_classifier_reads_the_text_alone(server):
    assert read(server, "/classify", input="a") == ["a"]


def test_an_unknown_prompt_is_refused(server):
    with server.client() as client:
        answer = client.post("/v1/embeddings", json={"input": "a", "prompt_name": "none"})
    assert answer.json()["error"]["param"] == "prompt_name"
    assert "document, odd, query" in answer.json()["error"]["message"]
