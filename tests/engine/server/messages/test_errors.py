"""On these paths every error has Anthropic's form, and the client makes its own exception of it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from octavo_engine.errors import DeadlineExceeded, EngineDead, GenerationFailed
from octavo_engine.server.limits import RequestLimits
from octavo_engine.server.settings import ServerSettings
from tests.fakes.engine import FakeEngine
from tests.fakes.scripted_engine import ScriptedEngine
from tests.fakes.server import running

pytestmark = pytest.mark.slow

USER = {"role": "user", "content": "a"}
BODY: dict[str, Any] = {"messages": [USER], "max_tokens": 9}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
TOOL = {"name": "f", "input_schema": {"type": "object"}}
RESULT = {"type": "tool_result", "tool_use_id": "t", "content": "x"}


def said(*content: Any, role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": list(content)}]}


# What each error's message begins with: the form has no other place for the field.
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"messages": []}, "messages must hold"),
    ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role"),
    (said(IMAGE), "messages[0].content[0].type is not supported yet; this model takes no pictures"),
    (said({"type": "text"}), "messages[0].content[0].text is required"),
    (said(), "messages[0].content must not be empty"),
    (said(RESULT), "messages[0].content[0].tool_use_id: there is no tool_use t"),
    (said(RESULT | {"content": [IMAGE]}), "messages[0].content[0].tool_use_id"),
    (said({"type": "tool_use", "name": "f"}, role="assistant"), "messages[0].content[0].id"),
    ({"system": [IMAGE]}, "system[0].type"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
     "tools[0].type 'web_search_20250305' is not supported"),
    ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type 'bash_20250124'"),
    ({"tools": [{"name": "f"}]}, "tools[0].input_schema is required"),
    ({"tools": [TOOL, TOOL]}, "tools[1].name"),
    ({"tools": [TOOL | {"name": "a b"}]}, "tools[0].name"),
    ({"tool_choice": {"type": "any"}}, "tool_choice needs tools"),
    ({"tools": [TOOL], "tool_choice": {"type": "some"}}, "tool_choice.type"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice names g"),
    ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking.budget_tokens must be l"),
    ({"thinking": {"type": "deep"}}, "thinking.type"),
    ({"output_config": {"effort": "much"}}, "output_config.effort"),
    ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format"),
    ({"output_config": {"format": {"type": "xml"}}}, "output_config.format"),
    ({"stop_sequences": ["x"] * 65}, "stop_sequences"),
    ({"temperature": -1}, "temperature"),
    ({"mcp_servers": [{"url": "x"}]}, "mcp_servers is not supported"),
    ({"container": "c"}, "container is not supported"),
    ({"context_management": {"edits": [{"type": "clear_thinking_20251015"},
                                       {"type": "clear_tool_uses_20250919"}]}},
     "context_management.edits[1].type"),
    ({"context_management": {"edits": [{"keep": 1}]}}, "context_management.edits[0].type"),
]  # fmt: skip


@pytest.fixture(scope="module")
def client():
    settings = ServerSettings(
        tool_call_parser="hermes", limits=RequestLimits(max_body_bytes=20_000, max_json_depth=20)
    )
    with running(ScriptedEngine(), settings) as server, server.client() as client:
        yield client


@pytest.mark.parametrize(("more", "begin"), REFUSED, ids=lambda value: str(value)[:40])
def test_the_field_is_in_the_message(client, more, begin):
    answer = client.post("/v1/messages", json=BODY | more)

    body = answer.json()
    assert answer.status_code == 400, answer.text
    assert set(body) == {"type", "error", "request_id"}
    assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
    assert body["error"]["message"].startswith(begin)
    assert body["request_id"] == answer.headers["request-id"] == answer.headers["x-request-id"]


@pytest.mark.parametrize(
    ("method", "path", "content", "status", "type_"),
    [
        ("POST", "/v1/messages", b"{", 400, "invalid_request_error"),
        ("POST", "/v1/messages", b"{}", 400, "invalid_request_error"),
        ("POST", "/v1/messages", b" " * 20_001, 413, "request_too_large"),
        ("POST", "/v1/messages/count_tokens", b" " * 20_001, 413, "request_too_large"),
        ("POST", "/v1/messages/batches", b"{}", 501, "api_error"),  # without --files-dir
        ("GET", "/v1/messages", b"", 405, "invalid_request_error"),
        ("POST", "/v1/messages", b'{"model": "x", "max_tokens": 1, "messages": '
         b'[{"role": "user", "content": "a"}]}', 404, "not_found_error"),
    ],
)  # fmt: skip
def test_whatever_goes_wrong(client, method, path, content, status, type_):
    headers = {"content-type": "application/json"}
    answer = client.request(method, path, content=content, headers=headers)
    assert (answer.status_code, answer.json()["error"]["type"]) == (status, type_)
    assert answer.json()["type"] == "error"


def test_other_paths_keep_their_own_form(client):
    for path in ("/v1/message", "/v1/messagesx", "/v1/chat/completions"):
        assert "code" in client.post(path, json={}).json()["error"]


def test_keys_in_either_header_and_versions_of_theirs():
    import anthropic  # seconds, which only those pay who use it

    with running(settings=ServerSettings(api_keys=("one",))) as server, server.client() as client:
        for headers, status in (
            ({"x-api-key": "one", "anthropic-version": "2023-06-01"}, 200),
            ({"authorization": "Bearer one", "anthropic-beta": "x"}, 200),
            ({"x-api-key": "two"}, 401),
            ({}, 401),
        ):
            answer = client.post("/v1/messages", json=BODY, headers=headers)
            assert answer.status_code == status
        assert answer.json()["error"]["type"] == "authentication_error"
        with (
            anthropic.Anthropic(base_url=server.url, api_key="two", max_retries=0) as stranger,
            pytest.raises(anthropic.AuthenticationError) as refused,
        ):
            stranger.messages.create(model="fake", **BODY)
    assert refused.value.request_id == refused.value.response.headers["x-request-id"]


@pytest.mark.parametrize(
    ("fault", "status", "type_"),
    [
        (GenerationFailed("broken numbers"), 500, "api_error"),
        (EngineDead("it is down"), 503, "overloaded_error"),
        (DeadlineExceeded("too late"), 504, "timeout_error"),
        (ZeroDivisionError("secret"), 500, "api_error"),
    ],
)
def test_a_stream_that_breaks_says_why(fault, status, type_):
    import anthropic

    engine = FakeEngine(error=fault, news_before_error=3)
    with running(engine) as server, server.client() as client:
        text = client.post("/v1/messages", json=BODY | {"stream": True}).text
        whole = client.post("/v1/messages", json=BODY)
        with (
            anthropic.Anthropic(base_url=server.url, api_key="x", max_retries=0) as theirs,
            pytest.raises(anthropic.APIStatusError) as raised,
        ):
            list(theirs.messages.create(model="fake", **BODY, stream=True))

    *_, last = text.removesuffix("\n\n").split("\n\n")
    name, _, data = last.partition("\ndata: ")
    assert name == "event: error"
    assert (whole.status_code, whole.json()["error"]["type"]) == (status, type_)
    error = whole.json()["error"] | {
        "code": getattr(fault, "code", None) or "internal_error"
    }  # routers go by it
    assert json.loads(data) == {"type": "error", "error": error}
    assert raised.value.body["error"] == error  # type: ignore[index]  # a dict
    assert "secret" not in text and "message_stop" not in text


def test_a_prompt_too_long_names_both_numbers(client):
    long = BODY | {"messages": [USER | {"content": "a" * 5000}]}
    message = client.post("/v1/messages", json=long).json()["error"]["message"]
    assert "4096" in message and "5018" in message


def test_a_client_that_leaves_ends_its_work():
    engine = FakeEngine(hold_after=1)
    with running(engine) as server:
        with (
            server.client() as client,
            client.stream("POST", "/v1/messages", json=BODY | {"stream": True}) as answer,
        ):
            assert next(answer.iter_lines()) == "event: message_start"
        server.wait_for(engine.aborts)
        server.wait_until_idle()
    assert len(engine.aborted) == 1
