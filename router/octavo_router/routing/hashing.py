"""Policies that send the same key to the same endpoint, without any report from it.

Rendezvous hashing: each endpoint has a score of its own for every key, the highest wins. When one
comes or goes only its own keys move, and all routers agree without talking. With *bounded loads*:
an endpoint that has more than `balance_factor` times its fair share of requests in flight (and
more than a few) passes the key on to the next highest.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from octavo_router.endpoints.endpoint import Endpoint
    from octavo_router.routing.policies import Policy, Scores
    from octavo_router.routing.request import RouteRequest

PREFIX_KEYS = 4  # route keys that stand for a prompt: its first 256 bytes
KEY_BYTES = 8


class ConsistentHash:
    """By session, else by the beginning of the prompt. The fallback where engines tell nothing.

    Not where they do: prefix-load knows what is really cached, and how long the queue is.
    """

    name = "consistent-hash"
    places_adapters = False

    def __init__(self, *, balance_factor: float = 1.25, balance_slack: int = 8) -> None:
        self.reason = ""
        self._factor = balance_factor
        self._slack = balance_slack

    def pick(
        self, request: RouteRequest, candidates: Sequence[Endpoint], matched: Sequence[int]
    ) -> int:
        key = _key_of(request)
        return self.pick_for(key, candidates)

    def pick_for(self, key: bytes, candidates: Sequence[Endpoint]) -> int:
        limit = self._limit(candidates)
        order = sorted(
            range(len(candidates)), key=lambda i: rank(key, candidates[i].id), reverse=True
        )
        for at in order:
            if candidates[at].in_flight < limit:
                self.reason = "its hash" if at == order[0] else "the next by hash that has room"
                return at
        return order[0]

    def explain(
        self, request: RouteRequest, candidates: Sequence[Endpoint], matched: Sequence[int]
    ) -> Scores:
        key = _key_of(request)
        limit = float(self._limit(candidates))
        return [
            {"rank": rank(key, endpoint.id) / 2**64, "max_in_flight": limit}
            for endpoint in candidates
        ]

    def _limit(self, candidates: Sequence[Endpoint]) -> int:
        """Always above the mean, so that someone has room."""
        total = sum(endpoint.in_flight for endpoint in candidates)
        return max(self._slack, int(self._factor * (total + 1) / len(candidates)) + 1)


class SessionHash:
    """A session stays at one endpoint; requests without one go by another policy.

    Not for fairness between sessions of unlike weight, and rarely needed: prefix-load keeps a
    conversation where its prefix is, and moves it when that is worth it.
    """

    name = "session"
    places_adapters = False

    def __init__(
        self, otherwise: Policy, *, balance_factor: float = 1.25, balance_slack: int = 8
    ) -> None:
        self.reason = ""
        self._otherwise = otherwise
        self._hash = ConsistentHash(balance_factor=balance_factor, balance_slack=balance_slack)

    def pick(
        self, request: RouteRequest, candidates: Sequence[Endpoint], matched: Sequence[int]
    ) -> int:
        if not request.session:
            at = self._otherwise.pick(request, candidates, matched)
            self.reason = f"no session: {self._otherwise.reason}"
            return at
        at = self._hash.pick_for(request.session.encode("utf-8", "surrogatepass"), candidates)
        self.reason = f"its session: {self._hash.reason}"
        return at

    def explain(
        self, request: RouteRequest, candidates: Sequence[Endpoint], matched: Sequence[int]
    ) -> Scores:
        policy: Policy = self._hash if request.session else self._otherwise
        return policy.explain(request, candidates, matched)


def rank(key: bytes, endpoint_id: str) -> int:
    """An endpoint's score for a key; the same in every process."""
    return int.from_bytes(
        blake2b(key + b"\0" + endpoint_id.encode(), digest_size=8).digest(), "little"
    )


def _key_of(request: RouteRequest) -> bytes:
    if request.session:
        return request.session.encode("utf-8", "surrogatepass")
    if request.keys:
        end = min(PREFIX_KEYS * KEY_BYTES, len(request.keys))
        return request.adapter.encode() + request.keys[end - KEY_BYTES : end]
    return request.request_id.encode("utf-8", "surrogatepass")
