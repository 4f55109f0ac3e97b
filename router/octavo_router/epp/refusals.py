"""Refusals as a gateway's client gets them: as the router's own, with a reason for the gateway."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from octavo_engine.protocol.endpoints import REQUEST_ID_HEADER
from octavo_router.epp.messages import immediate_answer

if TYPE_CHECKING:
    from octavo_router.epp.messages import Pair
    from octavo_router.errors import Rejected

DROPPED_REASON: Final = b"x-llm-d-request-dropped-reason"

# The endpoint picker protocol has one status for what is shed, whoever is to blame: 429.
_SHED: Final = {
    "queue_full": b"rejected-saturated",
    "overloaded": b"rejected-saturated",
    "out_of_memory": b"rejected-saturated",
    "queue_timeout": b"rejected-ttl-expired",
    "too_many_in_flight": b"rejected-over-limit",
    "request_rate_exceeded": b"rejected-over-limit",
    "token_rate_exceeded": b"rejected-over-limit",
}
_OTHER_REASONS: Final = {
    "no_endpoints": b"rejected-no-endpoints",
    "deadline_exceeded": b"rejected-ttl-expired",
}


def status_of(error: Rejected) -> int:
    return 429 if error.code in _SHED else error.status


def refusal(error: Rejected, path: str = "", request_id: str = "") -> bytes:
    """As an immediate answer, in the words that clients of this path read."""
    pairs = [("content-type", "application/json"), *error.fields(path, request_id)]
    if request_id:
        pairs.append((REQUEST_ID_HEADER, request_id))
    headers: list[Pair] = [
        (name.encode(), value.encode("latin-1", "replace")) for name, value in pairs
    ]
    reason = _SHED.get(error.code) or _OTHER_REASONS.get(error.code)
    if reason is not None:
        headers.append((DROPPED_REASON, reason))
    body = error.body(path, request_id)
    return immediate_answer(status_of(error), headers, body, f"octavo_{error.code}")
