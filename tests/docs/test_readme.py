"""README stays short, and its figures are those of the page that says how they were measured."""

from __future__ import annotations

import re

from tests.docs.pages import DOCS, ROOT

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


def test_the_bars_are_as_long_as_the_figures_say():
    chart = (DOCS / "images" / "speed.svg").read_text()
    bars = re.findall(r'width="(\d+)" height="17".*?>(\d+) tok/s<', chart)
    assert len(bars) == 10
    scale = {int(width) / int(figure) for width, figure in bars}
    assert max(scale) - min(scale) < 0.01
