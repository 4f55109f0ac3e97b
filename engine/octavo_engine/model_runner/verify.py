"""How far what was guessed is what was sampled."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo_engine.sampling.batch import SAMPLED_OK

if TYPE_CHECKING:
    from collections.abc import Mapping

    from octavo_engine.model_runner.inputs import BuiltStep
    from octavo_engine.sampling.batch import Sampled
    from octavo_engine.state.batch import ScheduledBatch


def accept_drafts(
    batch: ScheduledBatch, built: BuiltStep, sampled: Sampled, num_masked: Mapping[int, int]
) -> dict[int, list[int]]:
    """By entry, the drafts that came true. From here on `built.last_rows` has the row in which the
    token behind them was sampled.

    Each row was sampled as if all drafts before it were true, so it counts while they are. A row
    that failed is not reached: if its turn comes without a draft, it fails again. Nor is one for
    which a grammar gave no mask; entries in `num_masked` have so many.
    """
    accepted: dict[int, list[int]] = {}
    for entry, drafts in batch.drafts.items():
        first = int(built.logit_starts[entry])
        end = first + len(drafts) + 1
        tokens = sampled.tokens[first:end].tolist()
        is_ok = (sampled.status[first:end] == SAMPLED_OK).tolist()
        most = min(len(drafts), num_masked.get(entry, end) - 1)
        count = 0
        while count < most and tokens[count] == drafts[count] and is_ok[count] and is_ok[count + 1]:
            count += 1
        accepted[entry] = drafts[:count]
        built.last_rows[entry] = first + count
    return accepted
