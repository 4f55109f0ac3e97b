"""Whatever language a request asks for, it is served or refused: never a fault of the server's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import httpx
import pytest

from octavo_engine.server.settings import ServerSettings
from tests.fakes.simulated import Simulated, simulating

if TYPE_CHECKING:
    from collections.abc import Iterator

BURST = "(a?){200}a{200}"
NAMED = {"type": "function", "function": {"name": "f"}}
ENDLESS = {"type": "object", "properties": {"x": {"$ref": "#/properties/x"}}, "required": ["x"]}


def structured(**given: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/completions", {"prompt": "a", "max_tokens": 300, "structured_outputs": given}


def tool(parameters: Any, choice: Any = "required") -> tuple[str, dict[str, Any]]:
    body = {
        "messages": [{"role": "user", "content": "hi"}], "max_tokens": 300, "tool_choice": choice,
        "tools": [{"type": "function", "function": {"name": "f", "parameters": parameters}}],
    }  # fmt: skip
    return "/v1/chat/completions", body


REFUSED = {
    "regex": structured(regex=BURST),
    "regex without a text": structured(regex=r"[^\s\S]"),
    "repetition": structured(grammar='root ::= "a"{1000000}'),
    "rule of itself": structured(grammar="root ::= root"),
    "tag": structured(structural_tag={
        "type": "structural_tag", "format": {"type": "regex", "pattern": BURST}}),
    "automaton of gigabytes": structured(json={"type": "integer", "multipleOf": 99_999_989}),
    "schema of itself": structured(json={"$ref": "#"}),
    "tool": tool({"$ref": "#"}),
    "named tool": tool({"$ref": "#"}, NAMED),
    "tool's definition": tool({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}),
    "tool's member": tool(ENDLESS),
    "named tool's member": tool(ENDLESS, NAMED),
}  # fmt: skip


# It is given up when its time is over.
EXPENSIVE = "automaton of gigabytes"


@pytest.fixture(scope="module")
def server() -> Iterator[Simulated]:
    # With a form for calls, so that no tool is described in the prompt, which would be too long.
    with simulating(settings=ServerSettings(tool_call_parser="hermes")) as server:
        yield server


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name == EXPENSIVE)) for name in REFUSED],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_grammar_that_cannot_be_served_is_a_400(
    server: Simulated, name: str, stream: bool
) -> None:
    path, body = REFUSED[name]
    answer = httpx.post(server.url + path, json={**body, "stream": stream}, timeout=60)

    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    field = "tools" if "tools" in body else "structured_outputs"
    assert (error["type"], error["param"]) == ("invalid_request_error", field)


def test_a_grammar_that_bursts_in_the_middle_of_an_answer_is_its_author_s_to_mend(
    server: Simulated,
) -> None:
    # White space comes after the first token.
    path, body = structured(json={"type": "object"}, whitespace_pattern=BURST)
    body["seed"] = 1
    answer = httpx.post(server.url + path, json=body, timeout=60)
    streamed = httpx.post(server.url + path, json={**body, "stream": True}, timeout=60)

    assert answer.status_code == 400, answer.text
    assert "cannot follow its grammar" in answer.json()["error"]["message"]
    assert '"type":"invalid_request_error"' in streamed.text  # as status or as last event
    server.check_idle()
