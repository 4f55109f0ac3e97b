"""POST /v2/embed, /classify and /pooling."""

from __future__ import annotations

import base64

import numpy as np
import pytest

from octavo_engine.server.limits import RequestLimits
from octavo_engine.server.pooling.encoding import Encoding
from octavo_engine.server.settings import ServerSettings
from tests.engine.server.pooling.asking import ask, refusal
from tests.fakes.engine import FakeEngine
from tests.fakes.server import running

ALL = ("embed", "token_embed", "classify", "token_classify")


@pytest.fixture(scope="module")
def server():
    settings = ServerSettings(limits=RequestLimits(max_pooled_numbers=64))
    with running(FakeEngine(tasks=ALL), settings) as server:
        yield server


def test_coheres_embeddings_of_every_type(server):
    types = ["float", "binary", "ubinary", "base64"]
    answer = ask(
        server, "/v2/embed", texts=["ab", "b"], input_type="search_query", embedding_types=types
    )

    assert answer.pop("id").startswith("embd-")
    embeddings = answer.pop("embeddings")
    assert answer == {
        "texts": ["ab", "b"],
        "meta": {"api_version": {"version": "2"}, "billed_units": {"input_tokens": 3}},
        "response_type": "embeddings_by_type",
    }
    assert list(embeddings) == types
    assert embeddings["ubinary"] == [[0b01100000], [0b00100000]]
    assert embeddings["binary"] == [[0b01100000 - 128], [0b00100000 - 128]]
    assert embeddings["float"][1] == [0, 0, 1, 0, 0, 0, 0, 0]
    raw = base64.b64decode(embeddings["base64"][0])
    assert np.frombuffer(raw, "<f4").tolist() == embeddings["float"][0]


@pytest.mark.parametrize(
    ("truncate", "left"), [(None, b"a" * 255 + b"b"), ("END", b"a" * 255 + b"b"),
                           ("START", b"b" * 256)],
)  # fmt: skip
def test_coheres_texts_are_cut_where_they_say(server, truncate, left):
    ask(server, "/v2/embed", texts=["a" * 255 + "b" * 256], truncate=truncate)
    assert bytes(server.engine.pooled[-1][0][0].token_ids) == left


def test_coheres_inputs_are_texts_in_parts(server):
    part = {"type": "text", "text": "a"}
    answer = ask(server, "/v2/embed", inputs=[{"content": [part, part]}], output_dimension=4)
    assert answer["texts"] == ["a\na"]
    assert len(answer["embeddings"]["float"][0]) == 4


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({}, "texts", "invalid_request"),
        ({"texts": []}, "texts", "invalid_request"),
        ({"texts": [""]}, "texts", "invalid_request"),
        ({"texts": ["a"], "inputs": []}, "texts", "invalid_request"),
        ({"images": ["data:"]}, "images", "not_supported"),
        ({"inputs": [{"content": [{"type": "image_url"}]}]}, "inputs", "not_supported"),
        ({"texts": ["a"], "embedding_types": ["int8"]}, "embedding_types", "not_supported"),
        ({"texts": ["a"], "input_type": "odd"}, "input_type", "invalid_request"),
        ({"texts": ["a"], "max_tokens": 0}, "max_tokens", "invalid_request"),
        ({"texts": ["a" * 257], "truncate": "NONE"}, "input", "context_length_exceeded"),
    ],
)
def test_what_coheres_route_refuses(server, body, param, code):
    assert refusal(server, "/v2/embed", **body) == (param, code)


def test_classes_with_their_label(server):
    answer = ask(server, "/classify", input=["aab", "b"])
    assert answer.pop("id").startswith("classify-")
    answer.pop("created")
    assert answer == {
        "object": "list",
        "model": "fake",
        "data": [
            {"index": 0, "label": "odd", "num_classes": 2,
             "probs": [pytest.approx(1 / 3), pytest.approx(2 / 3)]},
            {"index": 1, "label": "even", "num_classes": 2, "probs": [1.0, 0.0]},
        ],
        "usage": {
            "prompt_tokens": 4, "total_tokens": 4, "completion_tokens": 0,
            "prompt_tokens_details": None,
        },
    }  # fmt: skip


def test_pooling_gives_a_row_a_token_unless_told(server):
    answer = ask(server, "/pooling", input="ab")
    assert answer["id"].startswith("pool-")
    assert answer["data"] == [
        {"index": 0, "object": "pooling",
         "data": [[0, 1, 0, 0, 0, 0, 0, 0], [0, 0, 1, 0, 0, 0, 0, 0]]}
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("task", "shape"),
    [("embed", (8,)), ("token_embed", (2, 8)), ("classify", (2,)), ("token_classify", (2, 2))],
)
def test_pooling_does_every_task_of_the_model(server, task, shape):
    answer = ask(server, "/pooling", input="ab", task=task)
    assert np.array(answer["data"][0]["data"]).shape == shape


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({"input": "a", "task": "score"}, "model", "wrong_task"),
        ({"input": "a", "task": "plugin"}, "task", "invalid_request"),
        ({"input": "a" * 9}, "input", "invalid_request"),  # times 8 numbers a token
        ({"input": "a", "task": "classify", "dimensions": 4}, "dimensions", "invalid_request"),
    ],
)
def test_what_pooling_refuses(server, body, param, code):
    assert refusal(server, "/pooling", **body) == (param, code)


def test_bfloat16_is_rounded_to_the_nearest_even():
    row = np.array([1.0, 1.00390625, 1.01171875, -2.5], np.float32)  # 1 + 1/256 lies in the middle
    packed = Encoding(dtype="bfloat16", endianness="big").pack(row)
    assert packed.hex() == "3f803f803f82c020"
