"""The machine under every tool format: a reader that waits, written as if all the text were there.

A format is a generator that reads character by character and yields where it needs more text. So
no decision can depend on where the text was cut: each is made on characters, not on pieces. What
a format has read since `mark` can still turn out to be no call; then it is content after all.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator
from typing import TypeVar

from octavo_engine.dialects.events import Arguments, CallBegun, Content, Event

T = TypeVar("T")
Steps = Generator[None, None, T]

MAX_NAME = 256  # characters in a function's name; what is longer is no call
_STRUCTURE = re.compile(r'["{}\[\]]')
_STRING = re.compile(r'["\\]')
_SPACE = " \t\r\n"
_SCALAR_END = frozenset(",}] \t\r\n")


class Machine:
    """One answer's parser. A format overrides `run`."""

    def __init__(self) -> None:
        self._text = ""  # from `_mark` on, at least
        self._at = 0
        self._mark = 0  # where what may still be content begins
        self._ended = False
        self._space = ""  # white space that belongs to the content only if content follows
        self._num_calls = 0
        self._after_call = False
        self._events: list[Event] = []
        self._steps: Steps[None] | None = self.run()

    def run(self) -> Steps[None]:
        """Reads the whole answer. What is left when it returns is content."""
        raise NotImplementedError

    def push(self, text: str) -> list[Event]:
        if text:
            if self._mark:
                self._text = self._text[self._mark :]
                self._at -= self._mark
                self._mark = 0
            self._text += text
            self._step()
        return self._take()

    def finish(self) -> list[Event]:
        self._ended = True
        self._step()
        if self._space and not self._after_call:
            self._events.append(Content(self._space))
        self._space = ""
        return self._take()

    def _step(self) -> None:
        if self._steps is not None:
            try:
                next(self._steps)
            except StopIteration:
                self._steps = None
        if self._steps is None:
            self.release(len(self._text))

    def _take(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    # ── reading ──

    def peek(self) -> Steps[str]:
        """The next character; empty at the end of the text."""
        while self._at >= len(self._text):
            if self._ended:
                return ""
            yield
        return self._text[self._at]

    def starts(self, *texts: str) -> Steps[str]:
        """Which of these comes next; it is not consumed. Empty: none of them."""
        while True:
            for text in texts:
                if self._text.startswith(text, self._at):
                    return text
            rest = len(self._text) - self._at
            if self._ended or not any(
                len(text) > rest and text.startswith(self._text[self._at :]) for text in texts
            ):
                return ""
            yield

    def accept(self, *texts: str) -> Steps[str]:
        """As `starts`, and consumes it."""
        found = yield from self.starts(*texts)
        self._at += len(found)
        return found

    def skip_space(self) -> Steps[None]:
        while (yield from self.peek()) and self._text[self._at] in _SPACE:
            self._at += 1

    def text_before(self, *ends: str, limit: int | None = None) -> Steps[str | None]:
        """The text up to the first of `ends`, which is not consumed. None: the end, or too long."""
        begin = self._at - self._mark  # more text moves both
        firsts = {end[0] for end in ends}
        while True:
            char = yield from self.peek()
            if not char or (limit is not None and self._at - self._mark - begin > limit):
                return None
            if char in firsts and (yield from self.starts(*ends)):
                return self._text[self._mark + begin : self._at]
            self._at += 1

    def string(self) -> Steps[str | None]:
        """A JSON string, decoded. None: it is none, or does not end."""
        raw = yield from self.captured()
        if raw is None or not raw.startswith('"'):
            return None
        try:
            value = json.loads(raw, strict=False)
        except (ValueError, RecursionError):
            return None
        return value if isinstance(value, str) else None

    def captured(self) -> Steps[str | None]:
        """One JSON value as it is written. None: the text ends inside it."""
        pieces: list[str] = []
        whole = yield from self.value(pieces.append)
        return "".join(pieces) if whole else None

    def value(self, take: Callable[[str], None]) -> Steps[bool]:
        """One JSON value, given to `take` as it comes; true if it is whole.

        Only brackets and quotes are looked at: what stands between them is the model's affair.
        """
        first = yield from self.peek()
        if first and first in '{["':
            return (yield from self._nested(take))
        begin = self._at - self._mark
        while (char := (yield from self.peek())) and char not in _SCALAR_END:
            self._at += 1
        scalar = self._text[self._mark + begin : self._at]
        take(scalar)
        return bool(scalar and char)

    def _nested(self, take: Callable[[str], None]) -> Steps[bool]:
        depth, in_string, escaped = 0, False, False
        while True:
            text, at = self._text, self._at
            while at < len(text):
                if escaped:
                    escaped = False
                    at += 1
                    continue
                match = (_STRING if in_string else _STRUCTURE).search(text, at)
                if match is None:
                    at = len(text)
                    break
                at = match.end()
                mark = match[0]
                if mark == '"':
                    in_string = not in_string
                elif mark == "\\":
                    escaped = True
                else:
                    depth += 1 if mark in "{[" else -1
                if depth <= 0 and not in_string and not escaped:
                    begin, self._at = self._at, at
                    take(text[begin:at])
                    return True
            begin, self._at = self._at, at
            take(text[begin:at])
            if self._ended:
                return False
            yield

    # ── telling ──

    def release(self, end: int) -> None:
        """All from the mark up to `end` is content."""
        if end > self._mark:
            self._content(self._text[self._mark : end])
        self._mark = end
        self._at = max(self._at, end)

    def give_back(self) -> None:
        """What was read since the mark is no call."""
        self.release(self._at)

    def keep(self) -> None:
        """What was read so far is settled: it is part of a call, or marks one."""
        self._mark = self._at

    def begin_call(self, name: str, id: str = "") -> None:
        self._space = ""
        self._after_call = True
        self._events.append(CallBegun(self._num_calls, name, id))
        self._num_calls += 1
        self.keep()

    def arguments(self, text: str) -> None:
        """Of the call that was begun last."""
        self.keep()
        if text:
            self._events.append(Arguments(self._num_calls - 1, text))

    def content_before(self, *markers: str) -> Steps[str]:
        """Emits all up to the first marker, which is consumed but not settled. Empty: the end."""
        while True:
            marker, at = earliest(self._text, self._at, markers)
            if marker or at == len(self._text) or self._ended:
                if not marker:
                    at = len(self._text)
                self._at = at
                self.give_back()
                if marker:
                    self._at = at + len(marker)
                    return marker
                if self._ended:
                    return ""
            else:  # a marker may have begun here
                self._at = at
                self.give_back()
            yield

    def _content(self, text: str) -> None:
        """White space next to a call is layout, not content; so it waits for what comes."""
        text = self._space + text
        self._space = ""
        if self._after_call:
            text = text.lstrip(_SPACE)
            if not text:
                return
            self._after_call = False
        shown = text.rstrip(_SPACE)
        self._space = text[len(shown) :]
        if shown:
            self._events.append(Content(shown))


def earliest(text: str, at: int, markers: tuple[str, ...]) -> tuple[str, int]:
    """The first marker at or after `at`, and where; else where one may have begun, or the end."""
    found, begin = "", len(text)
    for marker in markers:
        place = text.find(marker, at, begin + len(marker) - 1 if found else len(text))
        if place >= 0 and place < begin:
            found, begin = marker, place
    partial = begin
    for marker in markers:
        for length in range(min(len(marker) - 1, len(text) - at), 0, -1):
            place = len(text) - length
            if place < partial and marker.startswith(text[place:]):
                partial = place
                break
    return ("", partial) if partial < begin else (found, begin)
