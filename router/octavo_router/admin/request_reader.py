"""Reads a body as the proxy would, for /debug/route: what it asks for, and of which pool."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo_router.errors import Rejected
from octavo_router.proxy.paths import PROXIED
from octavo_router.residency.api import ScanError
from octavo_router.routing.request import RouteRequest

if TYPE_CHECKING:
    from octavo_router.residency.api import ScanFunction
    from octavo_router.routing.models import Models


class RequestReader:
    """A `debug.Understand`."""

    def __init__(self, scan: ScanFunction, models: Models) -> None:
        self._scan = scan
        self._models = models

    def __call__(self, path: str, body: bytes) -> RouteRequest:
        proxied = PROXIED.get(path)
        if proxied is None or not proxied.is_json:
            raise Rejected(
                400, "invalid_value", "path must be one that takes a JSON body.", param="path"
            )
        try:
            scan = self._scan(body, proxied.kind, self._models.adapter_contents)
        except ScanError as error:
            raise Rejected(400, "invalid_json", error.message) from None
        route = self._models.resolve(scan.model, request_id="debug", session=scan.session)
        return RouteRequest(
            model=scan.model,
            pool=route.pool,
            revision=route.revision,
            adapter=route.adapter,
            keys=scan.keys,
            prompt_bytes=scan.prompt_bytes,
            prompt_tokens=scan.num_prompt_ids,
            max_tokens=scan.max_tokens,
            num_answers=scan.num_answers,
            stream=scan.stream,
            priority=scan.priority,
            session=scan.session,
            request_id="debug",
        )
