"""What was measured, kept in a file line by line, and the table of it."""

from __future__ import annotations

import json
import statistics
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

LEAST_GAIN = 0.98  # what speculation may cost where it does not pay


class Run(NamedTuple):
    """Some requests, answered."""

    seconds: float
    processor_s: float | None  # of this process; None: it was another's
    num_tokens: int
    num_steps: int | None
    num_drafts: int  # steps of a sequence that had drafts
    num_accepted: int
    token_ids: list[list[int]]  # of the answers; empty where they are not known

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds


class Cell(NamedTuple):
    """What is measured with one setting."""

    method: str
    kind: str
    streams: int
    settings: str  # all else that the figures depend on


class Pair(NamedTuple):
    """One run without speculation and one with it."""

    plain_tokens_per_s: float
    tokens_per_s: float
    processor_ratio: float | None  # with it to without it
    acceptance_length: float | None  # None: nothing was drafted
    tokens_per_step: float | None  # of all streams

    @classmethod
    def of(cls, plain: Run, drafted: Run) -> Pair:
        ratio = length = per_step = None
        if plain.processor_s and drafted.processor_s is not None:
            ratio = drafted.processor_s / plain.processor_s
        if drafted.num_drafts:
            length = 1 + drafted.num_accepted / drafted.num_drafts
        if drafted.num_steps:
            per_step = drafted.num_tokens / drafted.num_steps
        return cls(plain.tokens_per_s, drafted.tokens_per_s, ratio, length, per_step)

    @property
    def gain(self) -> float:
        return self.tokens_per_s / self.plain_tokens_per_s


class Figures:
    """Of all cells, in the order in which they were first measured."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.cells: dict[Cell, list[Pair]] = {}
        for cell, pair in _read(file):
            self.cells.setdefault(cell, []).append(pair)

    def add(self, cell: Cell, pair: Pair) -> None:
        self.cells.setdefault(cell, []).append(pair)
        self._file.parent.mkdir(parents=True, exist_ok=True)
        line = json.dumps({"cell": cell._asdict(), "pair": pair._asdict()})
        with self._file.open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def count(self, cell: Cell) -> int:
        return len(self.cells.get(cell, ()))


def _read(file: Path) -> Iterator[tuple[Cell, Pair]]:
    """Without a last line that was cut off."""
    if not file.exists():
        return
    for line in file.read_text(encoding="utf-8").splitlines(keepends=True):
        if line.endswith("\n"):
            found: dict[str, dict[str, Any]] = json.loads(line)
            yield Cell(**found["cell"]), Pair(**found["pair"])


def table(cells: dict[Cell, list[Pair]]) -> list[str]:
    """Markdown: a row for each method, kind and setting; a column of gains for each number of
    streams."""
    streams = sorted({cell.streams for cell in cells})
    by_row: dict[tuple[str, str, str], dict[int, list[Pair]]] = {}
    for cell, pairs in cells.items():
        row = by_row.setdefault((cell.method, cell.kind, cell.settings), {})
        row[cell.streams] = pairs
    heads = [f"{count} stream{'s' * (count > 1)}" for count in streams]
    lines = [
        "| " + " | ".join(["method", "text", "tokens/s, one stream", "acceptance length", *heads])
        + " |",
        "|---" * (4 + len(heads)) + "|",
    ]  # fmt: skip
    for (method, kind, _), found in by_row.items():
        gains = [_median(pair.gain for pair in found.get(count, ())) for count in streams]
        single = found.get(1, [])
        speed = [_median(pair.plain_tokens_per_s for pair in single),
                 _median(pair.tokens_per_s for pair in single)]  # fmt: skip
        length = _median(
            pair.acceptance_length
            for pair in next(iter(found[count] for count in streams if count in found))
            if pair.acceptance_length is not None
        )
        speeds = "-" if None in speed else " → ".join(f"{one:.0f}" for one in speed)
        columns = [method, kind, speeds, _shown(length), *(_shown(gain) for gain in gains)]
        lines.append("| " + " | ".join(columns) + " |")
    return lines


def losses(cells: dict[Cell, list[Pair]]) -> list[str]:
    """Sentences on what became slower than it may."""
    return [
        f"{cell.method}, {cell.kind}, {cell.streams} streams: {gain:.2f} times the tokens/s without"
        for cell, pairs in cells.items()
        if (gain := statistics.median(pair.gain for pair in pairs)) < LEAST_GAIN
    ]


def _median(values: Iterable[float]) -> float | None:
    found: Sequence[float] = list(values)
    return statistics.median(found) if found else None


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
