"""Harmony, as gpt-oss writes it: messages on channels, which are reasoning, answer or calls.

    <|channel|>analysis<|message|>…<|end|>                             reasoning
    <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>…<|call|>
    <|start|>assistant<|channel|>final<|message|>…<|return|>           the answer

The prompt ends with `<|start|>assistant`. Reasoning and calls are parts of one notation, so one
parser reads both.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from octavo_engine.dialects.events import Arguments, CallBegun, Content, Event, Reasoning
from octavo_engine.dialects.reasoning import ReasoningFormat

if TYPE_CHECKING:
    from octavo_engine.dialects.tools import Tools

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
# A message that is not ended is over all the same where the next one begins.
_AFTER_BODY = (*_ENDS, START, CHANNEL)
SPECIAL = (START, CHANNEL, MESSAGE, "<|constrain|>", *_ENDS)

_HEADS = (START, CHANNEL, MESSAGE, "to=")
_MAX_HEADER = 512  # characters; what is longer is text
_CHANNEL = re.compile(r"<\|channel\|>\s*([a-z]*)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_FUNCTIONS = "functions."

_Kind = Literal["content", "reasoning", "call"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HarmonyFormat(ReasoningFormat):
    """Reasoning on a channel of its own, anywhere in the answer."""

    reads_calls: bool = True

    def is_open_after(self, prompt: str) -> bool:
        return prompt.rstrip().endswith(START + "assistant")

    def is_open_inside(self, text: str) -> bool:
        return False  # what goes on is a final message

    def parser(self, *, is_open: bool, tools: Tools | None) -> HarmonyParser:
        return HarmonyParser(is_open=is_open, tools=tools)


@dataclass(frozen=True, slots=True)
class HarmonyCalls:
    """The same where only calls were requested by name."""

    def parser(self, tools: Tools) -> HarmonyParser:
        return HarmonyParser(is_open=True, tools=tools)


HARMONY = HarmonyFormat(
    opens=(f"{CHANNEL}analysis{MESSAGE}",), closes=(f"{CHANNEL}final{MESSAGE}",), special=SPECIAL
)


class HarmonyParser:
    """One answer's. Without `tools` no call is read: what would be one is reasoning."""

    def __init__(self, *, is_open: bool, tools: Tools | None) -> None:
        self._tools = tools
        # What is said before calls is meant for the user; where none are read, an answer that must
        # have a shape has room for nothing else.
        self._thoughts = ("analysis", "commentary") if tools is None else ("analysis",)
        self._held = ""
        self._in_header = is_open  # else inside a message's body
        self._kind: _Kind = "content"
        self._said: set[_Kind] = set()  # kinds that had text in an earlier message
        self._num_calls = 0
        self._num_read = 0
        self._is_fresh = True  # no text of this message yet
        self.is_undecided = is_open
        self.ends_at: int | None = None if is_open else 0

    def push(self, text: str) -> list[Event]:
        """Hot path."""
        self._num_read += len(text)
        self._held += text
        return self._advance(ended=False)

    def finish(self) -> list[Event]:
        events = self._advance(ended=True)
        if not self._in_header:
            events += self._end()
        return events

    def _advance(self, *, ended: bool) -> list[Event]:
        events: list[Event] = []
        while self._held:
            if self._in_header:
                if not self._header(events, ended=ended):
                    break
            elif not self._body(events, ended=ended):
                break
        return events

    def _header(self, events: list[Event], *, ended: bool) -> bool:
        """False: more text is needed."""
        held = self._held
        place = held.find(MESSAGE)
        if 0 <= place <= _MAX_HEADER and _begins_header(held):
            self._held = held[place + len(MESSAGE) :]
            self._begin(held[:place], events)
            return True
        if not ended and len(held) <= _MAX_HEADER + len(MESSAGE) and _begins_header(held):
            return False
        if ended and (not held.strip() or held.lstrip().startswith(_HEADS)):
            self._held = ""  # cut inside a header, or layout: it makes no event
            return False
        self._begin("", events)  # no header, so text
        text = held.lstrip()
        if text.startswith((START, CHANNEL)):  # which the body would take for the next header
            said = len(held) - len(text) + 1
            self._held = held[said:]
            self._say(held[:said], events)
        return True

    def _begin(self, header: str, events: list[Event]) -> None:
        """A message's body comes next."""
        channel = _CHANNEL.search(header)
        recipient = _RECIPIENT.search(header)
        name = self._function(recipient[1]) if recipient else ""
        self._in_header = False
        self._is_fresh = True
        if name:
            self._kind = "call"
            events.append(CallBegun(self._num_calls, name))
            self._num_calls += 1
        elif recipient or (channel and channel[1] in self._thoughts):
            self._kind = "reasoning"
        else:
            self._kind = "content"
        self.is_undecided = False
        if self._kind != "reasoning" and self.ends_at is None:
            self.ends_at = self._num_read - len(self._held)

    def _function(self, recipient: str) -> str:
        """Of the client's functions the one that is meant; empty for the model's own tools."""
        if self._tools is None:
            return ""
        if recipient.startswith(_FUNCTIONS):
            return recipient.removeprefix(_FUNCTIONS)
        return recipient if recipient in self._tools else ""

    def _body(self, events: list[Event], *, ended: bool) -> bool:
        held = self._held
        found = [(place, mark) for mark in _AFTER_BODY if (place := held.find(mark)) >= 0]
        if not found:
            keep = 0 if ended else _partial(held)
            self._held = held[len(held) - keep :]
            self._say(held[: len(held) - keep], events)
            return False
        place, mark = min(found)
        self._say(held[:place], events)
        self._held = held[place + len(mark) :] if mark in _ENDS else held[place:]
        events += self._end()
        self._in_header = True
        return True

    def _say(self, text: str, events: list[Event]) -> None:
        if not text:
            return
        if self._is_fresh and self._kind in self._said:
            text = "\n" + text  # a further message of its kind
        self._is_fresh = False
        match self._kind:
            case "content":
                events.append(Content(text))
            case "reasoning":
                events.append(Reasoning(text))
            case "call":
                events.append(Arguments(self._num_calls - 1, text))

    def _end(self) -> list[Event]:
        """The message is over."""
        if self._kind == "call":
            return [Arguments(self._num_calls - 1, "{}")] if self._is_fresh else []
        if not self._is_fresh:
            self._said.add(self._kind)
        return []


def _begins_header(held: str) -> bool:
    """Whether this is the beginning of a header, as far as is known."""
    text = held.lstrip()
    return text.startswith(_HEADS) or any(head.startswith(text) for head in _HEADS)


def _partial(held: str) -> int:
    """How many characters at the end may be the beginning of a mark."""
    place = held.rfind("<")
    if place < 0:
        return 0
    tail = held[place:]
    return len(tail) if any(mark.startswith(tail) for mark in _AFTER_BODY) else 0
