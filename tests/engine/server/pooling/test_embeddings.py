"""POST /v1/embeddings: shapes to the byte, every form of input and number, and what is refused."""

from __future__ import annotations

import base64
import json
import socket
from typing import Any

import numpy as np
import openai
import pytest

from octavo_engine.server.limits import RequestLimits
from octavo_engine.server.settings import ServerSettings
from tests.fakes.engine import FakeEngine
from tests.fakes.server import RunningServer, post, running

PATH = "/v1/embeddings"
LIMITS = RequestLimits(max_pooling_items=8, max_pooling_tokens=500)


@pytest.fixture(scope="module")
def server():
    engine = FakeEngine(tasks=("embed",))
    with running(engine, ServerSettings(limits=LIMITS)) as server:
        yield server


def ask(server: RunningServer, **body: Any) -> dict[str, Any]:
    return server.answer(PATH, body)


def refusal(server: RunningServer, **body: Any) -> dict[str, Any]:
    with server.client() as client:
        answer = client.post(PATH, json=body)
    assert answer.status_code == 400, answer.text
    error: dict[str, Any] = answer.json()["error"]
    return error


def unit(*counts: float) -> list[float]:
    vector = np.array(counts, np.float32)
    values: list[float] = (vector / np.linalg.norm(vector)).tolist()
    return values


# "a" is 97, which the fake engine counts in column 97 % 8 = 1.
A, AAB = unit(0, 1, 0, 0, 0, 0, 0, 0), unit(0, 2, 1, 0, 0, 0, 0, 0)


def test_the_whole_answer(server):
    answer = ask(server, input=["a", "aab"], model="alias")

    assert answer.pop("id").startswith("embd-")
    assert answer.pop("created") > 0
    assert answer == {
        "object": "list",
        "model": "alias",
        "data": [
            {"index": 0, "object": "embedding", "embedding": A},
            {"index": 1, "object": "embedding", "embedding": AAB},
        ],
        "usage": {
            "prompt_tokens": 4, "total_tokens": 4, "completion_tokens": 0,
            "prompt_tokens_details": None,
        },
    }  # fmt: skip


@pytest.mark.parametrize(
    ("given", "tokens"),
    [
        ("ab", [[97, 98]]),
        (["ab", "c"], [[97, 98], [99]]),
        ([97, 98], [[97, 98]]),
        ([[97], [98, 99]], [[97], [98, 99]]),
    ],
)
def test_texts_and_token_ids_are_inputs(server, given, tokens):
    ask(server, input=given)
    assert [item.token_ids for item in server.engine.pooled[-1][0]] == tokens


def test_a_conversation_is_one_input_without_an_answers_beginning(server):
    ask(server, messages=[{"role": "user", "content": "hi"}])
    (item,) = server.engine.pooled[-1][0]
    assert bytes(item.token_ids) == b"<user>hi\n"


def test_base64_is_the_same_numbers(server):
    answer = ask(server, input="aab", encoding_format="base64")
    raw = base64.b64decode(answer["data"][0]["embedding"])
    assert np.frombuffer(raw, "<f4").tolist() == AAB


@pytest.mark.parametrize(
    ("dtype", "endianness", "numpy_type"),
    [("float32", "big", ">f4"), ("float16", "little", "<f2"), ("float16", "big", ">f2")],
)
def test_numbers_of_other_types_and_orders(server, dtype, endianness, numpy_type):
    answer = ask(
        server, input="aab", encoding_format="base64", embed_dtype=dtype, endianness=endianness
    )
    raw = base64.b64decode(answer["data"][0]["embedding"])
    assert np.frombuffer(raw, numpy_type).tolist() == np.array(AAB, numpy_type).tolist()


def test_bytes_come_bare_and_their_layout_in_a_header(server):
    body = {"input": ["a", "aab"], "encoding_format": "bytes"}
    with server.client() as client:
        answer = client.post(PATH, json=body)
        bare = client.post(PATH, json={**body, "encoding_format": "bytes_only"})

    assert answer.headers["content-type"] == "application/octet-stream"
    assert np.frombuffer(answer.content, "<f4").reshape(2, 8).tolist() == [A, AAB]
    layout = json.loads(answer.headers["metadata"])
    assert [(d["index"], d["start"], d["end"], d["shape"]) for d in layout["data"]] == [
        (0, 0, 32, [8]),
        (1, 32, 64, [8]),
    ]
    assert layout["usage"]["prompt_tokens"] == 4
    assert bare.content == answer.content
    assert "metadata" not in bare.headers


