"""Schemas that common tools emit are served; what no grammar enforces is validated and named."""

from __future__ import annotations

import json
from decimal import Decimal  # noqa: TC003  (pydantic reads it)
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from openai import OpenAI
from pydantic import BaseModel

from octavo_engine.server.settings import ServerSettings
from tests.fakes.simulated import Simulated, simulating

if TYPE_CHECKING:
    from collections.abc import Iterator

NOT_ENFORCED, VALID = "x-schema-not-enforced", "x-schema-valid"
USER = [{"role": "user", "content": "hi"}]
LEFT = {
    "type": "object", "properties": {"a": {"const": 1}}, "required": ["a"],
    "additionalProperties": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def server() -> Iterator[Simulated]:
    # With a form for calls, so that no tool is described in the prompt, which would be too long.
    with simulating(settings=ServerSettings(tool_call_parser="hermes")) as server:
        yield server


def post(server: Simulated, path: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/{path}", json=body, timeout=60)


def formatted(schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **more}}


@pytest.mark.parametrize(
    ("rest", "word"),
    [
        ({"not": {"required": ["b"]}}, b"true"),
        ({"not": {"required": ["a"]}}, b"false"),
        ({"unevaluatedProperties": False, "anyOf": [{}]}, b"unknown"),
    ],
)
def test_whole_answers_say_whether_they_are_valid(
    server: Simulated, rest: dict[str, Any], word: bytes
) -> None:
    schema = LEFT | rest
    keyword = next(iter(rest))
    for path, requested in (
        ("chat/completions", {"messages": USER, "response_format": formatted(schema)}),
        ("chat/completions", {"messages": USER, "structured_outputs": {"json": schema}}),
        ("completions", {"prompt": "a", "structured_outputs": {"json": json.dumps(schema)}}),
        ("responses", {"input": "a", "text": {"format": {
            "type": "json_schema", "name": "x", "schema": schema}}}),
    ):  # fmt: skip
        limit = {"max_output_tokens" if path == "responses" else "max_tokens": 200}
        answer = post(server, path, **requested, **limit)
        assert answer.status_code == 200, answer.text
        assert answer.headers[NOT_ENFORCED] == keyword
        assert answer.headers[VALID] == word.decode()


def test_a_router_lets_both_headers_through() -> None:
    for name in (NOT_ENFORCED, VALID):
        assert not name.startswith("x-octavo-"), "those of engines end at the router"


def test_streams_name_what_is_not_enforced(server: Simulated) -> None:
    answer = post(
        server, "chat/completions", messages=USER, stream=True, max_tokens=100,
        response_format=formatted(LEFT | {"not": {"required": ["b"]}}),
    )  # fmt: skip
    assert answer.headers[NOT_ENFORCED] == "not" and VALID not in answer.headers


def test_strict_refuses_by_keyword_and_place(server: Simulated) -> None:
    schema = {"type": "object", "properties": {"a": LEFT | {"not": {}}}}
    answer = post(
        server, "chat/completions", messages=USER, response_format=formatted(schema, strict=True)
    )
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert "'not'" in message and "/properties/a" in message


def test_what_is_enforced_whole_has_no_such_headers(server: Simulated) -> None:
    answer = post(
        server, "chat/completions", messages=USER, max_tokens=100, response_format=formatted(LEFT)
    )
    assert NOT_ENFORCED not in answer.headers and VALID not in answer.headers


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
def test_arguments_of_a_tool_that_is_not_strict_are_relaxed(server: Simulated, choice: Any) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": LEFT | {"not": {}}}}
    requested = {"messages": USER, "tool_choice": choice, "max_tokens": 200}
    answer = post(server, "chat/completions", tools=[tool], **requested)
    assert answer.status_code == 200, answer.text
    assert answer.headers[NOT_ENFORCED] == "not"
    tool["function"]["strict"] = True  # type: ignore[index]
    answer = post(server, "chat/completions", tools=[tool], **requested)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools")


class Price(BaseModel):
    amount: Decimal
    tags: set[str]


def test_a_pydantic_model_with_decimals_and_sets_is_served(server: Simulated) -> None:
    schema = Price.model_json_schema()
    # As newer releases of pydantic write it.
    schema["properties"]["amount"]["anyOf"][1]["pattern"] = r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"
    client = OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    requested: Any = {"messages": USER, "response_format": formatted(schema)}
    answer = client.chat.completions.with_raw_response.create(
        model="sim", max_tokens=200, **requested
    )
    assert answer.headers[NOT_ENFORCED] == "pattern, uniqueItems"
