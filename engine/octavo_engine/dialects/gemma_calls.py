"""Gemma 4's calls: `call:NAME{key:<|"|>text<|"|>,other:[1,true]}`, JSON without most quotes."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo_engine.dialects.machine import MAX_NAME, Machine, Steps

if TYPE_CHECKING:
    from octavo_engine.dialects.tools import Tools

BEGIN, END, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
_HEAD = "call:"
_MAX_DEPTH = 64


@dataclass(frozen=True, slots=True)
class GemmaCalls:
    """There is one way."""

    begins: tuple[str, ...] = (BEGIN,)

    def parser(self, tools: Tools) -> GemmaCallsParser:
        return GemmaCallsParser()


class GemmaCallsParser(Machine):
    """Arguments come out a member at a time, as JSON."""

    def run(self) -> Steps[None]:
        while (yield from self.content_before(BEGIN)):
            yield from self.skip_space()
            name = None
            if (yield from self.accept(_HEAD)):
                name = yield from self.text_before("{", limit=MAX_NAME)
            name = (name or "").strip()
            if not name or not all(char.isalnum() or char in "_.-" for char in name):
                self.give_back()
                continue
            self.begin_call(name)
            if (yield from self._object(0)):
                yield from self.skip_space()
                if (yield from self.accept(END)):
                    self.keep()

    def _value(self, depth: int) -> Steps[bool]:
        """False: the text ends inside it."""
        yield from self.skip_space()
        if (yield from self.starts(QUOTE)):
            return (yield from self._quoted())
        char = yield from self.peek()
        if char == "{" and depth < _MAX_DEPTH:
            return (yield from self._object(depth + 1))
        if char == "[" and depth < _MAX_DEPTH:
            return (yield from self._list(depth + 1))
        begin = self._at - self._mark
        text = yield from self.text_before(",", "}", "]")
        is_whole = text is not None
        text = (self._text[self._mark + begin :] if text is None else text).strip()
        self.arguments(_scalar(text) if is_whole or text else "")
        return is_whole

    def _quoted(self) -> Steps[bool]:
        self._at += len(QUOTE)
        begin = self._at - self._mark
        text = yield from self.text_before(QUOTE)
        if text is None:
            text = self._text[self._mark + begin :]
            self.arguments(json.dumps(text, ensure_ascii=False)[:-1])
            return False
        self._at += len(QUOTE)
        self.arguments(json.dumps(text, ensure_ascii=False))
        return True

    def _object(self, depth: int) -> Steps[bool]:
        self._at += 1
        self.arguments("{")
        separator = ""
        while True:
            yield from self.skip_space()
            if (yield from self.accept(",")):
                yield from self.skip_space()
            if (yield from self.accept("}")):
                self.arguments("}")
                return True
            key = yield from self.text_before(":", limit=MAX_NAME)
            if key is None:
                if (yield from self.peek()):
                    self.give_back()
                else:  # cut off inside a key
                    self.keep()
                return False
            self._at += 1
            name = key.strip().removeprefix(QUOTE).removesuffix(QUOTE).strip('"')
            self.arguments(separator + json.dumps(name, ensure_ascii=False) + ": ")
            separator = ", "
            if not (yield from self._value(depth)):
                return False

    def _list(self, depth: int) -> Steps[bool]:
        self._at += 1
        self.arguments("[")
        separator = ""
        while True:
            yield from self.skip_space()
            if (yield from self.accept(",")):
                yield from self.skip_space()
            if (yield from self.accept("]")):
                self.arguments("]")
                return True
            if not (yield from self.peek()):
                return False
            self.arguments(separator)
            separator = ", "
            before = self._at - self._mark
            if not (yield from self._value(depth)):
                return False
            if self._at - self._mark == before and (yield from self.starts("}")):
                return False  # brackets that do not match


def _scalar(text: str) -> str:
    try:
        json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    return text


def _refuse(constant: str) -> None:
    raise ValueError(constant)
