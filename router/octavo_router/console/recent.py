"""The last requests, numbered, so that each viewer gets only what it has not seen."""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from octavo_router.metrics import RequestRecord

NUM_KEPT = 200


class Recent:
    """A ring of records that are over, taken as they are counted: some dozens at a time."""

    def __init__(self, num_kept: int = NUM_KEPT) -> None:
        self._kept: deque[RequestRecord] = deque(maxlen=num_kept)
        self.number = 0  # of the newest

    def take(self, records: Collection[RequestRecord]) -> None:
        self.number += len(records)
        self._kept.extend(records)

    def since(self, number: int) -> Iterator[tuple[int, RequestRecord]]:
        """Newer ones than that, oldest first, as far as they are still known."""
        oldest = self.number - len(self._kept) + 1
        return islice(enumerate(self._kept, oldest), max(0, number + 1 - oldest), None)


def row(number: int, record: RequestRecord, *, now: float) -> dict[str, Any]:
    """One request as the page shows it: no client, no tenant, nothing that was said."""
    return {
        "number": number,
        "id": record.request_id,
        "age_s": round(now - record.ended_at, 3),
        "route": record.route,
        "model": record.model,
        "pool": record.pool,
        "revision": record.revision,
        "endpoint": record.endpoint,
        "policy": record.policy,
        "status": record.status,
        "outcome": record.outcome,
        "code": record.code,
        "is_stream": record.is_stream,
        "duration_s": round(record.duration_s, 6),
        "queue_s": round(record.queue_s, 6),
        "ttft_s": None if record.ttft_s is None else round(record.ttft_s, 6),
        "prompt_tokens": record.prompt_tokens,
        "cached_tokens": record.cached_tokens,
        "predicted_tokens": record.predicted_tokens,
        "output_tokens": record.output_tokens,
        "attempts": record.attempts,
        "resumes": record.resumes,
    }
