"""A chat's answer as a list of parts in the order it was said: reasoning, texts, tool calls.

For protocols whose answers are such lists. However the deltas are cut, the parts are the same.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from octavo_engine.dialects.events import Arguments, CallBegun, Content, Event, Reasoning
from octavo_engine.server.openai.chat.session import ChatToken

if TYPE_CHECKING:
    from octavo_engine.core.text.logprobs import DecodedLogprobs
    from octavo_engine.server.openai.chat.session import ChoiceDelta

Kind = Literal["reasoning", "text", "call"]


@dataclass(slots=True)
class ChatPart:
    """It grows until it has ended; the next begins only then."""

    index: int
    kind: Kind
    text: str = ""  # of a call, its arguments
    name: str = ""
    call_id: str = ""
    logprobs: list[DecodedLogprobs] = field(default_factory=list)  # of the tokens of a text


@dataclass(frozen=True, slots=True)
class PartStarted:
    part: ChatPart


@dataclass(frozen=True, slots=True)
class PartDelta:
    part: ChatPart
    text: str
    logprobs: list[DecodedLogprobs]


@dataclass(frozen=True, slots=True)
class PartEnded:
    part: ChatPart


Step = PartStarted | PartDelta | PartEnded


class ChatParts:
    """Of one answer."""

    def __init__(self) -> None:
        self.parts: list[ChatPart] = []
        self._open: ChatPart | None = None
        self._logprobs: list[DecodedLogprobs] = []  # of tokens whose text is still to come

    def read(self, delta: ChoiceDelta) -> list[Step]:
        """Hot path: once per delta."""
        steps: list[Step] = []
        for event in delta.events or [Content(delta.content)]:
            self._take(event, steps)
        return steps

    def end(self) -> list[Step]:
        steps: list[Step] = []
        if self._open is not None and self._open.kind == "text" and self._logprobs:
            self._add(self._open, "", steps)  # of the token that ends the answer
        self._close(steps)
        return steps

    def nothing(self) -> list[Step]:
        """An empty text: for protocols that want something of every answer."""
        steps: list[Step] = []
        self._begin(ChatPart(len(self.parts), "text"), steps)
        self._close(steps)
        return steps

    @property
    def has_calls(self) -> bool:
        return any(part.kind == "call" for part in self.parts)

    def _take(self, event: Event | ChatToken, steps: list[Step]) -> None:
        match event:
            case ChatToken(entry):
                self._logprobs.append(entry)
            case Content(text=text):
                if text:
                    part = self._within("text", steps)
                    if not part.text:
                        self._forget_marks(text)
                    self._add(part, text, steps)
            case Reasoning(text=text):
                if text:
                    self._logprobs = []  # they belong to texts only
                    self._add(self._within("reasoning", steps), text, steps)
            case CallBegun(name=name, id=id):
                self._logprobs = []
                self._close(steps)
                self._begin(ChatPart(len(self.parts), "call", name=name, call_id=id), steps)
            case Arguments(text=text):
                # Formats write one call after the other: it is the one that began last.
                self._logprobs = []
                if text and self._open is not None and self._open.kind == "call":
                    self._add(self._open, text, steps)

    def _within(self, kind: Kind, steps: list[Step]) -> ChatPart:
        if self._open is not None and self._open.kind == kind:
            return self._open
        self._close(steps)
        return self._begin(ChatPart(len(self.parts), kind), steps)

    def _forget_marks(self, text: str) -> None:
        """Of the tokens before a text's first piece, those that wrote a mark are not its own."""
        left = len(text.encode(errors="replace"))
        first = len(self._logprobs)
        while first and left > 0:
            first -= 1
            left -= len(self._logprobs[first].bytes)
        del self._logprobs[:first]

    def _begin(self, part: ChatPart, steps: list[Step]) -> ChatPart:
        self._open = part
        self.parts.append(part)
        steps.append(PartStarted(part))
        return part

    def _add(self, part: ChatPart, text: str, steps: list[Step]) -> None:
        part.text += text
        part.logprobs += self._logprobs
        steps.append(PartDelta(part, text, self._logprobs))
        self._logprobs = []

    def _close(self, steps: list[Step]) -> None:
        if self._open is not None:
            steps.append(PartEnded(self._open))
            self._open = None
