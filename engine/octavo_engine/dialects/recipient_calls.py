"""Functionary 3.2's answers: parts that begin with whom they are for, `all` or a function.

    all
    Let me look.>>>get_weather
    {"city": "Oslo"}

The prompt ends with the first `>>>`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo_engine.dialects.machine import MAX_NAME, Machine, Steps

if TYPE_CHECKING:
    from octavo_engine.dialects.tools import Tools

MARK, EVERYBODY = ">>>", "all"


@dataclass(frozen=True, slots=True)
class RecipientCalls:
    """There is one way."""

    begins: tuple[str, ...] = (MARK,)

    def parser(self, tools: Tools) -> RecipientCallsParser:
        return RecipientCallsParser(tools)


class RecipientCallsParser(Machine):
    """Text that is for none of the request's functions is content."""

    def __init__(self, tools: Tools) -> None:
        self._tools = tools
        super().__init__()

    def run(self) -> Steps[None]:
        yield from self.accept(MARK)  # of a template that leaves it to the model
        yield from self._part()
        while (yield from self.content_before(MARK)):
            yield from self._part()

    def _part(self) -> Steps[None]:
        heading = yield from self.text_before("\n", limit=MAX_NAME)
        name = (heading or "").strip()
        if name == EVERYBODY:
            self._at += 1
            self.keep()
            return
        if name not in self._tools:
            self.give_back()
            return
        yield from self.skip_space()
        if (yield from self.peek()) != "{":
            self.give_back()
            return
        self.begin_call(name)
        yield from self.value(self.arguments)
