"""The examples of docs/python.md run as they stand, in their order, and print what they say."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import octavo

PAGE = Path(__file__).parents[2] / "docs" / "python.md"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
TOLD = re.compile(r"print\(.*\)  # → (.*)$", re.MULTILINE)


@pytest.mark.slow
def test_every_example_does_what_it_says(capsys):
    text = PAGE.read_text()
    blocks = list(BLOCK.finditer(text))
    assert len(blocks) == text.count("```python") >= 9
    names: dict[str, Any] = {"__name__": "example"}
    for block in blocks:
        # Padded, so that a traceback names the line of the page.
        source = "\n" * text.count("\n", 0, block.start(1)) + block[1]
        exec(compile(source, str(PAGE), "exec"), names)
        assert capsys.readouterr().out.splitlines() == TOLD.findall(block[1])


def test_every_public_name_is_on_the_page():
    text = PAGE.read_text()
    assert [name for name in octavo.__all__ if name not in text and name != "__version__"] == []
