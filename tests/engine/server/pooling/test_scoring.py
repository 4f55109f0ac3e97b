"""POST /score and /rerank, by models that read pairs and by embeddings."""

from __future__ import annotations

import numpy as np
import pytest

from octavo_engine.server.pooling.scoring import beginning, cosines
from tests.engine.server.pooling.asking import ask, refusal
from tests.fakes.engine import FakeEngine, FakeTokenizer
from tests.fakes.server import running


@pytest.fixture(scope="module")
def by_angle():
    with running(FakeEngine(tasks=("embed",))) as server:
        yield server


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
def test_a_score_of_equal_and_of_unlike_texts(by_angle, path):
    answer = ask(by_angle, path, text_1="ab", text_2=["ab", "cd", "ba"])

    assert answer.pop("id").startswith("score-")
    answer.pop("created")
    assert answer == {
        "object": "list",
        "model": "fake",
        "data": [
            {"index": 0, "object": "score", "score": pytest.approx(1.0)},
            {"index": 1, "object": "score", "score": 0.0},
            {"index": 2, "object": "score", "score": pytest.approx(1.0)},
        ],
        "usage": {
            "prompt_tokens": 8, "total_tokens": 8, "completion_tokens": 0,
            "prompt_tokens_details": None,
        },
    }  # fmt: skip


def test_models_of_token_vectors_score_by_best_matches():
    with running(FakeEngine(tasks=("token_embed",))) as server:
        answer = ask(server, "/score", text_1="ab", text_2=["ab", "cd"])
        assert [params.task for _, params in server.engine.pooled] == ["token_embed"]
    same, other = (entry["score"] for entry in answer["data"])
    assert same > other


def test_a_text_that_is_compared_often_is_read_once(by_angle):
    ask(by_angle, "/score", text_1="ab", text_2=["ab", "cd", "ba"])
    assert len(by_angle.engine.pooled[-1][0]) == 4


@pytest.mark.parametrize(
    "names",
    [("text_1", "text_2"), ("data_1", "data_2"), ("queries", "documents"), ("queries", "items")],
)
def test_every_pair_of_names_is_known(by_angle, names):
    body = dict(zip(names, (["ab", "c"], ["ab", "d"]), strict=True))
    scores = [entry["score"] for entry in ask(by_angle, "/score", **body)["data"]]
    assert scores == [pytest.approx(1.0), 0.0]


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({}, "text_1", "invalid_request"),
        ({"text_1": "a"}, "text_1", "invalid_request"),
        ({"text_1": "a", "data_2": "b"}, "text_1", "invalid_request"),
        ({"text_1": "a", "text_2": "b", "queries": "c"}, "text_1", "invalid_request"),
        ({"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1", "invalid_request"),
        ({"text_1": ["a", "b"], "text_2": "c"}, "text_1", "invalid_request"),
        ({"text_1": "a", "text_2": []}, "text_2", "invalid_request"),
        ({"text_1": "a", "text_2": ["b", ""]}, "text_2", "invalid_request"),
        ({"queries": "", "items": "b"}, "queries", "invalid_request"),
        ({"text_1": "a", "text_2": ["b"] * 2049}, "text_2", "invalid_request"),
        ({"text_1": "a", "text_2": "b", "instruction": "x"}, "instruction", "not_supported"),
        ({"text_1": "a", "text_2": "b", "max_tokens_per_doc": 0}, "max_tokens_per_doc",
         "invalid_request"),
    ],
)  # fmt: skip
def test_what_a_score_cannot_be_asked_of(by_angle, body, param, code):
    assert refusal(by_angle, "/score", **body) == (param, code)


def test_a_ranking_in_jinas_shape(by_angle):
    answer = ask(by_angle, "/rerank", query="ab", documents=["cd", {"text": "ab"}, "ad"])

    assert answer.pop("id").startswith("rerank-")
    assert answer == {
        "model": "fake",
        "usage": {"prompt_tokens": 8, "total_tokens": 8},
        "results": [
            {"index": 1, "document": {"text": "ab", "multi_modal": None},
             "relevance_score": pytest.approx(1.0)},
            {"index": 2, "document": {"text": "ad", "multi_modal": None},
             "relevance_score": pytest.approx(0.5)},
            {"index": 0, "document": {"text": "cd", "multi_modal": None}, "relevance_score": 0.0},
        ],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("top_n", "shown"), [(1, [1]), (2, [1, 2]), (0, [1, 2, 0]), (9, [1, 2, 0])]
)
def test_top_n(by_angle, top_n, shown):
    answer = ask(by_angle, "/v1/rerank", query="ab", documents=["cd", "ab", "ad"], top_n=top_n)
    assert [result["index"] for result in answer["results"]] == shown


def test_equal_documents_keep_their_order(by_angle):
    answer = ask(by_angle, "/rerank", query="ab", documents=["cd", "ab", "dc", "ba"])
    assert [result["index"] for result in answer["results"]] == [1, 3, 0, 2]


def test_a_ranking_in_coheres_shape_without_documents(by_angle):
    answer = ask(
        by_angle, "/v2/rerank", query="ab", documents=["ab"], return_documents=False, top_n=1
    )
    assert answer["results"][0]["document"] is None
    assert answer["meta"]["billed_units"] == {"search_units": 1}


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({"documents": ["a"]}, "query", "invalid_request"),
        ({"query": "a"}, "documents", "invalid_request"),
        ({"query": "a", "documents": []}, "documents", "invalid_request"),
        ({"query": "", "documents": ["a"]}, "query", "invalid_request"),
        ({"query": "a", "documents": [{}]}, "documents[0].text", "invalid_request"),
        ({"query": "a", "documents": ["a"], "top_n": -1}, "top_n", "invalid_request"),
        ({"query": "a", "documents": ["a"], "rank_fields": ["title"]}, "rank_fields",
         "not_supported"),
        ({"query": "a", "documents": ["a"], "max_chunks_per_doc": 2}, "max_chunks_per_doc",
         "not_supported"),
    ],
)  # fmt: skip
def test_what_a_ranking_cannot_be_asked_of(by_angle, body, param, code):
    assert refusal(by_angle, "/rerank", **body) == (param, code)


def test_a_model_that_does_neither_says_what_it_does():
    with running(FakeEngine(tasks=("classify",))) as server:
        assert refusal(server, "/score", text_1="a", text_2="b") == ("model", "wrong_task")


def test_documents_can_be_cut(by_angle):
    body = {"query": "ab", "documents": ["abcdef"], "max_tokens_per_doc": 2}
    answer = ask(by_angle, "/rerank", **body)
    assert answer["results"][0]["relevance_score"] == pytest.approx(1.0)
    assert answer["results"][0]["document"]["text"] == "abcdef"


def test_a_beginning_has_as_many_tokens_as_fit_and_whole_characters():
    assert beginning(FakeTokenizer(), "abcdef", 3) == "abc"  # type: ignore[arg-type]  # enough of one
    assert beginning(FakeTokenizer(), "aéb", 2) == "a"  # type: ignore[arg-type]  # é is two tokens
    assert beginning(FakeTokenizer(), "ab", 3) == "ab"  # type: ignore[arg-type]


def test_cosines_of_vectors_without_length_are_0():
    zeros, ones = np.zeros((1, 3), np.float32), np.ones((2, 3), np.float32)
    assert cosines(zeros, ones) == [0.0, 0.0]
    assert cosines(ones[:1], np.stack([ones[0], -ones[1]])) == [pytest.approx(1), pytest.approx(-1)]
