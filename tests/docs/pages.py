"""The project's pages as what can be checked of them: fenced blocks, their marks, links.

A comment right above a block says what a test does with it:

    <!-- run -->               it is executed and must end well
    <!-- run: Paris -->        and print this
    <!-- start: URL -->        it is left running once URL answers
    <!-- save: FILE -->        it is a file that later blocks read
    <!-- cluster -->           it needs more than this machine; names and flags in it are checked
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
GENERATED = ("api.md", "errors.md", "llmdeployment.md", "models.md")
_FENCE = re.compile(
    r"^(?P<mark><!--[^\n]*-->\n)?^(?P<indent> *)```(?P<language>\w*)[^\n]*\n"
    r"(?P<text>.*?)^(?P=indent)```",
    re.M | re.S,
)


@dataclass(frozen=True, slots=True)
class Block:
    page: Path
    line: int
    language: str
    text: str
    mark: str = ""  # run, start, save, cluster, or nothing
    argument: str = ""

    @property
    def where(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def commands(self) -> list[str]:
        """Lines of shell, those that end in a backslash joined to the next, comments left out."""
        text = self.text.replace("\\\n", " ")
        lines = (line.removeprefix("$ ").strip() for line in text.splitlines())
        return [line for line in lines if line and not line.startswith("#")]


def pages() -> list[Path]:
    top = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")]
    return [*top, *sorted(path for path in DOCS.rglob("*.md") if "log" not in path.parts)]


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    found = []
    for match in _FENCE.finditer(text):
        inner = (match["mark"] or "").removeprefix("<!--").strip().removesuffix("-->").strip()
        mark, _, argument = inner.partition(":")
        line = text.count("\n", 0, match.start("text"))
        found.append(
            Block(page, line, match["language"], match["text"], mark.strip(), argument.strip())
        )
    return found


def prose(page: Path) -> str:
    """The page without its fenced blocks."""
    return _FENCE.sub("", page.read_text(encoding="utf-8"))


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))
