"""Calls written as JSON objects with a name and arguments: most formats, which differ in data
only."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo_engine.dialects.machine import MAX_NAME, Machine, Steps

if TYPE_CHECKING:
    from octavo_engine.dialects.tools import Tools


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonCalls:
    """Where the objects stand."""

    begins: tuple[str, ...] = ()  # before an object, or a list of them
    end: str = ""  # after it; a model that forgets it is understood
    bare: bool = False  # an answer that begins with `{` or `[` may be calls and nothing else
    separator: str = ""  # between bare objects
    name_key: str = "name"
    is_keyed: bool = False  # an object has one key, which is the name, and the arguments under it

    def parser(self, tools: Tools) -> JsonCallsParser:
        return JsonCallsParser(self, tools)


class JsonCallsParser(Machine):
    """Arguments come out as they are written, so that they can be streamed."""

    def __init__(self, format: JsonCalls, tools: Tools) -> None:
        self._format = format
        self._tools = tools
        super().__init__()

    def run(self) -> Steps[None]:
        format = self._format
        if format.bare:
            yield from self.skip_space()
            marker = yield from self.starts(*format.begins, "{", "[")
            if marker in ("{", "["):
                yield from self.calls(bare=True)
        while (yield from self.content_before(*format.begins)):
            yield from self.calls(bare=False)

    def calls(self, *, bare: bool) -> Steps[None]:
        """An object or a list of them, and the end mark. What is none becomes content."""
        yield from self.skip_space()
        match (yield from self.peek()):
            case "[":
                is_whole = yield from self._list(bare=bare)
            case "{":
                is_whole = yield from self._objects(bare=bare)
            case _:
                is_whole = False
        if not is_whole:
            self.give_back()
        elif self._format.end:
            yield from self.skip_space()
            if (yield from self.accept(self._format.end)):
                self.keep()

    def _list(self, *, bare: bool) -> Steps[bool]:
        self._at += 1
        while True:
            yield from self.skip_space()
            if (yield from self.peek()) != "{" or not (yield from self.call(bare=bare)):
                return False
            yield from self.skip_space()
            following = yield from self.peek()
            if following not in ("]", ","):
                return False
            self._at += 1
            if following == "]":
                self.keep()
                return True

    def _objects(self, *, bare: bool) -> Steps[bool]:
        while (yield from self.call(bare=bare)):
            yield from self.skip_space()
            if self._format.separator and (yield from self.accept(self._format.separator)):
                yield from self.skip_space()
            if (yield from self.peek()) != "{":
                return True
        return False

    def call(self, *, bare: bool) -> Steps[bool]:
        """One object, from its brace on. False: no event of it was made, it is no call."""
        if self._format.is_keyed:
            return (yield from self._keyed_call())
        name: str | None = None
        early: str | None = None  # arguments that came before the name
        is_begun = has_fields = False
        self._at += 1
        while True:
            yield from self.skip_space()
            char = yield from self.peek()
            if char == "}":
                self._at += 1
                break
            if has_fields:
                if char != ",":
                    return is_begun
                self._at += 1
                yield from self.skip_space()
            has_fields = True
            key = yield from self.string()
            if key is None:
                return is_begun
            yield from self.skip_space()
            if (yield from self.peek()) != ":":
                return is_begun
            self._at += 1
            yield from self.skip_space()
            if key == self._format.name_key and name is None:
                name = yield from self.string()
                if not name or len(name) > MAX_NAME or (bare and name not in self._tools):
                    return False
            elif key in ("arguments", "parameters") and not is_begun:
                if name is None:
                    early = yield from self.captured()
                    if early is None:
                        return False
                    continue
                is_begun = True
                self.begin_call(name)
                if not (yield from self.argument_value()):
                    return True
            elif (yield from self.captured()) is None:
                return is_begun
        if is_begun:
            self.keep()
            return True
        if name is None or (bare and early is None):
            return False
        self.begin_call(name)
        self.arguments(_decoded(early) if early is not None else "{}")
        return True

    def _keyed_call(self) -> Steps[bool]:
        """{NAME: ARGUMENTS}"""
        self._at += 1
        yield from self.skip_space()
        name = yield from self.string()
        yield from self.skip_space()
        if not name or len(name) > MAX_NAME or not (yield from self.accept(":")):
            return False
        yield from self.skip_space()
        self.begin_call(name)
        if not (yield from self.argument_value()):
            return True
        yield from self.skip_space()
        if (yield from self.accept("}")):
            self.keep()
        return True

    def argument_value(self) -> Steps[bool]:
        """An object goes out as it comes; a string that holds JSON is decoded first."""
        if (yield from self.peek()) in ("{", "["):
            return (yield from self.value(self.arguments))
        raw = yield from self.captured()
        self.arguments(_decoded(raw) if raw is not None else "")
        return raw is not None


def _decoded(raw: str) -> str:
    if raw == "null":
        return "{}"
    if not raw.startswith('"'):
        return raw
    try:
        value = json.loads(raw, strict=False)
    except (ValueError, RecursionError):
        return raw
    return value if isinstance(value, str) else raw


class ArgumentsOnly(Machine):
    """An answer that is nothing but the arguments of one named function: a grammar sees to it."""

    def __init__(self, name: str) -> None:
        self._name = name
        super().__init__()

    def run(self) -> Steps[None]:
        yield from self.skip_space()
        self.keep()
        if (yield from self.peek()):
            self.begin_call(self._name)
        while (yield from self.peek()):
            self._at = len(self._text)
            text = self._text[self._mark :]
            self.arguments(text)
