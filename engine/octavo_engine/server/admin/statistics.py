"""A log line of statistics every ten seconds while there is work."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from octavo_engine.server.served_engine import ServedEngine
    from octavo_engine.state.outputs import EngineStats

logger = logging.getLogger("octavo.server")

EVERY_S = 10.0


class StatisticsWindow:
    """What happened since the last look, from counters that only grow."""

    def __init__(self, now: float) -> None:
        self._at = now
        self._counts = (0, 0, 0, 0)

    def look(self, stats: EngineStats, now: float) -> dict[str, object] | None:
        """The fields of a line; None where nothing was computed and nothing waits."""
        counts = (
            stats.prompt_tokens, stats.generation_tokens, stats.prefix_queries, stats.prefix_hits,
        )  # fmt: skip
        new = [after - before for after, before in zip(counts, self._counts, strict=True)]
        if min(new) < 0:  # the core was restarted
            new = list(counts)
        elapsed_s = max(now - self._at, 1e-3)
        self._at, self._counts = now, counts
        prompt_tokens, generated_tokens, queried, hits = new
        if not (prompt_tokens or generated_tokens or stats.num_running or stats.num_waiting):
            return None
        return {
            "running": stats.num_running,
            "waiting": stats.num_waiting,
            "prompt_tokens_per_s": round(prompt_tokens / elapsed_s, 1),
            "output_tokens_per_s": round(generated_tokens / elapsed_s, 1),
            "kv_cache_used": _percent(stats.kv_blocks_used, stats.kv_blocks_total),
            "prefix_hits": _percent(hits, queried),
        }


async def log_statistics(
    engine: ServedEngine, *, every_s: float = EVERY_S, clock: Callable[[], float] = time.monotonic
) -> None:
    """Until it is cancelled."""
    window = StatisticsWindow(clock())
    while True:
        await asyncio.sleep(every_s)
        fields = window.look(engine.stats, clock())
        if fields is not None:
            logger.info("Statistics", extra=fields)


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f}%" if whole else "0.0%"
