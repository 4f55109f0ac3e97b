"""Less common request options take effect, and refusals name the right field."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tests.fakes.engine import FakeEngine
from tests.fakes.server import running
from tests.fakes.simulated import Simulated, simulating

if TYPE_CHECKING:
    from collections.abc import Iterator

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]
BOS = 256


@pytest.fixture(scope="module")
def server() -> Iterator[Simulated]:
    with simulating() as server:
        yield server


def post(server: Any, path: str, **body: Any) -> httpx.Response:
    return httpx.post(server.url + path, json={"max_tokens": 4, **body}, timeout=60)


def chunks(server: Any, path: str, **body: Any) -> list[dict[str, Any]]:
    text = post(server, path, stream=True, ignore_eos=True, **body).text
    assert text.endswith("data: [DONE]\n\n")
    return [json.loads(line[6:]) for line in text.split("\n\n")[:-2]]


ASKED = [(COMPLETIONS, {"prompt": "abc"}), (CHAT, {"messages": USER, "n": 2})]


@pytest.mark.parametrize(("path", "body"), ASKED)
def test_continuous_usage_is_in_every_chunk_from_the_first_on(
    server: Simulated, path: str, body: dict[str, Any]
) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    found = chunks(server, path, **body, stream_options=options)

    counts = [chunk["usage"]["completion_tokens"] for chunk in found]
    assert counts == sorted(counts) and counts[-1] == 4 * body.get("n", 1)
    if path == CHAT:
        assert counts[:2] == [0, 0]
    assert len({chunk["usage"]["prompt_tokens"] for chunk in found}) == 1


@pytest.mark.parametrize(("path", "body"), ASKED)
def test_usage_that_is_declined_comes_in_no_chunk(
    server: Simulated, path: str, body: dict[str, Any]
) -> None:
    options = {"include_usage": False, "continuous_usage_stats": True}
    found = chunks(server, path, **body, stream_options=options)
    assert found and not any("usage" in chunk for chunk in found)


@pytest.mark.parametrize("stream", [False, True])
def test_token_ids_are_echoed_with_their_special_tokens(server: Simulated, stream: bool) -> None:
    body = {"prompt": [BOS, 97, 98], "echo": True, "logprobs": 0}
    if stream:
        choices = [chunk["choices"][0] for chunk in chunks(server, COMPLETIONS, **body)]
    else:
        choices = post(server, COMPLETIONS, **body).json()["choices"]
    text = "".join(choice["text"] for choice in choices)
    at = [place for choice in choices for place in choice["logprobs"]["text_offset"]]

    assert text.startswith("<s>ab")
    assert at[:4] == [0, 3, 4, 5] and at == sorted(at)


def test_special_tokens_that_the_client_skips_take_no_room(server: Simulated) -> None:
    body = {"prompt": [BOS, 97, 98], "echo": True, "logprobs": 0, "skip_special_tokens": True}
    choice = post(server, COMPLETIONS, **body).json()["choices"][0]
    at = choice["logprobs"]["text_offset"]

    assert choice["text"].startswith("ab")
    assert at[:4] == [0, 0, 1, 2] and at == sorted(at)


def test_every_bad_key_of_logit_bias_is_named(server: Simulated) -> None:
    answer = post(server, COMPLETIONS, prompt="a", logit_bias={"x": 1, "5": 1, "y": 2})
    message = answer.json()["error"]["message"]
    assert answer.status_code == 400 and "'x', 'y'" in message and "'5'" not in message


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize", COMPLETIONS])
def test_a_deadline_that_makes_no_sense_is_refused_on_every_route(
    server: Simulated, path: str
) -> None:
    body = {"prompt": "a", "tokens": [97]}
    answer = httpx.post(server.url + path, json=body, headers={"x-octavo-timeout-ms": "soon"})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "invalid_header")
    assert error["param"] == "x-octavo-timeout-ms"


@pytest.mark.parametrize(
    ("path", "names", "long"),
    [
        ("/score", ("queries", "documents"), 0),
        ("/score", ("queries", "documents"), 1),
        ("/score", ("text_1", "text_2"), 0),
        ("/rerank", ("query", "documents"), 0),
        ("/rerank", ("query", "documents"), 1),
    ],
)
def test_the_side_that_is_too_long_is_named(path: str, names: tuple[str, str], long: int) -> None:
    texts = ["a", "a"]
    texts[long] = "a" * 300
    body: dict[str, Any] = {names[0]: texts[0], names[1]: [texts[1]]}
    with running(FakeEngine(tasks=("embed",))) as embedding:
        answer = post(embedding, path, **body)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "context_length_exceeded")
    assert error["param"] == names[long] and error["message"].startswith(f"{names[long]} has 300")
