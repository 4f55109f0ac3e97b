"""No regular expression of the shipped sources takes exponential or cubic time.

Quadratic is what any search of this kind may take; texts of strangers are bounded where they come
in.
"""

from __future__ import annotations

import ast
import re
import time
from functools import cache
from pathlib import Path
from typing import Final

import pytest

from tests.tools.source_trees import parsed_source

ROOT: Final = Path(__file__).resolve().parent.parent
SOURCES: Final = ("common", "engine", "router", "operator", "octavo")
CALLS: Final = {"compile", "match", "fullmatch", "search", "sub", "subn", "split", "findall",
                "finditer"}  # fmt: skip
CALL: Final = re.compile(rf"\bre\.({'|'.join(sorted(CALLS))})\(")
LENGTH: Final = 1200
BOUND_S: Final = 0.3  # a quadratic expression takes a hundredth of it, a cubic one seconds
# What texts repeat: what the expressions of parsers are about, and their parts.
PIECES: Final = (
    "a", "A", "0", " ", "\t", "\n", "\r\n", ".", "-", "_", "/", "\\", '"', "'", "<", ">", "{", "}",
    "(", ")", "[", "]", ",", ":", ";", "=", "#", "%", "&", "|", "*", "+", "?", "!", "@", "$", "^",
    "~", "`", "é", "中", "a.", "a-", "a ", "a:", "a=", '\\"', "a,", "0.", "0e", "<a", "{}", "[[",
    "a/", "../", "://", "**", "``", "a\n", " \n", "<|", "|>",
)  # fmt: skip


@cache
def files() -> list[str]:
    """Those that call any of it; which patterns they hold is for the tests: parsing takes time."""
    return [
        str(path.relative_to(ROOT))
        for root in SOURCES
        for path in sorted((ROOT / root).rglob("*.py"))
        if CALL.search(path.read_text(encoding="utf-8"))
    ]


def patterns(file: str) -> list[tuple[str, int]]:
    """Literal expressions of a file, with their flags where those are literal."""
    found = map(literal, ast.walk(parsed_source(ROOT / file)))
    return [pattern for pattern in found if pattern is not None]


def literal(node: ast.AST) -> tuple[str, int] | None:
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
        return None
    of = node.func.value
    if not (isinstance(of, ast.Name) and of.id == "re" and node.func.attr in CALLS and node.args):
        return None
    first = node.args[0]
    if not (isinstance(first, ast.Constant) and isinstance(first.value, str | bytes)):
        return None
    text = first.value.decode("latin-1") if isinstance(first.value, bytes) else first.value
    named = " ".join(ast.unparse(part) for part in (*node.args[1:], *node.keywords))
    flags = sum(
        int(getattr(re, name))
        for name in ("VERBOSE", "DOTALL", "MULTILINE", "IGNORECASE", "ASCII")
        if f"re.{name}" in named or f"re.{name[0]} " in f"{named} "
    )
    return text, flags


def seconds(pattern: re.Pattern[str], text: str) -> float:
    """Of the slowest way in which expressions are used."""
    began_at = time.process_time()
    pattern.search(text)
    pattern.fullmatch(text)
    return time.process_time() - began_at


@pytest.mark.parametrize("file", files())
def test_no_expression_takes_long_for_a_text_that_repeats_a_piece(file: str):
    slow = []
    for source, flags in patterns(file):
        pattern = re.compile(source, flags)
        literals = re.findall(r"[A-Za-z<>|]{2,}", source)
        for piece in (*PIECES, *literals):
            text = (piece * (LENGTH // len(piece) + 1))[:LENGTH]
            texts = (text, text + "\0", f"x{text}\0")
            if any(seconds(pattern, ends) > BOUND_S for ends in texts):
                slow.append((source, piece))
    assert slow == []


def test_one_that_takes_long_is_found():
    assert seconds(re.compile(r"(?:a|a)*b"), "a" * 23) > BOUND_S
    assert sum(len(patterns(file)) for file in files()) > 100
