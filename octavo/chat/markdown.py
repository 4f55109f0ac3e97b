"""Markdown that comes in pieces, styled for a terminal. Pure: text in, text with styles out.

Every character of the answer is printed, markers too, only dimmed: what is copied out of the
terminal is what the model wrote. A piece is held back no longer than until it is clear what it is.
"""

from __future__ import annotations

import re
from typing import Final

RESET: Final = "\x1b[0m"
_BOLD, _DIM, _ITALIC, _CYAN = "1", "2", "3", "36"
_FENCE: Final = re.compile(r" {0,3}(```+(?![^\n]*`)|~~~+)")
_HEADING: Final = re.compile(r" {0,3}#{1,6}(?=[ \t])")
_ITEM: Final = re.compile(r"[ \t]*(?:[-+*]|\d{1,9}[.)]|>)(?=[ \t])")
# What a line may begin with and still become one of the above.
_UNDECIDED: Final = re.compile(r"[ \t]*(?:#{1,6}|`{1,2}|~{1,2}|[-+*>]|\d{1,9}[.)]?)?")
_MARKERS: Final = re.compile(r"\\.|\*+|_+|`+|\n", re.DOTALL)
_CONTROLS: Final = {
    code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"
} | dict.fromkeys((127, *range(128, 160)), 65533)


def printable(text: str) -> str:
    """Without what a terminal would obey: an answer may not move the cursor or set the title."""
    return text.translate(_CONTROLS)


class MarkdownStyler:
    """`feed` each piece, `finish` at the end or where the answer is cut short."""

    def __init__(self) -> None:
        self._pending = ""
        self._at_line_start = True
        self._fence = ""  # the marker that the code block began with
        self._span = ""  # the backticks that the code span began with
        self._styles: list[str] = []  # of headings and emphasis that are open
        self._last = "\n"  # the character before the pending ones
        self._shown = ""  # the style that the terminal is in

    def feed(self, text: str) -> str:
        return self._take(text, is_last=False)

    def finish(self) -> str:
        return self._take("", is_last=True) + self._styled("", ())

    def _take(self, text: str, *, is_last: bool) -> str:
        self._pending += text
        out: list[str] = []
        while self._pending:
            taken = self._line_start(is_last) if self._at_line_start else self._inline(is_last)
            if taken is None:
                break
            out.append(taken)
        return "".join(out)

    def _line_start(self, is_last: bool) -> str | None:
        """The marker that a line begins with, if it has one; None where more must come."""
        text = self._pending
        if not is_last and _UNDECIDED.fullmatch(text):
            return None
        fence = _FENCE.match(text)
        if self._fence:
            closes = fence is not None and fence[1].startswith(self._fence)
            if closes and "\n" not in text and not is_last:
                return None
            self._at_line_start = False
            if closes:
                self._fence = ""
                return self._whole_line(_DIM)
            return ""
        self._at_line_start = False
        if fence is not None:
            if "\n" not in text and not is_last:
                self._at_line_start = True  # the language comes with the rest of the line
                return None
            self._fence = fence[1]
            return self._whole_line(_DIM)
        if heading := _HEADING.match(text):
            self._styles = [_BOLD]
            return self._emit(heading.end(), (_DIM,))
        if item := _ITEM.match(text):
            return self._emit(item.end(), (_CYAN,))
        return ""

    def _whole_line(self, style: str) -> str:
        end = self._pending.find("\n") + 1 or len(self._pending)
        self._at_line_start = self._pending[end - 1] == "\n"
        return self._emit(end, (style,))

    def _inline(self, is_last: bool) -> str | None:
        text = self._pending
        if self._fence:
            end = text.find("\n") + 1
            self._at_line_start = end > 0
            return self._emit(end or len(text), (_CYAN,))
        found = _MARKERS.search(text)
        if found is None:
            keep = 0 if is_last else text.endswith("\\")
            return self._emit(len(text) - keep, self._style()) if len(text) > keep else None
        if found.start():
            return self._emit(found.start(), self._style())
        marker = found[0]
        if marker == "\n":
            self._styles, self._span, self._at_line_start = [], "", True
            return self._emit(1, ())
        if found.end() == len(text) and marker[0] != "\\" and not is_last:
            return None  # the run may go on, and what follows decides what it means
        return self._marker(marker, text[found.end() : found.end() + 1])

    def _marker(self, marker: str, following: str) -> str:
        size = len(marker)
        if marker[0] == "`":
            if self._span not in ("", marker):
                return self._emit(size, self._style())
            self._span = "" if self._span else marker
            return self._emit(size, (_DIM,))
        if marker[0] == "\\" or self._span or size > 3:
            return self._emit(size, self._style())
        wanted = [_ITALIC, _BOLD, _BOLD + ";" + _ITALIC][size - 1]
        is_word = marker[0] == "_"  # snake_case is no emphasis
        if wanted in self._styles:
            is_emphasis = not self._last.isspace() and not (is_word and following.isalnum())
            if is_emphasis:
                self._styles.remove(wanted)
        else:
            is_emphasis = bool(following.strip()) and not (is_word and self._last.isalnum())
            if is_emphasis:
                self._styles.append(wanted)
        return self._emit(size, (_DIM,) if is_emphasis else self._style())

    def _style(self) -> tuple[str, ...]:
        return (*self._styles, _CYAN) if self._span else tuple(self._styles)

    def _emit(self, size: int, style: tuple[str, ...]) -> str:
        text, self._pending = self._pending[:size], self._pending[size:]
        self._last = text[-1:] or self._last
        return self._styled(text, style)

    def _styled(self, text: str, style: tuple[str, ...]) -> str:
        wanted = ";".join(style)
        if wanted == self._shown or not (text or self._shown):
            return text
        self._shown = wanted
        return f"\x1b[0;{wanted}m{text}" if wanted else RESET + text
