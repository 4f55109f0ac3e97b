"""Where an answer goes as it comes: as it is to a file or a pipe, styled to a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from octavo.chat.markdown import MarkdownStyler, printable
from octavo.styles import has_styles

if TYPE_CHECKING:
    from typing import TextIO


class AnswerPrinter(Protocol):
    def write(self, piece: str) -> None: ...
    def end(self) -> None:
        """Also after an answer that was cut short: the terminal is as it was before."""


def make_printer(out: TextIO, *, is_markdown: bool) -> AnswerPrinter:
    """A terminal never obeys what a model writes; NO_COLOR and TERM=dumb leave it unstyled."""
    if not out.isatty():
        return _Plain(out)
    return _Styled(out) if is_markdown and has_styles(out) else _Printable(out)


class _Plain:
    def __init__(self, out: TextIO) -> None:
        self._out = out

    def write(self, piece: str) -> None:
        self._out.write(piece)
        self._out.flush()

    def end(self) -> None:
        pass


class _Printable(_Plain):
    def write(self, piece: str) -> None:
        super().write(printable(piece))


class _Styled(_Plain):
    def __init__(self, out: TextIO) -> None:
        super().__init__(out)
        self._styler = MarkdownStyler()

    def write(self, piece: str) -> None:
        super().write(self._styler.feed(printable(piece)))

    def end(self) -> None:
        super().write(self._styler.finish())
