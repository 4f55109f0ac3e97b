"""What all ext_proc streams of a process share: the router's own parts, in the picker's words."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from octavo_router.epp.head import HeadReader
from octavo_router.epp.hints import within
from octavo_router.epp.messages import NONE
from octavo_router.epp.request_reader import PickerRequestReader, no_endpoints
from octavo_router.epp.watch import PickerWatch
from octavo_router.flow.admin import AdminAccess
from octavo_router.flow.quarantine import digest_of, key_of
from octavo_router.http.fields import ADMIN_KEY_HEADER
from octavo_router.proxy.prefill_decode.kv_transfer import prompt_question

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from octavo_router.adapters.fleet import AdapterFleet
    from octavo_router.config.settings import RouterConfig
    from octavo_router.endpoints.registry import Registry
    from octavo_router.epp.head import PickerHead
    from octavo_router.epp.messages import Pair
    from octavo_router.epp.request_reader import PlaceableRequest
    from octavo_router.flow.admission import AdmissionGate
    from octavo_router.flow.quarantine import Quarantine
    from octavo_router.metrics.record import RequestRecord
    from octavo_router.residency.api import ScanFunction
    from octavo_router.routing.dispatcher import Dispatcher, Lease
    from octavo_router.routing.models import Models
    from octavo_router.routing.request import RouteRequest

logger = logging.getLogger("octavo.router")


class PickerMetrics(Protocol):
    def finish(self, record: RequestRecord) -> None: ...


class PickerAccessLog(Protocol):
    def write(self, record: RequestRecord) -> None: ...


@dataclass(slots=True, kw_only=True)
class PickerParts:
    """Everything that a `Picker` is made of."""

    settings: Callable[[], RouterConfig]  # those of now
    registry: Registry
    dispatcher: Dispatcher
    gate: AdmissionGate
    models: Models
    scan: ScanFunction
    metrics: PickerMetrics
    access_log: PickerAccessLog | None
    is_ready: Callable[[], bool]  # its endpoints are known, and it is not ending
    quarantine: Quarantine
    note_quarantine: Callable[[RouteRequest, str, str], None]  # the path, and the body's digest
    admin: AdminAccess = field(default_factory=AdminAccess)
    adapters: AdapterFleet | None = None


class Picker:
    """Belongs to the event loop."""

    def __init__(self, parts: PickerParts) -> None:
        self.dispatcher = parts.dispatcher
        self.gate = parts.gate
        self.adapters = parts.adapters
        self.is_ready = parts.is_ready
        self.quarantine = parts.quarantine
        self.note_quarantine = parts.note_quarantine
        self.asker = PickerRequestReader(parts.registry, parts.models, parts.scan)
        self._admin = parts.admin
        self._registry = parts.registry
        self._settings = parts.settings
        self._metrics = parts.metrics
        self._access_log = parts.access_log
        self._heads = HeadReader(parts.settings())
        self._has_warned = False
        self._id_prefix = f"req-{os.urandom(5).hex()}-"
        self._num_ids = 0

    @property
    def config(self) -> RouterConfig:
        return self._settings()

    @property
    def max_body_bytes(self) -> int:
        return self._settings().limits.max_body_bytes

    def new_request_id(self) -> str:
        self._num_ids += 1
        return f"{self._id_prefix}{self._num_ids:x}"

    def read_head(self, pairs: Iterable[Pair]) -> PickerHead:
        """Raises Rejected."""
        config = self._settings()
        if self._heads.config is not config:  # it was reloaded
            self._heads = HeadReader(config)
        return self._heads.read(pairs)

    def may_explain(self, head: PickerHead) -> bool:
        """By its keys alone: who is behind the gateway cannot be seen."""
        shown = (
            (b"authorization", head.authorization.encode("latin-1")),
            (ADMIN_KEY_HEADER.encode(), head.admin_key),
        )
        return self._admin.allows_fields("", shown)

    def place_prompt(
        self,
        head: PickerHead,
        placeable: PlaceableRequest,
        lease: Lease,
        subset: tuple[str, ...] | None,
    ) -> Lease | None:
        """An engine to compute the prompt, where a sidecar shall fetch it; None: the answering one
        does."""
        path, request = head.known_path, placeable.request
        if (
            path is None
            or not path.hands_over
            or not self.dispatcher.wants_prompt(lease)
            or prompt_question(placeable.body, request) is None
        ):
            return None
        found = self._registry.prefillers(request.pool, request.revision).endpoints
        allowed = None if subset is None else within(subset, found)
        prompt = self.dispatcher.place_prompt(lease, allowed=allowed)
        if prompt is not None:
            lease.decision.prompt_at = prompt.endpoint.spec.address.authority
        return prompt

    def watch(self, head: PickerHead, placeable: PlaceableRequest) -> PickerWatch:
        """Of a request that is about to be placed. Raises Rejected where it is quarantined, or
        where an engine died of it and a copy is under way at another: nothing can wait here."""
        request, quarantine = placeable.request, self.quarantine
        watch = PickerWatch(quarantine, key_of(request.pool, head.path, placeable.body))
        if (error := quarantine.refusal(watch.key)) is not None:
            raise error
        if not quarantine.is_suspect(watch.key):
            return watch
        watch.digest = digest_of(placeable.body)
        ids = quarantine.engines(watch.key)
        if ids is None:
            return watch
        found = self._registry.routable(request.pool, request.revision)
        allowed = tuple(one.spec.address.authority for one in found if one.spec.id in ids)
        request.subset = within(request.subset, found) if request.subset else allowed
        request.subset = tuple(one for one in request.subset if one in allowed)
        if not request.subset:
            raise no_endpoints("An engine ended while it answered this request; try it later.")
        return watch

    def report(self, record: RequestRecord) -> None:
        """A request is over."""
        self._metrics.finish(record)
        if self._access_log is not None:
            self._access_log.write(record)

    def warn_of_mode(self, mode: int) -> None:
        """Said once: whoever configured it does not look at every request."""
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "Picks without seeing bodies: set the gateway's request_body_mode to "
                "FULL_DUPLEX_STREAMED or BUFFERED",
                extra={"request_body_mode": "NONE" if mode == NONE else "STREAMED"},
            )
