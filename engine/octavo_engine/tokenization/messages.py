"""Conversations as they come in: checked, and copied into plain values."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from octavo_engine.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

MAX_DEPTH = 32
# Parts of a content that stand for one.
PICTURE = {"type": "image"}
SOUND = {"type": "audio"}
MARKS = (PICTURE, SOUND)
_ROLE = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_TEXT_PARTS = ("text", "input_text", "output_text", "refusal")


def checked_messages(
    messages: Sequence[Mapping[str, Any]], *, keep_parts: bool
) -> list[dict[str, Any]]:
    """A deep copy of plain JSON values; lists of text parts become strings unless they are kept.

    Raises InvalidRequest(param="messages") that names the message.
    """
    if isinstance(messages, str) or not _is_list(messages) or not messages:
        raise _refuse("messages must be a list with at least one message")
    return [_checked(f"messages[{i}]", m, keep_parts) for i, m in enumerate(messages)]


def plain(value: Any, where: str, *, convert: Callable[[str], str] = str, depth: int = 0) -> Any:
    """A copy of JSON-like data with every string converted; anything else is refused.

    A template must never see an object that has methods of its own.
    """
    if depth > MAX_DEPTH:
        raise _refuse(f"{where} is nested more than {MAX_DEPTH} deep")
    if value is None or type(value) in (bool, int, float):
        return value
    if isinstance(value, str):
        return convert(str(value))
    if isinstance(value, dict):
        return {
            plain(k, where, convert=convert, depth=depth + 1): plain(
                v, where, convert=convert, depth=depth + 1
            )
            for k, v in value.items()
        }
    if _is_list(value):
        return [plain(item, where, convert=convert, depth=depth + 1) for item in value]
    raise _refuse(f"{where} holds a {type(value).__name__}, which is no JSON value")


def _checked(where: str, message: Any, keep_parts: bool) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise _refuse(f"{where} must be an object")
    checked: dict[str, Any] = plain(message, where)
    role = checked.get("role")
    if not isinstance(role, str) or _ROLE.fullmatch(role) is None:
        raise _refuse(f"{where}.role must be a name such as user, assistant or system")
    content = checked.get("content")
    if isinstance(content, list):
        if not keep_parts and any(mark in content for mark in MARKS):
            noun = "pictures" if PICTURE in content else "sounds"
            raise _refuse(f"{where}: this model's chat template has no place for {noun}")
        parts = [_part(f"{where}.content[{i}]", part) for i, part in enumerate(content)]
        if keep_parts:
            checked["content"] = parts
        else:
            checked["content"] = "\n".join(part["text"] for part in parts)
    elif content is None:
        if role != "assistant" or not (checked.get("tool_calls") or _has_reasoning(checked)):
            raise _refuse(f"{where}.content is missing")
    elif not isinstance(content, str):
        raise _refuse(f"{where}.content must be a string or a list of text parts")
    return checked


def _has_reasoning(message: Mapping[str, Any]) -> bool:
    return isinstance(message.get("reasoning_content") or message.get("reasoning"), str)


def _part(where: str, part: Any) -> dict[str, str]:
    return dict(part) if part in MARKS else {"type": "text", "text": _text(where, part)}


def _text(where: str, part: Any) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise _refuse(f"{where} must be an object with a type")
    kind = part.get("type")
    if kind not in _TEXT_PARTS:
        raise _refuse(f"{where} has type {kind!r:.40}; this model reads text only")
    text = part.get("refusal" if kind == "refusal" else "text")
    if not isinstance(text, str):
        raise _refuse(f"{where}.text must be a string")
    return text


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple))


def _refuse(problem: str) -> InvalidRequest:
    return InvalidRequest(problem, param="messages")
