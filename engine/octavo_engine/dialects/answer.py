"""One answer's parser: reasoning first, and tool calls in what is left."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo_engine.dialects.events import Arguments, CallBegun, Content, Event

if TYPE_CHECKING:
    from octavo_engine.dialects.events import Parser
    from octavo_engine.dialects.reasoning import Splitter


class OnlyCalls:
    """A Parser of an answer that a grammar makes of calls alone: what else there seems to be is the
    beginning of a call that was cut off."""

    def __init__(self, calls: Parser) -> None:
        self._calls = calls

    def push(self, text: str) -> list[Event]:
        return _calls_of(self._calls.push(text))

    def finish(self) -> list[Event]:
        return _calls_of(self._calls.finish())


def _calls_of(events: list[Event]) -> list[Event]:
    return [event for event in events if isinstance(event, CallBegun | Arguments)]


class AnswerParser:
    """A Parser. Calls inside reasoning are thoughts, not calls."""

    def __init__(self, reasoning: Splitter | None, tools: Parser | None) -> None:
        self.reasoning = reasoning
        self._tools = tools

    def push(self, text: str) -> list[Event]:
        """Hot path."""
        if self.reasoning is None:
            return self._call(text)
        return self._all_calls(self.reasoning.push(text))

    def finish(self) -> list[Event]:
        events = [] if self.reasoning is None else self._all_calls(self.reasoning.finish())
        return events if self._tools is None else [*events, *self._tools.finish()]

    def _all_calls(self, events: list[Event]) -> list[Event]:
        result: list[Event] = []
        for event in events:
            if isinstance(event, Content):
                result += self._call(event.text)
            else:
                result.append(event)
        return result

    def _call(self, text: str) -> list[Event]:
        if self._tools is None:
            return [Content(text)] if text else []
        return self._tools.push(text)
