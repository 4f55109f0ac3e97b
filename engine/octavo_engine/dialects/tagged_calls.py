"""Calls whose arguments are tagged one by one, as text: Qwen3-Coder and GLM-4.5."""

from __future__ import annotations

import ast
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from octavo_engine.dialects.machine import MAX_NAME, Machine, Steps

if TYPE_CHECKING:
    from octavo_engine.dialects.tools import Tool, Tools


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
    value: str = ""  # between key and value
    value_end: str
    call_end: str = ""

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
        markers = tuple(mark for mark in (format.wrapper, format.call) if mark)
        while marker := (yield from self.content_before(*markers)):
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
            if format.value:
                yield from self.skip_space()
                yield from self.accept(format.value)
            text, is_whole = yield from self._value()
            self.arguments(separator + json.dumps(key.strip(), ensure_ascii=False) + ": ")
            self.arguments(as_json(text, tool, key.strip()))
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

    def _value(self) -> Steps[tuple[str, bool]]:
        """The text of a value; a model that forgets its end is understood at the next tag."""
        format = self._format
        ends = [format.value_end, format.key, format.call_end or format.wrapper_end]
        begin = self._at - self._mark
        text = yield from self.text_before(*ends)
        if text is None:
            return _unwrapped(self._text[self._mark + begin :]), False
        yield from self.accept(format.value_end)
        return _unwrapped(text), True


def as_json(text: str, tool: Tool | None, key: str) -> str:
    """A value as JSON, by the type that the tool's schema gives it. Never evaluates anything."""
    kind = tool.argument_type(key) if tool is not None else None
    if kind != "string":
        value = _literal(text.strip())
        if value is not None and _is_a(value[0], kind):
            return value[1]
    return json.dumps(text, ensure_ascii=False)


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


def _is_a(value: Any, kind: str | None) -> bool:
    match kind:
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
            return not isinstance(value, str)


def _unwrapped(text: str) -> str:
    """Without the line break that the tags bring on either side."""
    return text.removeprefix("\n").removesuffix("\n")
