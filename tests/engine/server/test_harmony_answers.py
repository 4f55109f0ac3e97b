"""What gpt-oss writes, as clients read it: thoughts, an answer, calls; whole and streamed."""

from __future__ import annotations

from typing import Any

import pytest

from octavo_engine.server.settings import ServerSettings
from tests.fakes.talking import TOOLS, saying, streamed, whole, without_ids

THOUGHT = "<|channel|>analysis<|message|>Which city? Oslo.<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>It rains."
OSLO = (
    "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
    '{"city": "Oslo"}<|call|>'
)
TEMPLATE = {"chat_template": "<|start|>user<|message|>{{ messages[-1].content }}<|end|>"
            "<|start|>assistant"}  # fmt: skip
HARMONY = ServerSettings(
    tool_call_parser="openai", reasoning_parser="openai_gptoss", trust_request_chat_template=True
)


@pytest.mark.parametrize("piece", [1, 9, 1000])
def test_thoughts_and_answer(piece):
    with saying(THOUGHT + FINAL, piece=piece, using=HARMONY) as (_, client):
        at_once, answer = whole(client, extra_body=TEMPLATE)
        in_pieces, _ = streamed(client, extra_body=TEMPLATE)
    assert (at_once["reasoning"], at_once["content"]) == ("Which city? Oslo.", "It rains.")
    assert at_once["finish"] == "stop"
    assert in_pieces == at_once
    thought = len(THOUGHT) + len("<|channel|>final<|message|>")  # bytes are tokens here
    assert answer.usage.completion_tokens_details.reasoning_tokens == thought


def test_calls_are_read_from_their_channel():
    with saying(THOUGHT + OSLO, using=HARMONY) as (_, client):
        at_once, _ = whole(client, tools=TOOLS, extra_body=TEMPLATE)
        in_pieces, _ = streamed(client, tools=TOOLS, extra_body=TEMPLATE)
        unread, _ = whole(client, tools=TOOLS, tool_choice="none", extra_body=TEMPLATE)
    expected: dict[str, Any] = {
        "content": "", "reasoning": "Which city? Oslo.", "finish": "tool_calls",
        "calls": [["get_weather", '{"city": "Oslo"}']],
    }  # fmt: skip
    assert without_ids(at_once) == without_ids(in_pieces) == expected
    assert (unread["calls"], unread["content"]) == ([], "")


def test_an_enforced_call_is_the_final_message_and_thoughts_come_first():
    said = THOUGHT + '<|channel|>final<|message|>[{"name": "get_time", "parameters": {}}]'
    with saying(said, using=HARMONY) as (server, client):
        required, _ = whole(client, tools=TOOLS, tool_choice="required", extra_body=TEMPLATE)
        grammar = server.engine.requests[-1][1].grammar
    assert [call[1:] for call in required["calls"]] == [["get_time", "{}"]]
    assert required["reasoning"] == "Which city? Oslo."
    assert grammar is not None and grammar.after == "<|channel|>final<|message|>"


def test_a_shaped_answer_is_nothing_but_the_final_message():
    said = f"<|channel|>commentary<|message|>Now.<|end|><|start|>assistant{FINAL}"
    shape = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "string"}}}
    with saying(said, using=HARMONY) as (_, client):
        shaped, _ = whole(client, response_format=shape, extra_body=TEMPLATE)
        free, _ = whole(client, tools=TOOLS, extra_body=TEMPLATE)
    assert (shaped["content"], shaped["reasoning"]) == ("It rains.", "Now.")
    assert free["content"] == "Now.\nIt rains."
