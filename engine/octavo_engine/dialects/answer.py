"""One answer's parser: reasoning first, and tool calls in what is left."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo_engine.dialects.events import Arguments, CallBegun, Content, Event, Reasoning
from octavo_engine.dialects.machine import earliest

if TYPE_CHECKING:
    from octavo_engine.dialects.events import Parser
    from octavo_engine.dialects.reasoning import Splitter
    from octavo_engine.dialects.tools import Tools


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
    """A Parser. Calls inside reasoning are reasoning, not calls; but where the reasoning never
    ends, the model went from it to its calls without saying so.

    So reasoning from the mark of a call on, one of `begins`, waits for what comes: the end of the
    reasoning, or of the text.
    """

    def __init__(
        self,
        reasoning: Splitter | None,
        tools: Parser | None,
        *,
        begins: tuple[str, ...] = (),
        callable: Tools | None = None,
    ) -> None:
        self.reasoning = reasoning
        self._tools = tools
        self._begins = begins if tools is not None else ()
        self._callable = callable
        self._thoughts = ""  # that wait
        self._may_be_call = False
        self._num_read = 0

    def push(self, text: str) -> list[Event]:
        """Hot path."""
        if self.reasoning is None:
            return self._call(text)
        self._num_read += len(text)
        return self._read(self.reasoning.push(text), self.reasoning)

    def finish(self) -> list[Event]:
        events: list[Event] = []
        if self.reasoning is not None:
            events = self._read(self.reasoning.finish(), self.reasoning)
            if self._may_be_call and (calls := self._calls_in_thoughts()):
                self.reasoning.ends_at = self._num_read - len(self._thoughts.lstrip())
                return events + calls
            events += self._thought_out()
        return events if self._tools is None else [*events, *self._tools.finish()]

    def _read(self, events: list[Event], reasoning: Splitter) -> list[Event]:
        result: list[Event] = []
        for event in events:
            if isinstance(event, Content):
                result += self._thought_out()
                result += self._call(event.text)
            elif self._begins and isinstance(event, Reasoning):
                result += self._think(event.text)
            else:
                result.append(event)
        if self._thoughts and reasoning.ends_at is not None:
            result += self._thought_out()
        return result

    def _think(self, text: str) -> list[Event]:
        """Up to the mark of a call, and the space before it."""
        self._thoughts += text
        if self._may_be_call:
            return []
        mark, at = earliest(self._thoughts, 0, self._begins)
        self._may_be_call = bool(mark)
        said = self._thoughts[:at].rstrip()
        self._thoughts = self._thoughts[len(said) :]
        return [Reasoning(said)] if said else []

    def _thought_out(self) -> list[Event]:
        text, self._thoughts, self._may_be_call = self._thoughts, "", False
        return [Reasoning(text)] if text else []

    def _calls_in_thoughts(self) -> list[Event]:
        """Empty: it was no call of a function that is there."""
        assert self._tools is not None  # else there are no marks
        events = [*self._tools.push(self._thoughts.lstrip()), *self._tools.finish()]
        names = [event.name for event in events if isinstance(event, CallBegun)]
        is_call = bool(names) and (self._callable is None or names[0] in self._callable)
        return events if is_call else []

    def _call(self, text: str) -> list[Event]:
        if self._tools is None:
            return [Content(text)] if text else []
        return self._tools.push(text)
