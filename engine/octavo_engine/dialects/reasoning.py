"""Where a model's reasoning ends and its answer begins: tags at the head of the text."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from octavo_engine.dialects.events import Content, Event, Parser, Reasoning

if TYPE_CHECKING:
    from octavo_engine.dialects.tools import Tools

_SPACE = " \t\r\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningFormat:
    """The marks around reasoning. It stands at the head of an answer or not at all: what looks
    like a tag further on is text."""

    opens: tuple[str, ...]
    closes: tuple[str, ...]
    begins_open: bool = False  # also where neither prompt nor answer has the opening mark
    special: tuple[str, ...] = field(default=())  # marks that are control tokens
    reads_calls: bool = False  # its parser reads calls too

    def is_open_after(self, prompt: str) -> bool:
        """Whether an answer to this prompt, as it was rendered, begins inside reasoning."""
        end = prompt.rstrip(_SPACE)
        if end.endswith(self.opens):
            return True
        return self.begins_open and not end.endswith(self.closes)

    def is_open_inside(self, text: str) -> bool:
        """Whether an answer that goes on after this beginning of its own is inside reasoning."""
        begins = text.lstrip(_SPACE).startswith(self.opens)
        return begins and not any(mark in text for mark in self.closes)

    def parser(self, *, is_open: bool, tools: Tools | None) -> Splitter:
        """Of one answer. `tools`: those that may be called, for a parser that reads calls."""
        return ReasoningParser(self, is_open=is_open)


class Splitter(Parser, Protocol):
    """A Parser that separates reasoning from the rest."""

    @property
    def is_undecided(self) -> bool:
        """Whether the answer's head says too little yet."""

    # The character at which the answer proper begins, once it is known. A parser of calls in
    # reasoning that never ends sets it.
    ends_at: int | None


class ReasoningParser:
    """One answer's split. However the text is cut, the joined events are the same."""

    def __init__(self, format: ReasoningFormat, *, is_open: bool) -> None:
        self._format = format
        self._state = "head"  # then "inside" or "after"
        self._is_open = is_open
        self._marks = (*format.opens, *format.closes)
        self._held = ""
        self._fresh = True  # nothing of this part but white space yet
        self._num_read = 0
        self.ends_at: int | None = None

    @property
    def is_undecided(self) -> bool:
        return self._state == "head"

    def push(self, text: str) -> list[Event]:
        """Hot path."""
        self._num_read += len(text)
        if self._state == "after":
            return self._content(text) if self._fresh else [Content(text)] if text else []
        self._held += text
        return self._advance(ended=False)

    def finish(self) -> list[Event]:
        if self._state == "after":
            return []
        return self._advance(ended=True)

    def _advance(self, *, ended: bool) -> list[Event]:
        if self._state == "head" and not self._decide(ended=ended):
            return []
        if self._state == "after":
            text, self._held = self._held, ""
            return self._content(text) if self._fresh else [Content(text)] if text else []
        return self._inside(ended=ended)

    def _decide(self, *, ended: bool) -> bool:
        """Does it begin with reasoning? False: more text will show."""
        stripped = self._held.lstrip(_SPACE)
        for mark in self._format.opens:
            if stripped.startswith(mark):
                self._held = stripped[len(mark) :]
                self._state = "inside"
                return True
        if not ended and any(mark.startswith(stripped) for mark in self._marks):
            return False
        if self._is_open or stripped.startswith(self._format.closes):
            self._state = "inside"  # or reasoning that ends before it begins
        else:
            self._state = "after"
            self._fresh = False  # its white space is its own
            self.ends_at = 0
        return True

    def _inside(self, *, ended: bool) -> list[Event]:
        """Reasoning up to the first closing mark; white space before it is layout."""
        found = [(self._held.find(mark), mark) for mark in self._format.closes]
        found = [(place, mark) for place, mark in found if place >= 0]
        if found:
            place, mark = min(found)
            events = self._reasoning(self._held[:place].rstrip(_SPACE))
            rest = self._held[place + len(mark) :]
            self.ends_at = self._num_read - len(rest)
            self._held, self._state, self._fresh = "", "after", True
            return events + self._content(rest)
        keep = 0 if ended else self._open_end()
        shown, self._held = self._held[: len(self._held) - keep], self._held[-keep:] if keep else ""
        return self._reasoning(shown)

    def _open_end(self) -> int:
        """How many characters at the end may belong to a closing mark, or to the space before."""
        held = self._held
        partial = 0
        for mark in self._format.closes:
            for length in range(min(len(mark) - 1, len(held)), 0, -1):
                if held.endswith(mark[:length]):
                    partial = max(partial, length)
                    break
        before = held[: len(held) - partial]
        return partial + len(before) - len(before.rstrip(_SPACE))

    def _reasoning(self, text: str) -> list[Event]:
        if self._fresh:
            text = text.lstrip(_SPACE)
        if not text:
            return []
        self._fresh = False
        return [Reasoning(text)]

    def _content(self, text: str) -> list[Event]:
        """The answer after reasoning, without the space between the two."""
        text = text.lstrip(_SPACE)
        if not text:
            return []
        self._fresh = False
        return [Content(text)]