def test_dimensions_and_activation_reach_the_model(server):
    answer = ask(server, input="aab", dimensions=4, use_activation=False)
    assert answer["data"][0]["embedding"] == [0, 2, 1, 0]


@pytest.mark.parametrize(("side", "left"), [(None, "abc"), ("right", "abc"), ("left", "bcd")])
def test_truncation_cuts_where_it_is_told(server, side, left):
    ask(server, input="abcd", truncate_prompt_tokens=3, truncation_side=side)
    assert bytes(server.engine.pooled[-1][0][0].token_ids).decode() == left


def test_truncation_to_what_the_model_takes(server):
    answer = ask(server, input="a" * 400, truncate_prompt_tokens=-1)
    assert answer["usage"]["prompt_tokens"] == 256


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({}, "input", "invalid_request"),
        ({"input": "a", "messages": []}, "input", "invalid_request"),
        ({"input": ""}, "input", "invalid_request"),
        ({"input": []}, "input", "invalid_request"),
        ({"input": ["a", ""]}, "input", "invalid_request"),
        ({"input": [1, "a"]}, "input", "invalid_request"),
        ({"input": ["a", 1]}, "input", "invalid_request"),
        ({"input": [-1]}, "input", "invalid_request"),
        ({"input": [300]}, "input", "invalid_request"),
        ({"input": ["a"] * 9}, "input", "invalid_request"),
        ({"input": ["a" * 251] * 2}, "input", "invalid_request"),
        ({"input": "a" * 257}, "input", "context_length_exceeded"),
        ({"input": "a", "dimensions": 3}, "dimensions", "invalid_request"),
        ({"input": "a", "dimensions": 0}, "dimensions", "invalid_request"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format", "invalid_request"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "invalid_request"),
        ({"input": "a", "truncate_prompt_tokens": 257}, "truncate_prompt_tokens",
         "invalid_request"),
        ({"input": "a", "mm_processor_kwargs": {"a": 1}}, "mm_processor_kwargs", "not_supported"),
        ({"input": "a", "priority": 1}, "priority", "not_supported"),
        ({"input": "a", "request_id": "no spaces"}, "request_id", "invalid_request"),
        ({"input": "a", "cache_salt": ""}, "cache_salt", "invalid_request"),
        ({"messages": []}, "messages", "invalid_request"),
    ],
)  # fmt: skip
def test_what_is_refused_names_the_field(server, body, param, code):
    error = refusal(server, **body)
    assert (error["param"], error["code"]) == (param, code)


def test_a_model_that_generates_says_so():
    with running(FakeEngine()) as server:
        error = refusal(server, input="a")
    assert error["code"] == "wrong_task"
    assert "it can generate" in error["message"]


def test_an_id_in_the_body_is_the_answers_id_unless_a_header_has_one(server):
    body = {"input": "a", "request_id": "mine"}
    with server.client() as client:
        plain = client.post(PATH, json=body)
        headed = client.post(PATH, json=body, headers={"x-request-id": "head"})
    assert (plain.json()["id"], plain.headers["x-request-id"]) == ("embd-mine", "mine")
    assert headed.json()["id"] == "embd-head"


def test_texts_are_counted(server):
    before = server.service.metrics.finished["stop"]
    ask(server, input=["a", "b", "c"])
    assert server.service.metrics.finished["stop"] == before + 3


def test_a_client_that_leaves_aborts_its_texts():
    engine = FakeEngine(tasks=("embed",), hold_after=0)
    with running(engine) as server:
        with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
            connection.sendall(post(PATH, b'{"input": "a"}', "x-request-id: gone"))
            server.wait_for(engine.holding)
        server.wait_for(engine.aborts)
        server.wait_until_idle()
    assert engine.aborted[0].startswith("embd-gone-")


def test_the_official_client_reads_both_forms(server):
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        packed = client.embeddings.create(model="fake", input=["a", "aab"])  # base64 by itself
        plain = client.embeddings.create(model="fake", input="aab", encoding_format="float")
    assert [entry.embedding for entry in packed.data] == [A, AAB]
    assert plain.data[0].embedding == AAB
    assert packed.usage.prompt_tokens == 4
