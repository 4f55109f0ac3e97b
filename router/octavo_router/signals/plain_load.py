"""Load of a server that does not push it: read from its Prometheus page, of any server.

Only gauges are read, and nothing is differenced, so a counter that starts again does no harm. A
value that cannot be true (NaN, negative, a KV use above one) makes the whole load unknown: a
router that believed in a zero would send everything there.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

from octavo_engine.protocol.stream import Load

if TYPE_CHECKING:
    from collections.abc import Iterator

# Each system's names for the same four facts; usage is a share from 0 to 1 in all of them.
_RUNNING = (
    "octavo_num_requests_running", "vllm:num_requests_running", "sglang:num_running_reqs",
    "llamacpp:requests_processing", "tgi_batch_current_size",
)  # fmt: skip
_WAITING = (
    "octavo_num_requests_waiting", "vllm:num_requests_waiting", "sglang:num_queue_reqs",
    "llamacpp:requests_deferred", "tgi_queue_size",
)  # fmt: skip
_USAGE = (
    "octavo_kv_cache_usage_perc", "vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc",
    "sglang:token_usage", "llamacpp:kv_cache_usage_ratio",
)  # fmt: skip
_QUEUED_TOKENS = ("octavo_num_queued_tokens",)
_STARTED_AT = ("process_start_time_seconds",)

_FACTS = {
    "running": _RUNNING,
    "waiting": _WAITING,
    "usage": _USAGE,
    "queued_tokens": _QUEUED_TOKENS,
    "started_at": _STARTED_AT,
}
_AFTER_NAME = re.compile(rb"(?:\{[^\n]*\})?[ \t]+([^\s]+)")


class PlainLoad:
    """What one page said. `load` is None where that cannot be believed or nothing was said."""

    def __init__(self, page: bytes) -> None:
        values: dict[str, list[float]] = {}
        for fact, names in _FACTS.items():
            # The same fact may be there under several names, as ours is under vLLM's too: one says
            # it all, and adding them up would count everything twice.
            samples = next(
                filter(None, (list(_samples(page, name.encode())) for name in names)), []
            )
            if samples:
                values[fact] = list(map(_number, samples))
        self.load = _load(values)
        started = values.get("started_at", [])
        # A later start than last time is a new process, with an empty cache.
        self.started_at = started[0] if started and math.isfinite(started[0]) else None


def _samples(page: bytes, name: bytes) -> Iterator[bytes]:
    """The values of one name, as texts.

    Looked for name by name: these are a few of a page's thousand lines, and finding bytes is
    several times faster than looking at each line.
    """
    at = page.find(name)
    while at >= 0:
        end = at + len(name)
        if (at == 0 or page[at - 1] == 10) and (sample := _AFTER_NAME.match(page, end)):
            yield sample[1]
        at = page.find(name, end)


def _load(values: dict[str, list[float]]) -> Load | None:
    if "running" not in values and "waiting" not in values:
        return None
    reported = [value for fact, group in values.items() if fact != "started_at" for value in group]
    usage = max(values.get("usage", [0.0]))  # several ranks: the fullest decides
    if not all(math.isfinite(value) and value >= 0.0 for value in reported) or usage > 1.0:
        return None
    # Data-parallel ranks and models report side by side; what counts is all of them.
    return Load(
        running=int(sum(values.get("running", []))),
        waiting=int(sum(values.get("waiting", []))),
        queued_tokens=int(sum(values.get("queued_tokens", []))),
        kv_usage=usage,
    )


def _number(text: bytes) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
