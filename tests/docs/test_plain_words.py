"""Texts that users read are plain English: without the words in plain_words.WORDS."""

from __future__ import annotations

import re

import pytest

from octavo.cli import COMMANDS
from tests.docs.pages import ROOT
from tests.docs.plain_words import help_of, raised_strings, texts, words_in

SOURCE_ROOTS = (
    "common", "engine", "router", "operator", "octavo", "csrc", "charts/sources", "benchmarks",
    "release", "images", "examples", "e2e", "tests/fakes",
)  # fmt: skip
# Names that clients and stored objects have.
STAYS = re.compile(r'octavo\.dev/asked|\basked_revision\b|"told"')


def test_private_words_are_found():
    assert words_in("Nobody tells;\nnobody was asked\nfor it.") == ["asked for", "nobody", "tells"]
    assert words_in("The newsletter foretells nothing.") == []


def test_strings_of_raise_statements_are_found():
    source = 'text = "told"\nif text:\n    raise ValueError(f"{text} tells", param="n") from None\n'
    assert raised_strings(source) == [" tells", "n"]


def test_every_kind_of_text_is_read():
    read = {name: text() for name, text in texts().items()}
    assert "Kubernetes" in read["README.md"]
    assert all(read[f"octavo {command} --help"].startswith("usage:") for command in COMMANDS)
    assert "--port" in help_of("serve")
    assert "method_not_allowed" in read["octavo_engine.server.http.errors.CATALOGUE"]
    assert sum(bool(text) for name, text in read.items() if name.endswith(".py")) > 50


@pytest.mark.parametrize("name", sorted(name for name in texts() if not name.endswith(".py")))
def test_texts_have_no_private_words(name: str):
    assert words_in(texts()[name]()) == [], "use plain words"


def test_errors_have_no_private_words():
    found = {name: words_in(text()) for name, text in texts().items() if name.endswith(".py")}
    assert {name: words for name, words in found.items() if words} == {}, "use plain words"


@pytest.mark.parametrize("root", SOURCE_ROOTS)
def test_sources_request_and_report(root: str):
    """Nothing is asked and nothing is told: one word each for what is sent, and for what comes."""
    files = [f for f in (ROOT / root).rglob("*") if f.suffix in (".py", ".pyi", ".cpp", ".h")]
    read = {file: file.read_text(encoding="utf-8") for file in files}
    lines = {
        f"{file.relative_to(ROOT)}:{number}": line.strip()
        for file, text in read.items()
        if re.search("asked|told", text, re.I)
        for number, line in enumerate(text.splitlines(), start=1)
        if re.search(r"\b(asked|told)\b|(asked|told)_|_(asked|told)\b", STAYS.sub("", line), re.I)
        and not re.search(r"masked_|_?unasked|_masked", line)
    }
    assert files and lines == {}
