"""Items of the Responses API as messages of a chat, and back into items that can be listed."""

from __future__ import annotations

import hashlib
import secrets
from typing import TYPE_CHECKING, Any, NamedTuple

from octavo_engine.errors import InvalidRequest
from octavo_engine.server.http.errors import not_supported
from octavo_engine.server.openai.schemas import ChatMessageBody, ContentPart

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from octavo_engine.server.openai.responses.bodies import InputItem, InputPart
    from octavo_engine.server.openai.responses.shapes import OutputItem

ROLES = ("user", "assistant", "system", "developer")
_TEXTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")
_ID_BEGINS = {"message": "msg", "function_call": "fc", "function_call_output": "fco"}


class Said(NamedTuple):
    """A message, and the field of the request that it came from."""

    message: ChatMessageBody
    place: str


def said_in(items: str | list[InputItem], before: Sequence[ChatMessageBody] = ()) -> list[Said]:
    """The messages of an input; `before`, those of the responses before it.

    What the assistant did without a break, reasoning, texts and calls, is one message: so templates
    want it. Raises RequestError that names the field.
    """
    if isinstance(items, str):
        return [Said(ChatMessageBody(role="user", content=items), "input")]
    reader = _Reader(before)
    for number, item in enumerate(items):
        reader.read(f"input[{number}]", item)
    return reader.said


def answer_of(output: Iterable[OutputItem]) -> ChatMessageBody:
    """The message that a response's items make, for the turns after it."""
    from octavo_engine.server.openai.responses import shapes

    texts: list[str] = []
    reasoning_parts: list[str] = []
    message = ChatMessageBody(role="assistant")
    for item in output:
        match item:
            case shapes.OutputMessage():
                texts += [part.text for part in item.content]
            case shapes.ReasoningItem():
                reasoning_parts += [part.text for part in item.content]
            case shapes.FunctionCallItem():
                call = _call(item.call_id, item.name, item.arguments)
                message.tool_calls = [*(message.tool_calls or ()), call]
    message.content = "\n".join(texts)
    message.reasoning = "\n".join(reasoning_parts) or None
    return message


def listed(given: Any) -> list[dict[str, Any]]:
    """A request's own input as /input_items shows it: each with an id."""
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    return [_listed(item) for item in given]


def _listed(item: dict[str, Any]) -> dict[str, Any]:
    kind = item.get("type") or "message"
    result = {"type": kind, **item}
    if not isinstance(result.get("id"), str) or not result["id"]:
        result["id"] = new_id(_ID_BEGINS.get(kind, "rs"))
    if kind == "message":
        result.setdefault("status", "completed")
        if isinstance(item.get("content"), str):
            is_ours = item.get("role") == "assistant"
            part = {"type": "output_text" if is_ours else "input_text", "text": item["content"]}
            result["content"] = [part | {"annotations": []} if is_ours else part]
    return result


def new_id(begin: str, place: str = "") -> str:
    return f"{begin}_{place}{secrets.token_hex(24)}"


def item_id(begin: str, response_id: str, index: int) -> str:
    """The same on every engine that a response passes."""
    digest = hashlib.blake2b(f"{response_id} {index}".encode(), digest_size=24)
    return f"{begin}_{digest.hexdigest()}"


class _Reader:
    def __init__(self, before: Sequence[ChatMessageBody]) -> None:
        self.said: list[Said] = []
        self._pending: ChatMessageBody | None = None  # the assistant's, that may still grow
        self._calls = {
            call["id"] for message in before for call in message.tool_calls or () if "id" in call
        }

    def read(self, at: str, item: InputItem) -> None:
        match item.type:
            case "message":
                self._message(at, item)
            case "function_call":
                call_id = _needed(f"{at}.call_id", item.call_id)
                name = _needed(f"{at}.name", item.name)
                call = _call(call_id, name, item.arguments or "{}")
                message = self._ours(at)
                message.tool_calls = [*(message.tool_calls or ()), call]
                self._calls.add(call_id)
            case "function_call_output":
                self._output(at, item)
            case "reasoning":
                text = _thoughts(at, item)
                message = self._ours(at)
                message.reasoning = "\n".join(filter(None, (message.reasoning, text))) or None
            case kind:
                hint = "message, function_call, function_call_output and reasoning are"
                if kind == "item_reference":
                    hint = "send the item itself, or previous_response_id"
                raise not_supported(f"{at}.type {kind[:50]!r}", hint, param=f"{at}.type")

    def _message(self, at: str, item: InputItem) -> None:
        if item.role not in ROLES:
            given = "none" if item.role is None else repr(item.role[:50])
            raise InvalidRequest(
                f"{at}.role must be one of {', '.join(ROLES)}; got {given}", param=f"{at}.role"
            )
        if item.content is None:
            raise InvalidRequest(f"{at}.content is required", param=f"{at}.content")
        content = _content(f"{at}.content", item.content)
        if item.role == "assistant":
            message = self._ours(at)
            message.content = content if message.content is None else (
                f"{plain(message.content)}\n{plain(content)}"
            )  # fmt: skip
            return
        self._pending = None
        self.said.append(Said(ChatMessageBody(role=item.role, content=content), at))

    def _output(self, at: str, item: InputItem) -> None:
        call_id = _needed(f"{at}.call_id", item.call_id)
        if call_id not in self._calls:
            raise InvalidRequest(
                f"{at}.call_id: there is no function_call {call_id[:128]} before it",
                param=f"{at}.call_id",
            )
        if item.output is None:
            raise InvalidRequest(f"{at}.output is required", param=f"{at}.output")
        self._pending = None
        content = _content(f"{at}.output", item.output)
        self.said.append(
            Said(ChatMessageBody(role="tool", content=content, tool_call_id=call_id), at)
        )

    def _ours(self, at: str) -> ChatMessageBody:
        if self._pending is None:
            self._pending = ChatMessageBody(role="assistant")
            self.said.append(Said(self._pending, at))
        return self._pending


def _call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def _needed(field: str, value: str | None) -> str:
    if not value:
        raise InvalidRequest(f"{field} is required", param=field)
    return value


def _thoughts(at: str, item: InputItem) -> str:
    """The reasoning itself or, where it is not shown, its summary."""
    if isinstance(item.content, str):
        return item.content
    field = "content" if item.content else "summary"
    parts: list[InputPart] = item.content or item.summary or []
    return "\n".join(_part(f"{at}.{field}[{n}]", part) for n, part in enumerate(parts))


def _content(at: str, content: str | list[InputPart]) -> str | list[ContentPart]:
    if isinstance(content, str):
        return content
    texts = [_part(f"{at}[{number}]", part) for number, part in enumerate(content)]
    return [ContentPart(type="text", text=text) for text in texts]


def _part(at: str, part: InputPart) -> str:
    if part.type == "refusal":
        name, text = "refusal", part.refusal
    elif part.type in _TEXTS:
        name, text = "text", part.text
    else:
        raise not_supported(
            f"{at}.type {part.type[:50]!r}", "this model reads text only", param=f"{at}.type"
        )
    if text is None:
        raise InvalidRequest(f"{at}.{name} is required", param=f"{at}.{name}")
    return text


def plain(content: str | list[ContentPart]) -> str:
    """The texts of a message as one."""
    if isinstance(content, str):
        return content
    return "\n".join(part.text or "" for part in content)
