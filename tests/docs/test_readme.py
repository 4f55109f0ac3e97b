"""README stays short, and its figures are those of the page that says how they were measured."""

from __future__ import annotations

import html
import re
import socket
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from octavo.cli import COMMANDS
from tests.docs.pages import DOCS, ROOT
from tests.fakes.process import environment

if TYPE_CHECKING:
    from pathlib import Path

MOST_LINES = 120


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= MOST_LINES


def test_the_chart_has_the_measured_figures():
    chart = (DOCS / "images" / "speed.svg").read_text()
    figures = re.findall(r">([\d,]+) tok/s<", chart)
    assert len(figures) == 10
    page = (DOCS / "performance.md").read_text()
    for figure in figures:
        assert f" {figure} tok/s" in page, figure


def test_figures_stand_under_a_chart_and_beside_no_targets():
    page = (DOCS / "performance.md").read_text()
    assert "](images/speed.svg)" in page
    headers = re.findall(r"^\|(.*)\|\n\|-", page, re.M)
    assert headers
    assert not [header for header in headers if "target" in header.lower()]


def test_the_bars_are_as_long_as_the_figures_say():
    chart = (DOCS / "images" / "speed.svg").read_text()
    bars = re.findall(r'width="(\d+)" height="17".*?>(\d+) tok/s<', chart)
    assert len(bars) == 10
    scale = {int(width) / int(figure) for width, figure in bars}
    assert max(scale) - min(scale) < 0.01


ANSWER = "The capital of France is Paris."


def walk_of(file: Path) -> tuple[list[str], list[float]]:
    """The lines of a recorded walk, and when each appears."""
    found = re.findall(r'delay:([\d.]+)s">(.*)</text>', file.read_text())
    return [html.unescape(text) for _, text in found], [float(at) for at, _ in found]


def check_walk(file: Path) -> None:
    lines, times = walk_of(file)
    typed = [line.split()[1:3] for line in lines if line.startswith("$ ")]
    assert [name for _, name in typed] == ["up", "chat", "status", "down"]
    assert all(program == "octavo" and name in COMMANDS for program, name in typed)
    requested = next(row for row, line in enumerate(lines) if line.startswith("$ octavo chat"))
    assert lines[requested + 1] == ANSWER
    assert any(line.split() == ["smollm2", "2/2", "ready"] for line in lines)
    assert lines[-1] == "stopped"
    assert times == sorted(times)
    assert times[-1] < 30.0, "too long to watch"


def test_readme_shows_a_recorded_walk():
    assert "](docs/images/walk.svg)" in (ROOT / "README.md").read_text()
    check_walk(DOCS / "images" / "walk.svg")


@pytest.mark.slow
def test_the_walk_can_be_recorded_again(tmp_path):
    file = tmp_path / "walk.svg"
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    subprocess.run(
        [sys.executable, DOCS / "images" / "record_walk.py", "--to", file, "--port", str(port)],
        env=environment(), check=True, timeout=120,
    )  # fmt: skip
    check_walk(file)
