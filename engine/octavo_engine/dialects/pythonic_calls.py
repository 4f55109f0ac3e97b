"""Calls written as a Python list of calls: `[weather(city="Oslo"), time(zone="CET")]`."""

from __future__ import annotations

import ast
import json
import re
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from octavo_engine.dialects.machine import MAX_NAME, Machine, Steps

if TYPE_CHECKING:
    from octavo_engine.dialects.tools import Tools

# A list is parsed at once, on the server's own loop; beyond these it is content.
MAX_LIST = 1 << 14  # characters
MAX_CALLS = 128
_NAME_CHAR = re.compile(r"[A-Za-z0-9_.\-]")


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonicCalls:
    """The marks that may stand around the list."""

    begin: str = ""
    end: str = ""

    @property
    def begins(self) -> tuple[str, ...]:
        return (self.begin,) if self.begin else ()

    def parser(self, tools: Tools) -> PythonicCallsParser:
        return PythonicCallsParser(self)


class PythonicCallsParser(Machine):
    """The list is read whole, by Python's own grammar and literals only; nothing is evaluated."""

    def __init__(self, format: PythonicCalls) -> None:
        self._format = format
        super().__init__()

    def run(self) -> Steps[None]:
        format = self._format
        yield from self.skip_space()
        if (yield from self.starts("[")):
            yield from self._calls()
        if format.begin:
            while (yield from self.content_before(format.begin)):
                yield from self.skip_space()
                yield from self._calls()

    def _calls(self) -> Steps[None]:
        source = yield from self._list()
        calls = _read(source) if source is not None else None
        if not calls:
            self.give_back()
            return
        if self._format.end:
            yield from self.skip_space()
            yield from self.accept(self._format.end)
        for name, arguments in calls:
            self.begin_call(name)
            self.arguments(arguments)

    def _list(self) -> Steps[str | None]:
        """From bracket to bracket, if what stands behind the first one begins a call."""
        begin = self._at - self._mark
        if (yield from self.peek()) != "[":
            return None
        self._at += 1
        yield from self.skip_space()
        length = 0
        while (char := (yield from self.peek())) and _NAME_CHAR.match(char) and length <= MAX_NAME:
            self._at += 1
            length += 1
        if not length or char != "(":
            return None
        depth, quote = 1, ""
        while char := (yield from self.peek()):
            self._at += 1
            if char == "\\" and quote:
                if (yield from self.peek()):
                    self._at += 1
            elif quote:
                quote = "" if char == quote else quote
            elif char in "\"'":
                quote = char
            elif char in "[({":
                depth += 1
            elif char in "])}":
                depth -= 1
            if depth == 0:
                return self._text[self._mark + begin : self._at]
            if self._at - self._mark - begin > MAX_LIST:
                return None
        return None


def _read(source: str) -> list[tuple[str, str]] | None:
    """(name, arguments as JSON) of each call. None: it is something else."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of odd escapes in strings
            tree = ast.parse(source, mode="eval").body
        if not isinstance(tree, ast.List) or not 0 < len(tree.elts) <= MAX_CALLS:
            return None
        return [_call(node) for node in tree.elts]
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None


def _call(node: ast.expr) -> tuple[str, str]:
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("not a call with named arguments")
    name = _dotted(node.func)
    arguments: dict[str, Any] = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            raise ValueError("unpacks something")
        arguments[keyword.arg] = _value(keyword.value)
    return name, json.dumps(arguments, ensure_ascii=False, allow_nan=False)


def _dotted(node: ast.expr) -> str:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        raise ValueError("not a plain name")
    return ".".join([node.id, *reversed(parts)])


def _value(node: ast.expr) -> Any:
    match node:
        case ast.Name(id="true"):  # models mix in what JSON calls them
            return True
        case ast.Name(id="false"):
            return False
        case ast.Name(id="null"):
            return None
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_value(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            return {str(_key(key)): _value(value) for key, value in zip(keys, values, strict=True)}
        case _:
            value = ast.literal_eval(node)
            json.dumps(value, allow_nan=False)  # bytes, sets and infinities are no JSON
            return value


def _key(node: ast.expr | None) -> Any:
    if node is None:
        raise ValueError("unpacks something")
    return ast.literal_eval(node)
