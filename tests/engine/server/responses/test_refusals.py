"""What a responses request must not say, and which of its fields the error names."""

from __future__ import annotations

from typing import Any

import pytest

from octavo_engine.server.settings import ServerSettings
from tests.fakes.scripted_engine import ScriptedEngine
from tests.fakes.server import running

FUNCTION = {"type": "function", "name": "f", "parameters": {}}
OUTPUT = {"type": "function_call_output", "call_id": "x", "output": "a"}
IMAGE = {"type": "input_image", "image_url": "data:"}
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"input": []}, "input", "invalid_request"),
    ({"input": 5}, "input", "invalid_request"),
    ({"input": [{"role": "robot", "content": "a"}]}, "input[0].role", "invalid_request"),
    ({"input": [{"content": "a"}]}, "input[0].role", "invalid_request"),
    ({"input": [{"role": "user"}]}, "input[0].content", "invalid_request"),
    ({"input": [{"role": "user", "content": [IMAGE]}]}, "input[0].content[0].type",
     "not_supported"),
    ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]},
     "input[0].content[0].text", "invalid_request"),
    ({"input": [{"type": "web_search_call", "id": "ws_1"}]}, "input[0].type", "not_supported"),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].type", "not_supported"),
    ({"input": [OUTPUT]}, "input[0].call_id", "invalid_request"),
    ({"input": [{"type": "function_call", "name": "f"}]}, "input[0].call_id", "invalid_request"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type", "not_supported"),
    ({"tools": [{"type": "mcp", "server_label": "x"}]}, "tools[0].type", "not_supported"),
    ({"tools": [FUNCTION, {"type": "code_interpreter"}]}, "tools[1].type", "not_supported"),
    ({"tools": [{"type": "custom", "name": "x"}]}, "tools[0].type", "not_supported"),
    ({"tools": [{"type": "function"}]}, "tools[0].name", "invalid_request"),
    ({"tools": [FUNCTION, FUNCTION]}, "tools[1].name", "invalid_request"),
    ({"tools": [FUNCTION], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice",
     "invalid_request"),
    ({"tools": [FUNCTION], "tool_choice": {"type": "web_search"}}, "tool_choice", "not_supported"),
    ({"tools": [FUNCTION], "tool_choice": "maybe"}, "tool_choice", "invalid_request"),
    ({"tool_choice": "required"}, "tool_choice", "invalid_request"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format",
     "invalid_request"),
    ({"text": {"format": {"type": "xml"}}}, "text.format", "invalid_request"),
    ({"reasoning": {"effort": "much"}}, "reasoning.effort", "invalid_request"),
    ({"include": ["everything"]}, "include", "invalid_request"),
    ({"top_logprobs": 21}, "top_logprobs", "invalid_request"),
    ({"max_output_tokens": 0}, "max_output_tokens", "invalid_request"),
    ({"max_output_tokens": 9999}, "max_output_tokens", "context_length_exceeded"),
    ({"max_tool_calls": -1}, "max_tool_calls", "invalid_request"),
    ({"truncation": "some"}, "truncation", "invalid_request"),
    ({"temperature": -1}, "temperature", "invalid_request"),
    ({"metadata": {str(n): "" for n in range(17)}}, "metadata", "invalid_request"),
    ({"metadata": {"a": "b" * 513}}, "metadata", "invalid_request"),
    ({"metadata": {"a": 1}}, "metadata[...]", "invalid_request"),
    ({"conversation": "conv_1"}, "conversation", "not_supported"),
    ({"prompt": {"id": "pmpt_1"}}, "prompt", "not_supported"),
    ({"stream_options": {}}, "stream_options", "invalid_request"),
    ({"background": True, "store": False}, "background", "invalid_request"),
    ({"previous_response_id": "resp_1"}, "previous_response_id", "previous_response_not_found"),
    ({"model": "other"}, "model", "model_not_found"),
]  # fmt: skip


@pytest.fixture(scope="module")
def client():
    settings = ServerSettings(tool_call_parser="hermes")
    with running(ScriptedEngine(), settings) as server, server.client() as client:
        yield client


@pytest.mark.parametrize(
    ("body", "param", "code"), REFUSED, ids=lambda value: str(value)[:40]
)  # fmt: skip
def test_the_field_is_named(client, body, param, code):
    answer = client.post("/v1/responses", json={"input": "a"} | body)

    error = answer.json()["error"]
    assert answer.status_code == (404 if code == "model_not_found" else 400), answer.text
    assert (error["param"], error["code"]) == (param, code)
    if param.startswith(("input[", "tools[", "text.")):
        assert param in error["message"]


@pytest.mark.parametrize(
    "body",
    [
        {"max_tool_calls": 0, "moderation": {"model": "x"}},
        {"context_management": [{"type": "compaction", "compact_threshold": 9000}]},
        {"service_tier": "flex", "prompt_cache_retention": "24h", "unknown": [1]},
        {"include": ["reasoning.encrypted_content", "web_search_call.action.sources"]},
        {"stream": True, "stream_options": {"include_obfuscation": False}},
        {"prompt": None, "conversation": None, "tools": [], "tool_choice": "auto"},
        {"seed": 1, "top_k": 5, "min_p": 0.1, "stop": ["x"], "logit_bias": {"1": 2}},
    ],
    ids=str,
)
def test_what_changes_nothing_is_taken(client, body):
    assert client.post("/v1/responses", json={"input": "a"} | body).status_code == 200


def test_a_server_that_keeps_nothing_says_so():
    settings = ServerSettings(response_store=False)
    with running(ScriptedEngine(), settings) as server, server.client() as client:
        answer = client.post("/v1/responses", json={"input": "a"}).json()
        found = client.get(f"/v1/responses/{answer['id']}")
        errors = [
            client.post("/v1/responses", json={"input": "a"} | more).json()["error"]
            for more in ({"background": True}, {"previous_response_id": answer["id"]})
        ]
    assert answer["store"] is False
    assert found.json()["error"]["code"] == "response_not_found"
    assert [e["param"] for e in errors] == ["background", "previous_response_id"]
    assert all("--no-response-store" in e["message"] for e in errors)
