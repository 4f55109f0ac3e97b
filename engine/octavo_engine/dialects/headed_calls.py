"""Calls written as a heading with the name, then the arguments: DeepSeek, Kimi and their like."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo_engine.dialects.machine import MAX_NAME, Machine, Steps

if TYPE_CHECKING:
    from collections.abc import Callable

    from octavo_engine.dialects.tools import Tools


def plain_name(heading: str) -> tuple[str, str]:
    """(name, id) where the heading is the name."""
    return heading.strip(), ""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadedCalls:
    """The marks around a section of calls, a call, its heading and its arguments."""

    section: str = ""
    section_end: str = ""
    call: str
    heading_end: str
    arguments_end: str = ""  # such as a code fence's
    call_end: str
    named: Callable[[str], tuple[str, str]] = plain_name

    @property
    def begins(self) -> tuple[str, ...]:
        return tuple(mark for mark in (self.section, self.call) if mark)

    def parser(self, tools: Tools) -> HeadedCallsParser:
        return HeadedCallsParser(self)


class HeadedCallsParser(Machine):
    """Arguments come out as they are written."""

    def __init__(self, format: HeadedCalls) -> None:
        self._format = format
        super().__init__()

    def run(self) -> Steps[None]:
        format = self._format
        while marker := (yield from self.content_before(*format.begins)):
            if marker == format.call:
                yield from self._call()
            else:
                yield from self._section()

    def _section(self) -> Steps[None]:
        format = self._format
        while True:
            yield from self.skip_space()
            if not (yield from self.accept(format.call)):
                break
            if not (yield from self._call()):
                return
        if (yield from self.accept(format.section_end)) and self._after_call:
            self.keep()
        else:
            self.give_back()

    def _call(self) -> Steps[bool]:
        """One call, after its first mark. False: it is none, and content now."""
        format = self._format
        heading = yield from self.text_before(format.heading_end, limit=MAX_NAME)
        name, id = format.named(heading) if heading is not None else ("", "")
        if not name:
            self.give_back()
            return False
        self._at += len(format.heading_end)
        yield from self.skip_space()
        if (yield from self.starts(format.call_end)):
            self.begin_call(name, id)
            self.arguments("{}")
        elif (yield from self.peek()) in ("{", "["):
            self.begin_call(name, id)
            if not (yield from self.value(self.arguments)):
                return False
        else:
            self.give_back()
            return False
        for end in (format.arguments_end, format.call_end):
            if end:
                yield from self.skip_space()
                if (yield from self.accept(end.strip())):
                    self.keep()
        return True
