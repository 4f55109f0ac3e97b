"""What was decided and why, for the proxy, for headers and for the debug endpoint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from octavo_router.endpoints.endpoint import Endpoint
    from octavo_router.routing.request import RouteRequest


@dataclass(slots=True)
class Decision:
    """Where a request goes. `details` only where requested, or sampled: JSON-able."""

    endpoint: Endpoint
    policy: str
    reason: str
    matched_tokens: int  # of the prompt, predicted to be in the endpoint's memory
    fallbacks: tuple[Endpoint, ...] = ()
    details: dict[str, Any] | None = None
    prompt_at: str = ""  # the endpoint that computed the prompt for this one


def describe(
    request: RouteRequest,
    policy: str,
    reason: str,
    endpoints: Sequence[Endpoint],
    matched: Sequence[int],
    scores: Sequence[dict[str, float]],
    at: int,
) -> dict[str, Any]:
    """A decision with all its numbers."""
    return {
        "request_id": request.request_id,
        "model": request.model,
        "pool": request.pool,
        # An estimate by bytes, low for short prompts in a chat template; what matched is known.
        "prompt_tokens": max(request.prompt_tokens, *matched),
        "policy": policy,
        "reason": reason,
        "endpoint": endpoints[at].id,
        "matched_tokens": matched[at],
        "candidates": [
            {
                "endpoint": endpoint.id,
                "matched_tokens": tokens,
                "in_flight": endpoint.in_flight,
                "running": endpoint.load.running,
                "waiting": endpoint.load.waiting,
                "queued_tokens": endpoint.load.queued_tokens,
                "kv_usage": endpoint.load.kv_usage,
                "is_saturated": endpoint.load.is_saturated,
                **{name: round(value, 6) for name, value in score.items()},
            }
            for endpoint, tokens, score in zip(endpoints, matched, scores, strict=True)
        ],
    }
