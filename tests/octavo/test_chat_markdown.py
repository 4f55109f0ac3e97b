"""Answers in Markdown on a terminal: styled as they come, each character printed once."""

from __future__ import annotations

import io
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.chat.markdown import MarkdownStyler, printable
from octavo.chat.printer import make_printer

STYLE = re.compile(r"\x1b\[[0-9;]*m")
MARKDOWN = st.text(st.sampled_from("ab1 .*_`~#->\n\\\t)"), max_size=60)


def styled(text: str, size: int = 1000) -> str:
    styler = MarkdownStyler()
    pieces = [styler.feed(text[at : at + size]) for at in range(0, len(text), size)]
    return "".join(pieces) + styler.finish()


def styles_of(text: str) -> dict[str, set[str]]:
    """Word → the styles it is printed in."""
    found: dict[str, set[str]] = {}
    style = ""
    for part in re.split(r"(\x1b\[[0-9;]*m)", styled(text)):
        if STYLE.fullmatch(part):
            style = part[2:-1].removeprefix("0").removeprefix(";")
        else:
            for word in part.split():
                found.setdefault(word, set()).update(style.split(";") if style else ())
    return found


@given(MARKDOWN)
def test_every_character_is_printed_once(text: str) -> None:
    assert STYLE.sub("", styled(text)) == text


@given(MARKDOWN, st.integers(1, 7))
def test_pieces_do_not_matter(text: str, size: int) -> None:
    assert styled(text, size) == styled(text)


@given(MARKDOWN)
def test_the_terminal_is_left_unstyled(text: str) -> None:
    changes = STYLE.findall(styled(text))
    assert not changes or changes[-1] == "\x1b[0m"


@pytest.mark.parametrize(
    ("text", "word", "styles"),
    [
        ("plain", "plain", set()),
        ("some **bold** text", "bold", {"1"}),
        ("some **bold** text", "text", set()),
        ("some *light* text", "light", {"3"}),
        ("***both***", "both", {"1", "3"}),
        ("use `code` here", "code", {"36"}),
        ("use `a * b` and c", "c", set()),
        ("## Title\nbody", "Title", {"1"}),
        ("## Title\nbody", "body", set()),
        ("#hashtag", "#hashtag", set()),
        ("- item", "-", {"36"}),
        ("12. item", "12.", {"36"}),
        ("2 * 3 * 4", "3", set()),
        ("snake_case_name", "snake_case_name", set()),
        (r"\*not\* light", "light", set()),
        ("```python\nx = 1\n```\nafter", "x", {"36"}),
        ("```python\nx = 1\n```\nafter", "```python", {"2"}),
        ("```python\nx = 1\n```\nafter", "after", set()),
        ("````\n```\nx\n````\nafter", "after", set()),
        ("~~~\n# no title\n~~~\n", "title", {"36"}),
        ("**open\nnext", "next", set()),
    ],
)
def test_words_and_their_styles(text: str, word: str, styles: set[str]) -> None:
    assert styles_of(text)[word] == styles


def test_words_are_not_held_back() -> None:
    styler = MarkdownStyler()
    assert [styler.feed(piece) for piece in ["Hel", "lo", " **", "wor"]] == [
        "Hel", "lo", " ", "\x1b[0;2m**\x1b[0;1mwor",
    ]  # fmt: skip


def test_control_characters_are_shown_and_not_obeyed() -> None:
    assert printable("a\x1b]0;title\x07b\x9b2J\tc\n") == "a␛]0;title␇b\ufffd2J\tc\n"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("out", "is_markdown", "no_color", "printed"),
    [
        (io.StringIO(), True, "", "**a**\x1b"),
        (Terminal(), True, "", "\x1b[0;2m**\x1b[0;1ma\x1b[0;2m**\x1b[0m␛"),
        (Terminal(), True, "1", "**a**␛"),
        (Terminal(), False, "", "**a**␛"),
    ],
)
def test_styles_are_for_terminals(
    monkeypatch: pytest.MonkeyPatch, out: io.StringIO, is_markdown: bool, no_color: str,
    printed: str,
) -> None:  # fmt: skip
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", no_color)
    printer = make_printer(out, is_markdown=is_markdown)
    printer.write("**a")
    printer.write("**\x1b")
    printer.end()
    assert out.getvalue() == printed
