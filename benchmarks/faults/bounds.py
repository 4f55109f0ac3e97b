"""The figures that the scenarios of load and faults must keep: `bounds.json`, and its judge."""

from __future__ import annotations

import json
import operator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from benchmarks.router.overload import Verdict

_FILE: Final = Path(__file__).with_name("bounds.json")
_HOLDS: Final[Mapping[str, Callable[[float, float], bool]]] = {
    "<=": operator.le,
    "<": operator.lt,
    ">=": operator.ge,
}


@dataclass(frozen=True, slots=True)
class Bound:
    """What one figure of a scenario must be."""

    figure: str
    relation: str
    value: float

    def holds(self, verdict: Verdict) -> bool:
        """A figure that was not measured fails."""
        seen = verdict.seen.get(self.figure)
        return seen is not None and _HOLDS[self.relation](seen, self.value)

    def complaint(self, verdict: Verdict) -> str:
        seen = verdict.seen.get(self.figure)
        measured = "not measured" if seen is None else f"{seen:.3g}"
        return f"{self.figure}: {measured}, must be {self}"

    def __str__(self) -> str:
        return f"{self.relation} {self.value:g}"


def bounds_of(scenario: str) -> tuple[Bound, ...]:
    """Those of the scenario with this name."""
    figures = json.loads(_FILE.read_text())[scenario]
    return tuple(Bound(figure, *bound) for figure, bound in figures.items())


def judge(scenario: str, verdict: Verdict) -> None:
    """Adds a complaint for each bound that is not kept."""
    for bound in bounds_of(scenario):
        verdict.expect(bound.holds(verdict), bound.complaint(verdict))
