"""What this replica reports to the operator at STATE_PATH: its endpoints and their demand."""

from __future__ import annotations

import hmac
import secrets
from typing import TYPE_CHECKING

import msgspec

from octavo_engine.protocol.state import (
    AdapterState,
    EndpointState,
    PoolState,
    RevisionState,
    State,
)
from octavo_router.errors import Rejected
from octavo_router.http.messages import Inbound, Reply

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from octavo_router.endpoints.endpoint import Endpoint
    from octavo_router.endpoints.registry import Registry
    from octavo_router.flow.admin import AdminAccess
    from octavo_router.gauges import DemandGauges
    from octavo_router.metrics import PoolCounts, RevisionCounts, RouterMetrics


class StateReporter:
    """Answers GET STATE_PATH. `token`, where set, is what the operator shows, not a user's key."""

    def __init__(
        self,
        registry: Registry,
        demand: DemandGauges,
        metrics: RouterMetrics,
        *,
        replica: str,
        admin: AdminAccess,
        token: str = "",
        is_open: bool = False,
        known_pools: Callable[[], Iterable[str]] = lambda: (),
        adapters: Callable[[str], list[AdapterState]] = lambda pool: [],
        prompt_tokens: Callable[[str], float] = lambda pool: 0.0,
        epoch: str = "",
    ) -> None:
        self._registry = registry
        self._demand = demand
        self._metrics = metrics
        self._replica = replica
        self._admin = admin
        self.change_access(token=token, is_open=is_open)
        self._known_pools = known_pools  # also those that have no endpoint now
        self._adapters = adapters  # of a pool
        self._prompt_tokens = prompt_tokens  # likewise
        self._epoch = epoch or secrets.token_hex(8)

    def change_access(self, *, token: str, is_open: bool) -> None:
        """From now on only this token opens it; where there is none, `is_open` may."""
        self._token = token.strip().encode()  # a Secret made of a file ends with its newline
        self._is_open = is_open

    def __call__(self, request: Inbound) -> Reply:
        self._check(request)
        return Reply(body=msgspec.json.encode(self.state()))

    def state(self) -> State:
        registry = self._registry
        names = sorted({*registry.pools, *self._metrics.pools, *self._known_pools()})
        return State(
            epoch=self._epoch,
            replica=self._replica,
            pools=[self._pool(name) for name in names],
            endpoints=[_endpoint(endpoint) for endpoint in registry.endpoints.values()],
        )

    def _check(self, request: Inbound) -> None:
        """The token opens it, or a key for all there is to see; without a token, more may."""
        _, _, shown = (request.headers.get("authorization") or "").partition(" ")
        if self._token and hmac.compare_digest(shown.encode("latin-1"), self._token):
            return
        admin = self._admin
        if admin.is_known(request):
            return
        if self._token:
            raise Rejected(401, "invalid_api_key", "The router's state needs its own token.")
        if not self._is_open and not admin.allows(request):
            raise admin.refusal(request.path)

    def _pool(self, name: str) -> PoolState:
        waiting = self._demand(name)
        counts = self._metrics.pools.get(name)
        in_flight = sum(endpoint.num_requests for endpoint in self._registry.pool(name))
        return PoolState(
            pool=name,
            held=waiting.held,
            queued=waiting.queued,
            queued_tokens=waiting.queued_tokens,
            in_flight=in_flight,
            last_request_age_s=self._age_s(counts, is_wanted=bool(waiting.held or waiting.queued)),
            revisions=[_revision(*pair) for pair in sorted(counts.revisions.items())]
            if counts
            else [],
            refused=counts.refused if counts else 0,
            adapters=self._adapters(name),
            prompt_tokens=self._prompt_tokens(name),
            adapter_trials=[_revision(*pair) for pair in sorted(counts.trials.items())]
            if counts
            else [],
        )

    def _age_s(self, counts: PoolCounts | None, *, is_wanted: bool) -> float | None:
        if is_wanted:
            return 0.0
        if counts is None or counts.last_request_at is None:
            return None
        return max(0.0, self._metrics.now() - counts.last_request_at)


def _revision(name: str, counts: RevisionCounts) -> RevisionState:
    ttft = counts.ttft
    return RevisionState(
        revision=name,
        requests=counts.requests,
        errors=counts.errors,
        ttft_s_sum=ttft.sum,
        ttft_count=ttft.count,
        itl_s_sum=counts.itl_s_sum,
        itl_count=counts.itl_count,
        ttft_buckets=[int(count) for _, count in ttft.cumulative()],
    )


def _endpoint(endpoint: Endpoint) -> EndpointState:
    load = endpoint.load
    return EndpointState(
        id=endpoint.id,
        pool=endpoint.pool,
        revision=endpoint.spec.revision,
        url=endpoint.spec.address.url,
        state=endpoint.state,
        in_flight=endpoint.num_requests,
        running=load.running,
        waiting=load.waiting,
        queued_tokens=load.queued_tokens,
        kv_usage=load.kv_usage,
        loading=endpoint.loading,
        max_model_len=endpoint.max_model_len,
        progress=endpoint.progress,
        model=endpoint.model,
        adapters=sorted(endpoint.adapters),
        computed_tokens=load.computed_tokens,
        step_s=load.step_s,
        prompt_token_s=endpoint.token_s,
    )
