"""Views of the router's inside for administrators: decisions, index, endpoints, settings; no texts.

Off unless `server.debug_endpoints` is set. Then flow.admin says who may look.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Protocol

from octavo_router.config import show
from octavo_router.errors import Rejected, no_route
from octavo_router.http.messages import Inbound, Reply
from octavo_router.routing.decision import describe
from octavo_router.routing.filters import narrow
from octavo_router.routing.tier_hits import count_tier_hits

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from octavo_router.config.settings import RouterConfig
    from octavo_router.endpoints.endpoint import Endpoint
    from octavo_router.flow.admin import AdminAccess
    from octavo_router.http.messages import Handler
    from octavo_router.residency.api import ResidencyIndex
    from octavo_router.routing.dispatcher import Dispatcher
    from octavo_router.routing.request import RouteRequest

MAX_SHOWN_KEYS = 64


class Understand(Protocol):
    """Reads a body as the proxy would. Raises Rejected as for the request itself."""

    def __call__(self, path: str, body: bytes, /) -> RouteRequest: ...


class Debug:
    """The handlers of /debug/*."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        index: ResidencyIndex,
        *,
        config: Callable[[], RouterConfig],
        understand: Understand,
        admin: AdminAccess,
        problems: Callable[[], Mapping[str, str]] = dict,
        now: Callable[[], float],
    ) -> None:
        self._dispatcher = dispatcher
        self._index = index
        self._config = config
        self._understand = understand
        self._admin = admin
        self._problems = problems  # of discovery and the configuration's files, by source
        self._now = now

    def routes(self) -> dict[tuple[str, str], Handler]:
        """For App.routes. Guarded one by one, so that nothing depends on how they are mounted."""
        handlers: dict[tuple[str, str], Callable[[Inbound], Any]] = {
            ("GET", "/debug/decisions"): self._decisions,
            ("GET", "/debug/index"): self._index_sizes,
            ("GET", "/debug/endpoints"): self._endpoints,
            ("GET", "/debug/config"): self._settings,
            ("GET", "/debug/tasks"): self._tasks,
            ("POST", "/debug/route"): self._route,
        }
        return {key: self._guarded(handler) for key, handler in handlers.items()}

    def _guarded(self, handler: Callable[[Inbound], Any]) -> Handler:
        def guarded(request: Inbound) -> Reply:
            if not self._config().server.debug_endpoints:
                raise no_route(request.method, request.path)
            self._admin.check(request)
            return Reply.json(handler(request))

        return guarded

    def _decisions(self, request: Inbound) -> dict[str, Any]:
        """The sampled ones, newest first; `?pool=` and `?limit=` narrow it."""
        pool, limit = request.parameter("pool"), request.parameter("limit")
        decisions = [
            decision
            for decision in reversed(self._dispatcher.decisions)
            if pool is None or decision.get("pool") == pool
        ]
        if limit is not None:
            if not limit.isdigit():
                raise Rejected(400, "invalid_value", "limit must be a number.", param="limit")
            decisions = decisions[: int(limit)]
        return {"num_picks": self._dispatcher.num_picks, "decisions": decisions}

    def _index_sizes(self, request: Inbound) -> dict[str, Any]:
        endpoints = self._dispatcher.registry.endpoints.values()
        return {
            "memory_bytes": self._index.memory_bytes,
            "num_refused": self._index.num_refused,
            "endpoints": [
                {"endpoint": e.id, "pool": e.pool, "keys": self._index.num_keys(e.slot)}
                for e in endpoints
                if e.slot >= 0
            ],
        }

    def _endpoints(self, request: Inbound) -> dict[str, Any]:
        endpoints = self._dispatcher.registry.endpoints.values()
        return {
            "problems": dict(self._problems()),
            "endpoints": [self._endpoint(endpoint) for endpoint in endpoints],
        }

    def _endpoint(self, endpoint: Endpoint) -> dict[str, Any]:
        spec, load = endpoint.spec, endpoint.load
        age_s = None if endpoint.load_at is None else round(self._now() - endpoint.load_at, 3)
        return {
            "id": endpoint.id,
            "url": spec.address.url,
            "pool": spec.pool,
            "revision": spec.revision,
            "kind": endpoint.kind,
            "role": endpoint.role,
            "state": endpoint.state,
            "reason": endpoint.reason,
            "names": list(endpoint.names),
            "adapters": sorted(endpoint.adapters),
            "epoch": endpoint.epoch,
            "max_model_len": endpoint.max_model_len,
            "max_num_seqs": endpoint.max_num_seqs,
            "in_flight": endpoint.num_requests,
            "pending_tokens": endpoint.pending_tokens,
            "told": {
                "age_s": age_s,
                "running": load.running,
                "waiting": load.waiting,
                "queued_tokens": load.queued_tokens,
                "kv_usage": load.kv_usage,
                "step_s": load.step_s,
                "prefill_tokens_per_s": load.prefill_tokens_per_s,
                "is_saturated": load.is_saturated,
            },
            "labels": dict(spec.labels),
            "is_ready": spec.is_ready,
            "is_terminating": spec.is_terminating,
        }

    def _settings(self, request: Inbound) -> Any:
        return show.dump(self._config())

    def _tasks(self, request: Inbound) -> dict[str, Any]:
        """By name, and where each one waits."""
        rows = []
        for task in asyncio.all_tasks():
            stack = task.get_stack(limit=1)
            frame = stack[0] if stack else None
            where = f"{frame.f_code.co_qualname}:{frame.f_lineno}" if frame else ""
            rows.append({"name": task.get_name(), "at": where})
        return {"tasks": sorted(rows, key=lambda row: row["name"])}

    def _route(self, request: Inbound) -> dict[str, Any]:
        """What would become of this body, sent to `?path=`; nothing is sent or reserved."""
        path = request.parameter("path") or "/v1/chat/completions"
        route_request = self._understand(path, request.body)
        registry, dispatcher = self._dispatcher.registry, self._dispatcher
        if not route_request.prompt_tokens:
            route_request.prompt_tokens = dispatcher.token_rates.estimate(
                route_request.pool, route_request.prompt_bytes
            )
        found = registry.candidates(route_request.pool, route_request.revision)
        policy = dispatcher.policies.of(route_request.pool)
        shown: dict[str, Any] = {
            "model": route_request.model,
            "pool": route_request.pool,
            "revision": route_request.revision,
            "adapter": route_request.adapter,
            "policy": policy.name,
            "prompt_tokens": route_request.prompt_tokens,
            "num_keys": len(route_request.keys) // 8,
            "keys": [
                route_request.keys[at : at + 8][::-1].hex()
                for at in range(0, min(len(route_request.keys), 8 * MAX_SHOWN_KEYS), 8)
            ],
            "is_panic": found.is_panic,
        }
        adapter = "" if policy.places_adapters else route_request.adapter
        endpoints, slots = narrow(route_request, found.endpoints, found.slots, (), adapter)
        if not endpoints:
            return shown | {"endpoint": None, "reason": "no engine of the pool may be used"}
        matched = (
            self._index.match(route_request.keys, slots)
            if route_request.keys
            else [0] * len(endpoints)
        )
        count_tier_hits(endpoints, route_request.keys, matched, self._index)
        at = policy.pick(route_request, endpoints, matched)
        scores = policy.explain(route_request, endpoints, matched)
        return shown | describe(
            route_request, policy.name, policy.reason, endpoints, matched, scores, at
        )
