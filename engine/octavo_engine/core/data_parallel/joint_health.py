"""The state of several cores as that of one engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from octavo_engine.core.info import CoreHealth, ModelInfo
from octavo_engine.protocol.loading import LoadProgress

if TYPE_CHECKING:
    from collections.abc import Sequence


def rank_name(rank: int, size: int) -> str:
    """How errors and states name one core."""
    return f"data-parallel rank {rank} of {size}"


def join_health(cores: Sequence[CoreHealth], *, was_ready: bool) -> CoreHealth:
    """An engine is ready while a core is, once all were: the reason names the others. It is dead
    when a core has ended for good: what is left is not the engine that was ordered."""
    reasons = [
        f"{rank_name(rank, len(cores))}: {core.reason or core.state}"
        for rank, core in enumerate(cores)
        if core.state != "ready"
    ]
    reason = "; ".join(reasons)
    if any(core.state == "dead" and not core.restarts for core in cores):
        return CoreHealth("dead", reason, restarts=False)
    if not reasons or (was_ready and len(reasons) < len(cores)):
        return CoreHealth("ready", reason)
    if any(core.state == "loading" for core in cores):
        share = sum(core.progress for core in cores) / len(cores)
        return CoreHealth("loading", reason, share, _join_progress(cores))
    if any(core.state == "stalled" for core in cores):
        return CoreHealth("stalled", reason)
    return CoreHealth("dead", reason)


def _join_progress(cores: Sequence[CoreHealth]) -> LoadProgress | None:
    """Each reads the whole model: bytes add up."""
    known = [core.loading for core in cores if core.loading is not None]
    if not known:
        return None
    return LoadProgress(
        known[0].phase,
        sum(progress.bytes_done for progress in known),
        sum(progress.bytes_total for progress in known),
        sum(progress.bytes_per_s for progress in known),
    )


def join_info(cores: Sequence[ModelInfo]) -> ModelInfo:
    """What all can do, with the memory of all."""
    return msgspec.structs.replace(
        cores[0],
        max_model_len=min(info.max_model_len for info in cores),
        num_blocks=sum(info.num_blocks for info in cores),
        kv_bytes=sum(info.kv_bytes for info in cores),
        load_seconds=max(info.load_seconds for info in cores),
    )
