"""A server whose engine says what a test gives it, and the official client that reads it."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import openai

from octavo_engine.server.settings import ServerSettings
from tests.fakes.scripted_engine import ScriptedEngine
from tests.fakes.server import running

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from tests.fakes.server import RunningServer

HI: Any = [{"role": "user", "content": "weather?"}]
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
TIME: dict[str, Any] = {"type": "function", "function": {"name": "get_time"}}
TOOLS = [WEATHER, TIME]
NAMED = {"type": "function", "function": {"name": "get_weather"}}

OSLO = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
NOW = '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
THOUGHT = "<think>\nWhich city? Oslo.\n</think>\n\n"
HERMES = ServerSettings(tool_call_parser="hermes", reasoning_parser="qwen3")


@contextmanager
def saying(
    *scripts: str, piece: int = 1, using: ServerSettings = HERMES
) -> Iterator[tuple[Any, Any]]:
    """A server whose model says the scripts, one an answer, and the official client of it."""
    with (
        scripted(*scripts, piece=piece, using=using) as server,
        openai.OpenAI(base_url=server.url + "/v1", api_key="x", max_retries=0) as client,
    ):
        yield server, client


def scripted(
    *scripts: str, piece: int = 1, using: ServerSettings = HERMES
) -> AbstractContextManager[RunningServer]:
    """The server alone."""
    return running(ScriptedEngine(scripts=list(scripts), piece=piece), using)


def streamed(client: Any, **requested: Any) -> tuple[dict[str, Any], list[Any]]:
    """What a client makes of the deltas, in the shape of a message, and the chunks."""
    chunks = list(
        client.chat.completions.create(model="fake", messages=HI, stream=True, **requested)
    )
    message: dict[str, Any] = {"content": "", "reasoning": "", "calls": [], "finish": None}
    for chunk in chunks:
        for choice in chunk.choices:
            message["content"] += choice.delta.content or ""
            message["reasoning"] += getattr(choice.delta, "reasoning", None) or ""
            for call in choice.delta.tool_calls or []:
                if call.id is not None:
                    assert call.type == "function" and call.index == len(message["calls"])
                    message["calls"].append([call.id, call.function.name, ""])
                message["calls"][call.index][2] += call.function.arguments or ""
            message["finish"] = choice.finish_reason or message["finish"]
    return message, chunks


def whole(client: Any, **requested: Any) -> tuple[dict[str, Any], Any]:
    answer = client.chat.completions.create(model="fake", messages=HI, **requested)
    message = answer.choices[0].message
    return {
        "content": message.content or "",
        "reasoning": getattr(message, "reasoning", None) or "",
        "calls": [[c.id, c.function.name, c.function.arguments] for c in message.tool_calls or []],
        "finish": answer.choices[0].finish_reason,
    }, answer


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    return {**message, "calls": [call[1:] for call in message["calls"]]}
