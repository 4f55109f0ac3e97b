"""Mistral's two ways: `[TOOL_CALLS] [{…}, …]`, and `[TOOL_CALLS]name[ARGS]{…}` once a call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo_engine.dialects.json_calls import JsonCalls, JsonCallsParser
from octavo_engine.dialects.machine import MAX_NAME, Steps

if TYPE_CHECKING:
    from octavo_engine.dialects.tools import Tools

BEGIN, CALL_ID, ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"


@dataclass(frozen=True, slots=True)
class MistralCalls:
    """Which of the two it is shows in what follows the mark."""

    @property
    def begins(self) -> tuple[str, ...]:
        return (BEGIN,)

    def parser(self, tools: Tools) -> MistralCallsParser:
        return MistralCallsParser(JsonCalls(begins=(BEGIN,)), tools)


class MistralCallsParser(JsonCallsParser):
    """The list is read as any list of JSON calls."""

    def run(self) -> Steps[None]:
        while (yield from self.content_before(BEGIN)):
            yield from self.skip_space()
            if (yield from self.peek()) in ("[", "{"):
                yield from self.calls(bare=False)
            else:
                yield from self._headed()

    def _headed(self) -> Steps[None]:
        name = yield from self.text_before(CALL_ID, ARGUMENTS, "{", limit=MAX_NAME)
        name = (name or "").strip()
        if not name or not all(char.isalnum() or char in "_.-" for char in name):
            self.give_back()
            return
        if (yield from self.accept(CALL_ID)):
            # Such an id is left out: clients are given one of ours.
            id = yield from self.text_before(ARGUMENTS, "{", limit=MAX_NAME)
            if id is None:
                self.give_back()
                return
        yield from self.accept(ARGUMENTS)
        yield from self.skip_space()
        if (yield from self.peek()) != "{":
            self.give_back()
            return
        self.begin_call(name)
        yield from self.value(self.arguments)
