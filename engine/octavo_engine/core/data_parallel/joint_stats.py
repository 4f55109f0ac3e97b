"""The figures of several cores as those of one engine."""

from __future__ import annotations

from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import msgspec

from octavo_engine.state.outputs import EngineStats, TierStats

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_OF_LAST = ("step_ms", "step_tokens", "last_step_at")  # of the core that made the last step
_OF_LEAST = ("queue_wait_s", "longest_wait_s")  # of the core that a new request would wait least at
_NAMES = ("running_adapters", "waiting_adapters")


def join_stats(cores: Sequence[EngineStats]) -> EngineStats:
    """Sums, but for what is of one step or one queue; `cores` keeps what they are made of."""
    last = max(cores, key=lambda stats: stats.last_step_at)
    least = min(cores, key=lambda stats: stats.queue_wait_s)
    joint: dict[str, Any] = {}
    for name in EngineStats.__struct_fields__:
        values = [getattr(stats, name) for stats in cores]
        if name in _OF_LAST:
            joint[name] = getattr(last, name)
        elif name in _OF_LEAST:
            joint[name] = getattr(least, name)
        elif name in _NAMES:
            joint[name] = sorted({adapter for names in values for adapter in names})
        elif name == "tiers":
            joint[name] = _join_tiers(values)
        elif name == "expert_layer_tokens":  # each core's are published by themselves
            joint[name] = []
        elif name == "cores":
            joint[name] = list(cores)
        elif isinstance(values[0], list):
            joint[name] = [sum(column) for column in zip_longest(*values, fillvalue=0)]
        else:
            joint[name] = sum(values)
    return EngineStats(**joint)


def _join_tiers(values: Iterable[TierStats | None]) -> TierStats | None:
    there = [msgspec.structs.asdict(tiers) for tiers in values if tiers is not None]
    if not there:
        return None
    return TierStats(**{name: sum(tiers[name] for tiers in there) for name in there[0]})
