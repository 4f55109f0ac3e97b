"""Calls whose arguments are tagged one by one, as text: Qwen3-Coder, GLM-4.5, MiniMax, …"""

from __future__ import annotations

import ast
import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from octavo_engine.dialects.machine import MAX_NAME, Machine, Steps

if TYPE_CHECKING:
    from octavo_engine.dialects.tools import Tool, Tools


_MAX_DEPTH = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class TaggedCalls:
    """The tags around a call, its name, and each key and value."""

    wrapper: str = "<tool_call>"
    wrapper_end: str = "</tool_call>"
    call: str = ""  # before the name; may stand without the wrapper
    name_ends: tuple[str, ...]  # the name stands before the first of these
    name_end: str = ""  # which of them belongs to the name's tag
    key: str
    key_end: str
    is_typed: bool = False  # between key and value stands string="true" or "false", and a bracket
    value: str = ""  # between key and value
    value_end: str  # KEY in it stands for the key
    call_end: str = ""
    has_layout: bool = True  # a line break on either side of a value is none of its own
    inner: str = ""  # before the tags of objects and lists within a value

    @property
    def begins(self) -> tuple[str, ...]:
        return tuple(mark for mark in (self.wrapper, self.call) if mark)

    def parser(self, tools: Tools) -> TaggedCallsParser:
        return TaggedCallsParser(self, tools)


class TaggedCallsParser(Machine):
    """A value comes out once it is whole: its type decides how it is written in JSON."""

    def __init__(self, format: TaggedCalls, tools: Tools) -> None:
        self._format = format
        self._tools = tools
        super().__init__()

    def run(self) -> Steps[None]:
        format = self._format
        while marker := (yield from self.content_before(*format.begins)):
            if marker == format.wrapper:
                yield from self.skip_space()
                if format.call and not (yield from self.accept(format.call)):
                    self.give_back()
                    continue
            yield from self._call()

    def _call(self) -> Steps[None]:
        format = self._format
        name = yield from self.text_before(*format.name_ends, limit=MAX_NAME)
        name = name.strip() if name is not None else ""
        if not name or any(mark in name for mark in "<>{}\n"):
            self.give_back()
            return
        if format.name_end:
            yield from self.accept(format.name_end)
        self.begin_call(name)
        self.arguments("{")
        tool = self._tools.get(name)
        separator = ""
        while True:
            yield from self.skip_space()
            if format.call_end and (yield from self.starts(format.call_end)):
                break  # which the mark of a key may begin as well
            if not (yield from self.accept(format.key)):
                break
            key = yield from self.text_before(format.key_end, limit=MAX_NAME)
            if key is None:
                if (yield from self.peek()):
                    self.give_back()
                else:  # cut off inside a tag
                    self.keep()
                return
            self._at += len(format.key_end)
            key = key.strip()
            attributes = ""
            if format.is_typed:
                attributes = (yield from self.text_before(">", limit=MAX_NAME)) or ""
                yield from self.accept(">")
            if format.value:
                yield from self.skip_space()
                yield from self.accept(format.value)
            text, is_whole = yield from self._value(key)
            self.arguments(separator + json.dumps(key, ensure_ascii=False) + ": ")
            self.arguments(self._as_json(text, attributes, tool, key))
            separator = ", "
            if not is_whole:
                return
        is_closed = False
        for end in (format.call_end, format.wrapper_end):
            if end:
                yield from self.skip_space()
                has_ended = bool((yield from self.accept(end)))
                # Other text ends it too, but not the end of all text: that cut it off.
                if not is_closed and (has_ended or (yield from self.peek())):
                    is_closed = True
                    self.arguments("}")
                elif has_ended:
                    self.keep()

    def _value(self, key: str) -> Steps[tuple[str, bool]]:
        """The text of a value; a model that forgets its end is understood at the next tag."""
        format = self._format
        value_end = format.value_end.replace("KEY", key)
        ends = [value_end, format.call_end or format.wrapper_end]
        if not format.inner:  # else tags may stand in it
            ends.append(format.key)
        begin = self._at - self._mark
        text = yield from self.text_before(*ends)
        is_whole = text is not None
        if text is None:
            text = self._text[self._mark + begin :]
        else:
            yield from self.accept(value_end)
        return (_unwrapped(text) if format.has_layout else text), is_whole

    def _as_json(self, text: str, attributes: str, tool: Tool | None, key: str) -> str:
        if 'string="true"' in attributes:
            return json.dumps(text, ensure_ascii=False)
        if self._format.inner and self._format.inner in text:
            value = _tree(text, self._format.inner, 0)
            return json.dumps(value, ensure_ascii=False)
        return as_json(text, tool, key)


def as_json(text: str, tool: Tool | None, key: str) -> str:
    """A value as JSON, by the type that the tool's schema gives it. Never evaluates anything."""
    kinds = tool.argument_types(key) if tool is not None else frozenset()
    if kinds != {"string"}:
        value = _literal(text.strip())
        if value is not None and (
            any(_is_a(value[0], kind) for kind in kinds)
            or (not kinds and not isinstance(value[0], str))
        ):
            return value[1]
    return json.dumps(text, ensure_ascii=False)


def _tree(text: str, mark: str, depth: int) -> Any:
    """An object or a list whose members are tags, each behind the mark."""
    tag = re.compile(re.escape(mark) + r"<([^<>/\n]{1,256})>")
    members: list[tuple[str, Any]] = []
    at = 0
    while depth < _MAX_DEPTH and (found := tag.search(text, at)):
        end = f"{mark}</{found[1]}>"
        place = text.find(end, found.end())
        inside = text[found.end() : place if place >= 0 else len(text)]
        members.append((found[1], _tree(inside, mark, depth + 1)))
        if place < 0:
            break
        at = place + len(end)
    if not members:
        value = _literal(text.strip())
        return text if value is None or isinstance(value[0], str) else value[0]
    if all(name == "item" for name, _ in members):
        return [value for _, value in members]
    return dict(members)


def _literal(text: str) -> tuple[Any, str] | None:
    try:
        value = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        pass
    else:
        return value, text
    if len(text) > 4096:
        return None
    try:
        value = ast.literal_eval(text)  # True, None and quotes as Python writes them
        return value, json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None


def _refuse(constant: str) -> None:
    raise ValueError(constant)


def _is_a(value: Any, kind: str) -> bool:
    match kind:
        case "null":
            return value is None
        case "integer":
            return isinstance(value, int) and not isinstance(value, bool)
        case "number":
            return isinstance(value, int | float) and not isinstance(value, bool)
        case "boolean":
            return isinstance(value, bool)
        case "object":
            return isinstance(value, dict)
        case "array":
            return isinstance(value, list | tuple)
        case _:
            return False


def _unwrapped(text: str) -> str:
    """Without the line break that the tags bring on either side."""
    return text.removeprefix("\n").removesuffix("\n")
