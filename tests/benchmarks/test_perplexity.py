"""Perplexities go on where a run was stopped, and rows are chosen by name."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest

from benchmarks.perplexity import Part, Results, chosen

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PARTS = [Part(-2.0, 3, False), Part(-4.0, 3, False), Part(-1.0, 1, True)]
EXPECTED = (math.exp(1), 7)


class Stopped(Exception):
    pass


class Measured:
    """Windows of a text, of which a run reads so many before it is stopped."""

    def __init__(self, until: int = len(PARTS)) -> None:
        self.begun_at: list[int] = []
        self._until = until

    def __call__(self, first: int) -> Iterator[Part]:
        self.begun_at.append(first)
        yield from PARTS[first : self._until]
        if self._until < len(PARTS):
            raise Stopped


def test_a_stopped_run_goes_on_with_the_next_window(tmp_path: Path) -> None:
    path = tmp_path / "out" / "results.jsonl"
    with pytest.raises(Stopped):
        Results(path, ["model"]).perplexity("int8", Measured(until=2))
    rest = Measured()
    assert Results(path, ["model"]).perplexity("int8", rest) == EXPECTED
    assert rest.begun_at == [2]
    none = Measured()
    assert Results(path, ["model"]).perplexity("int8", none) == EXPECTED
    assert none.begun_at == []


def test_another_row_or_model_is_measured(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    Results(path, ["model"]).perplexity("int8", Measured())
    for model, name in (("model", "int4"), ("another", "int8")):
        measured = Measured()
        assert Results(path, [model]).perplexity(name, measured) == EXPECTED
        assert measured.begun_at == [0]


def test_without_a_file_nothing_is_kept() -> None:
    for _ in range(2):
        measured = Measured()
        assert Results(None, ["model"]).perplexity("int8", measured) == EXPECTED
        assert measured.begun_at == [0]


def test_chosen_rows_are_beside_the_first() -> None:
    names = ["float32", "gptq 4, g128", "gptq 3, g128", "nvfp4"]
    assert chosen(names, []) == names
    assert chosen(names, ["GPTQ", "float32"]) == names[:3]
    with pytest.raises(SystemExit, match="no row is called 'int9'; there are: float32; gptq 4"):
        chosen(names, ["int9"])
