"""Tools for a model whose chat template knows none, or in a way that nobody can read: the system
message describes them, and calls and results of the history are written as it says.

The form is that of the format `generic`.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from octavo_engine.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from octavo_engine.tokenization.tokenizer import Template

_CALL, _CALL_END = "<tool_call>\n", "\n</tool_call>"
_RESULT, _RESULT_END = "<tool_response>\n", "\n</tool_response>"
_DESCRIPTION = """You may call functions to do what the user asks for. Each line is one of them:
{tools}

To call a function, write its name and its arguments as one JSON object in these tags:
<tool_call>
{{"name": "NAME", "arguments": {{"KEY": "VALUE"}}}}
</tool_call>
Several calls come one after the other. The results are sent to you in <tool_response> tags. Where \
no function is of use, answer in plain words."""
_PROBES = ("octavo-probe-one", "octavo-probe-two")

Message = dict[str, Any]


def described(
    messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None, *, takes_system: bool
) -> list[Message]:
    """The same conversation without roles and fields that are about tools. Roles alternate where
    they did: results join the user's next message."""
    result: list[Message] = []
    for message in map(_in_words, messages):
        is_result = message.pop("is_result", False)
        before = result[-1] if result else None
        if (
            before is not None
            and before["role"] == message["role"] == "user"
            and (is_result or before.get("is_result"))
        ):
            before["content"] += "\n" + message["content"]
            continue
        result.append({**message, "is_result": True} if is_result else message)
    for message in result:
        message.pop("is_result", None)
    if tools:
        _prepend(_description(tools), result, takes_system=takes_system)
    return result


def takes_system(template: Template) -> bool:
    """Whether what a system message says is in the prompt."""
    roles = ("system", "user")
    messages = [{"role": role, "content": text} for role, text in zip(roles, _PROBES, strict=True)]
    try:
        text = template.render(messages)
    except RequestError:
        return False
    return all(probe in text for probe in _PROBES)


def _in_words(message: Message) -> Message:
    content = message.get("content") or ""
    if message["role"] == "tool":
        text = f"{_RESULT}{content}{_RESULT_END}"
        return {"role": "user", "content": text, "is_result": True}
    if not message.get("tool_calls"):
        return dict(message)
    calls = [_call(call["function"]) for call in message["tool_calls"]]
    rest = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**rest, "content": "\n".join([content, *calls] if content else calls)}


def _call(function: dict[str, Any]) -> str:
    call = {"name": function["name"], "arguments": function.get("arguments", {})}
    return _CALL + json.dumps(call, ensure_ascii=False) + _CALL_END


def _description(tools: Sequence[dict[str, Any]]) -> str:
    lines = [json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools]
    return _DESCRIPTION.format(tools="\n".join(lines))


def _prepend(description: str, messages: list[Message], *, takes_system: bool) -> None:
    """To the system message, or where there can be none to what the user says first."""
    if takes_system and (not messages or messages[0]["role"] != "system"):
        messages.insert(0, {"role": "system", "content": description})
        return
    role = "system" if takes_system else "user"
    for message in messages:
        if message["role"] == role:
            texts = (message["content"], description)
            message["content"] = "\n\n".join(texts if takes_system else reversed(texts))
            return
    messages.insert(0, {"role": "user", "content": description})
