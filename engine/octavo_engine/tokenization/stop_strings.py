"""Finds stop strings in a stream of text, holding back just what could still become one.

The match that is complete first wins; of several that end together, the longest. That does not
depend on how the text was cut into pieces. An Aho-Corasick automaton reads each character once: its
state is the longest end of the text that begins a stop, which is also what must be held back.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence


class StopMatch(NamedTuple):
    """Text that may be shown, and the stop that was found, if any."""

    text: str
    stop: str | None


class StopStrings:
    """One sequence's search. After a match it yields nothing more."""

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._include = include
        self._next: list[dict[str, int]] = [{}]
        self._fail = [0]
        self._depth = [0]
        self._stop: list[str | None] = [None]  # the longest stop that ends in this state
        self._state = 0
        self._held = ""  # always exactly the path to the current state
        self._matched: str | None = None
        for stop in stops:
            if not stop:
                raise ValueError("a stop string must not be empty")
            self._insert(stop)
        self._link()
        self._first = frozenset(self._next[0])

    @property
    def matched(self) -> str | None:
        return self._matched

    def push(self, text: str) -> StopMatch:
        """Adds text. Hot path: once per token and sequence."""
        if self._matched is not None:
            return StopMatch("", self._matched)
        if not self._state and self._first.isdisjoint(text):
            return StopMatch(text, None)
        before = len(self._held)
        for position, character in enumerate(text, 1):
            state = self._step(character)
            stop = self._stop[state]
            if stop is not None:
                self._matched = stop
                end = before + position
                seen = self._held + text[:position]
                self._held, self._state = "", 0
                return StopMatch(seen if self._include else seen[: end - len(stop)], stop)
        seen = self._held + text
        safe = len(seen) - self._depth[self._state]
        self._held = seen[safe:]
        return StopMatch(seen[:safe], None)

    def flush(self) -> str:
        """What was held back, now that nothing follows."""
        held, self._held, self._state = self._held, "", 0
        return held

    def _step(self, character: str) -> int:
        state = self._state
        while state and character not in self._next[state]:
            state = self._fail[state]
        self._state = self._next[state].get(character, 0)
        return self._state

    def _insert(self, stop: str) -> None:
        state = 0
        for character in stop:
            following = self._next[state].get(character)
            if following is None:
                following = len(self._next)
                self._next[state][character] = following
                self._next.append({})
                self._fail.append(0)
                self._depth.append(self._depth[state] + 1)
                self._stop.append(None)
            state = following
        self._stop[state] = stop

    def _link(self) -> None:
        """Breadth first: a state falls back to the longest proper end that also begins a stop."""
        waiting = deque(self._next[0].values())
        while waiting:
            state = waiting.popleft()
            for character, following in self._next[state].items():
                fallback = self._fail[state]
                while fallback and character not in self._next[fallback]:
                    fallback = self._fail[fallback]
                self._fail[following] = self._next[fallback].get(character, 0)
                if self._stop[following] is None:
                    self._stop[following] = self._stop[self._fail[following]]
                waiting.append(following)
