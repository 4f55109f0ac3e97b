"""Refusals as a gateway's client gets them: status, reason header, Retry-After, OpenAI's error."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from octavo_engine.protocol.endpoints import REQUEST_ID_HEADER
from octavo_router.epp.messages import immediate_answer

if TYPE_CHECKING:
    from octavo_router.epp.messages import Pair
    from octavo_router.errors import Refused

DROPPED_REASON: Final = b"x-llm-d-request-dropped-reason"

# The endpoint picker protocol has one status for what is shed, whoever is to blame: 429.
_SHED: Final = {
    "queue_full": b"rejected-saturated",
    "overloaded": b"rejected-saturated",
    "queue_timeout": b"rejected-ttl-expired",
    "too_many_in_flight": b"rejected-over-limit",
    "request_rate_exceeded": b"rejected-over-limit",
    "token_rate_exceeded": b"rejected-over-limit",
}
_OTHER_REASONS: Final = {
    "no_endpoints": b"rejected-no-endpoints",
    "deadline_exceeded": b"rejected-ttl-expired",
}


def status_of(error: Refused) -> int:
    return 429 if error.code in _SHED else error.status


def refusal(error: Refused, request_id: str = "") -> bytes:
    """As an immediate answer."""
    headers: list[Pair] = [(b"content-type", b"application/json")]
    reason = _SHED.get(error.code) or _OTHER_REASONS.get(error.code)
    if reason is not None:
        headers.append((DROPPED_REASON, reason))
    if error.retry_after_s is not None:
        headers.append((b"retry-after", b"%d" % max(1, math.ceil(error.retry_after_s))))
    if request_id:
        headers.append((REQUEST_ID_HEADER.encode(), request_id.encode("latin-1", "replace")))
    details = f"octavo_{error.code}"
    return immediate_answer(status_of(error), headers, error.body(), details)
