"""Where a program is cut so that its parts take about as long as each other. Pure.

A program of one sequence can stop between any two instructions and go on in another step: what lies
between them stays in its memory.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

from octavo_engine.backends.native.stages import balance

if TYPE_CHECKING:
    from collections.abc import Sequence

    from octavo_engine.backends.native.facts import OpFacts


def op_costs(ops: Sequence[OpFacts], *, num_rows: int, window_rows: int) -> list[int]:
    """About how many operations each instruction takes for a row, of so many in a step. Segmented
    attention sees windows of at most `window_rows`."""
    costs = []
    for op in ops:
        seen = min(num_rows, window_rows) if op.is_segmented else num_rows
        costs.append(op.flops_per_row + op.flops_per_pair * seen + 1)
    return costs


def part_bounds(costs: Sequence[int], num_parts: int) -> list[int]:
    """Part i has the instructions [bounds[i], bounds[i + 1]). Where there are more parts than can
    be distinguished, the last ones are empty."""
    bounds = list(accumulate(balance(costs, num_parts), initial=0))
    return bounds + [len(costs)] * (num_parts + 1 - len(bounds))
