"""What a model's text turns out to be, piece by piece."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Content:
    """Text meant for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text that the model wrote for itself."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """A tool call whose name is known; `id` only where the model names its calls itself."""

    index: int  # of the answer's calls, from 0
    name: str
    id: str = ""


@dataclass(frozen=True, slots=True)
class Arguments:
    """More of a call's arguments: JSON text as far as the model wrote JSON."""

    index: int
    text: str


Event = Content | Reasoning | CallBegun | Arguments


class Parser(Protocol):
    """Of one answer. However the text is cut, the joined events are the same; it never raises."""

    def push(self, text: str) -> list[Event]:
        """What is certain now. Hot path."""

    def finish(self) -> list[Event]:
        """The end of the text: what was held back comes out."""


def joined(events: list[Event]) -> list[Event]:
    """Adjacent events of one kind as one: the form in which two parses are compared."""
    result: list[Event] = []
    for event in events:
        last = result[-1] if result else None
        match last, event:
            case Content(text=before), Content(text=after):
                result[-1] = Content(before + after)
            case Reasoning(text=before), Reasoning(text=after):
                result[-1] = Reasoning(before + after)
            case Arguments(index=one, text=before), Arguments(index=other, text=after) if (
                one == other
            ):
                result[-1] = Arguments(one, before + after)
            case _:
                result.append(event)
    return result
