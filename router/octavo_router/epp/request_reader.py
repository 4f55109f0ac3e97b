"""From a request as the gateway shows it to one that can be placed: its model, its pool, its keys.

a body of JSON             its model decides; invalid 400, no model 400, unknown model 404
no body, or another kind   x-gateway-model-name decides, else any pool that may be chosen
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo_router.epp.hints import within
from octavo_router.errors import Rejected
from octavo_router.proxy.privileged_fields import for_engines
from octavo_router.residency.api import OTHER, ScanError
from octavo_router.routing.request import RouteRequest

if TYPE_CHECKING:
    from octavo_router.endpoints.registry import Registry
    from octavo_router.epp.head import PickerHead
    from octavo_router.flow.keys import KeyLimits
    from octavo_router.residency.api import ScanFunction
    from octavo_router.routing.models import ModelRoute, Models

_NO_ENDPOINTS_RETRY_S = 10.0


@dataclass(frozen=True, slots=True)
class PlaceableRequest:
    """What to place, and the body that engines get."""

    request: RouteRequest
    body: bytes
    is_rewritten: bool = False  # the body is not the client's
    must_queue: bool = True  # it makes an engine work
    is_known: bool = True  # its model is one of those there are
    is_canary: bool = False  # it goes to another adapter than the one it names

    @property
    def model(self) -> str:
        """As metrics and the access log count it."""
        return self.request.adapter if self.is_canary else self.request.model


class PickerRequestReader:
    """Reads bodies and settles names."""

    def __init__(self, registry: Registry, models: Models, scan: ScanFunction) -> None:
        self._registry = registry
        self._models = models
        self._scan = scan

    def ask(
        self, head: PickerHead, body: bytes, subset: tuple[str, ...] | None, limits: KeyLimits
    ) -> PlaceableRequest:
        """Raises Rejected."""
        request = RouteRequest()
        request.request_id = head.request_id
        request.explain = head.explain
        request.session = head.session
        if head.may_pass_through:
            return self._ask_by_head(request, head, body, subset)
        kind = head.known_path.kind if head.known_path is not None else OTHER
        adapters = self._models.adapter_contents
        try:
            scan = self._scan(body, kind, adapters)
            sent, body = body, for_engines(body, scan, limits, head.known_path)
            if body is not sent:
                scan = self._scan(body, kind, adapters)
        except ScanError as error:
            raise Rejected(400, "invalid_json", error.message) from None
        request.model = scan.model or head.model
        request.take(scan)
        request.session = head.session or scan.session
        needs_model = head.known_path is None or head.known_path.generates
        if not request.model and needs_model:
            raise Rejected(400, "missing_model", "model is required.", param="model")
        route = self._settle(request, subset)
        if route.is_canary:
            request.keys = self._scan(body, kind, {request.model: adapters[route.adapter]}).keys
        if route.upstream_model and scan.model_end:
            name = json.dumps(route.upstream_model).encode()
            body = b"".join((body[: scan.model_start], name, body[scan.model_end :]))
            return PlaceableRequest(
                request, body, is_rewritten=True, is_known=route.is_known, is_canary=route.is_canary
            )
        return PlaceableRequest(
            request, body, is_rewritten=body is not sent, is_known=route.is_known
        )

    def _ask_by_head(
        self, request: RouteRequest, head: PickerHead, body: bytes, subset: tuple[str, ...] | None
    ) -> PlaceableRequest:
        request.prompt_bytes = len(body)
        request.model = head.model
        is_known = False
        if head.model:
            is_known = self._settle(request, subset, is_fixed=True).is_known
        else:
            request.pool = self._any_pool(subset)
            self._narrow(request, subset)
        return PlaceableRequest(
            request, body, must_queue=head.known_path is not None, is_known=is_known
        )

    def _settle(
        self, request: RouteRequest, subset: tuple[str, ...] | None, *, is_fixed: bool = False
    ) -> ModelRoute:
        """`is_fixed`: the body stays as it is, with the name in it."""
        route = self._models.resolve(
            request.model,
            request_id=request.request_id,
            session=request.session,
            is_fixed=is_fixed,
        )
        request.pool, request.revision = route.pool, route.revision
        request.adapter = route.adapter
        if subset is not None and not self._may_choose(request, subset):
            # The gateway's pool may be another one that serves the same model.
            for pool in self._models.pools_of(request.model):
                if within(subset, self._registry.routable(pool)):
                    request.pool, request.revision = pool, ""
                    break
        self._narrow(request, subset)
        return route

    def _narrow(self, request: RouteRequest, subset: tuple[str, ...] | None) -> None:
        if subset is None:
            return
        request.subset = self._may_choose(request, subset)
        if not request.subset:
            raise no_endpoints("None of the endpoints that the gateway offers is ready.")

    def _may_choose(self, request: RouteRequest, subset: tuple[str, ...]) -> tuple[str, ...]:
        return within(subset, self._registry.routable(request.pool, request.revision))

    def _any_pool(self, subset: tuple[str, ...] | None) -> str:
        for pool in self._registry.pools:
            endpoints = self._registry.routable(pool)
            if within(subset, endpoints) if subset is not None else endpoints:
                return pool
        raise no_endpoints("No engine is ready.")


def no_endpoints(message: str) -> Rejected:
    """No endpoint may serve it now."""
    return Rejected(503, "no_endpoints", message, retry_after_s=_NO_ENDPOINTS_RETRY_S)
