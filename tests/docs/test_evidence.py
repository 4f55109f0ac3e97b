"""Tests and benchmarks that the pages name as evidence exist, with the functions named."""

from __future__ import annotations

import ast
import re
from functools import cache
from typing import TYPE_CHECKING

import pytest

from tests.docs.pages import DOCS, ROOT, name, prose

if TYPE_CHECKING:
    from pathlib import Path

# Page -> the folder below which its paths begin, where they do not begin at the root.
PAGES = {"reliability.md": "", "threat-model.md": "", "router-failures.md": "tests/router"}
_SPAN = re.compile(r"`([\w./-]+\.(?:py|json|sh|md))(?:::(\w+))?`")


def evidence(text: str) -> list[tuple[str, str]]:
    """(path, function or nothing) of each code span that names a file."""
    return _SPAN.findall(text)


def resolve(path: str, base: str) -> Path:
    """Where a path of a page is: below its folder, or else at the root."""
    below = ROOT / base / path
    return below if below.exists() else ROOT / path


@cache
def functions_of(path: Path) -> frozenset[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, functions))


def missing(text: str, base: str = "") -> list[str]:
    """What a page names and the tree does not have."""
    absent = []
    for path, function in evidence(text):
        file = resolve(path, base)
        if not file.is_file():
            absent.append(path)
        elif function and function not in functions_of(file):
            absent.append(f"{path}::{function}")
    return absent


def test_what_does_not_exist_is_found():
    page = "| a | `tests/docs/pages.py::prose`, `tests/docs/pages.py::nothing`, `no/such.py` |"
    assert missing(page) == ["tests/docs/pages.py::nothing", "no/such.py"]
    assert missing("`test_server.py`", "tests/router") == []


@pytest.mark.parametrize(("page", "base"), PAGES.items())
def test_named_tests_and_benchmarks_exist(page: str, base: str):
    text = _text(page)
    assert len(evidence(text)) > 20, name(DOCS / page)
    assert missing(text, base) == []


@pytest.mark.parametrize("page", ["reliability.md", "threat-model.md"])
def test_each_row_of_a_case_or_an_attack_names_its_evidence(page: str):
    """The last column of tables whose heading says so."""
    tables = re.findall(
        r"^\|.*\| (?:evidence|test) \|\n\|[-|]+\|\n((?:\|.*\n)+)", _text(page), re.M
    )
    rows = [row for table in tables for row in table.splitlines()]
    assert len(rows) > 40
    assert [row for row in rows if not evidence(row.strip("|").split(" | ")[-1])] == []


def _text(page: str) -> str:
    return prose(DOCS / page)
