"""Fields that no endpoint knows: named in a header with the nearest name, or refused."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import pytest

from octavo_engine.errors import InvalidRequest
from octavo_engine.protocol.endpoints import UNKNOWN_FIELDS_HEADER
from octavo_engine.server.http.unknown_fields import describe, note_unknown
from octavo_engine.server.openai.schemas import ChatCompletionRequest, CompletionRequest
from tests.fakes.process import serving

if TYPE_CHECKING:
    import httpx

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3}


@pytest.fixture(scope="module")
def server():
    with serving("m", "--log-level", "debug") as server:
        yield server


def post(server: Any, path: str, body: dict[str, Any]) -> httpx.Response:
    with server.client() as client:
        answer: httpx.Response = client.post(path, json=body)
        return answer


@pytest.mark.parametrize("stream", [False, True])
def test_near_misses_are_named_in_the_header(server, stream):
    body = {**CHAT, "max_token": 5, "temprature": 0, "zzz": 1, "stream": stream}
    answer = post(server, "/v1/chat/completions", body)
    assert answer.status_code == 200
    assert answer.headers[UNKNOWN_FIELDS_HEADER] == (
        "max_token (did you mean max_tokens?), temprature (did you mean temperature?), zzz"
    )


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {**CHAT, "metadata": {"a": "b"}, "user": "u", "store": False}),
        ("/v1/completions", {"prompt": "a", "max_tokens": 3, "min_p": 0.1, "cache_salt": "s"}),
        ("/v1/responses", {"input": "a", "max_output_tokens": 16, "store": False}),
        ("/tokenize", {"prompt": "a", "add_special_tokens": True}),
        (
            "/v1/messages",
            {"model": "m", "max_tokens": 3, "messages": [{"role": "user", "content": "a"}]},
        ),
    ],
)
def test_known_fields_bring_no_header(server, path, body):
    answer = post(server, path, {"model": "m", **body})
    assert answer.status_code in (200, 404), answer.text
    assert UNKNOWN_FIELDS_HEADER not in answer.headers


def test_a_mistake_beside_it_names_it_too(server):
    answer = post(server, "/v1/chat/completions", {**CHAT, "temprature": 0, "temperature": -1})
    assert answer.status_code == 400
    assert answer.headers[UNKNOWN_FIELDS_HEADER].startswith("temprature (did you mean temp")


def test_strict_servers_refuse():
    with serving("m", "--strict-fields") as server:
        answer = post(server, "/v1/chat/completions", {**CHAT, "temprature": 0})
        assert post(server, "/v1/chat/completions", dict(CHAT)).status_code == 200
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["param"], error["code"]) == ("temprature", "unknown_field")
    assert error["message"] == (
        "the body has a field that is not supported: temprature (did you mean temperature?)"
    )


def test_names_that_could_harm_a_header_are_not_repeated():
    fields = {"a\r\nset-cookie: x": 1, "ä": 2, "": 3}
    text = note_unknown(fields, CompletionRequest, is_strict=False)
    assert text == "a field with an unusual name"
    with pytest.raises(InvalidRequest) as caught:
        note_unknown(fields, CompletionRequest, is_strict=True)
    assert caught.value.param is None


def test_the_header_is_bounded():
    names = [f"unknown_{number:03}" for number in range(1000)]
    text = describe(names, ChatCompletionRequest)
    assert text.endswith("and 992 more")
    assert len(text) < 1000


def test_ignored_fields_are_logged_at_debug(caplog):
    with caplog.at_level(logging.DEBUG, "octavo.server"):
        note_unknown({"temprature": 1}, ChatCompletionRequest, is_strict=False)
    (record,) = caplog.records
    assert record.levelno == logging.DEBUG
    assert "temprature" in record.__dict__["fields"]
