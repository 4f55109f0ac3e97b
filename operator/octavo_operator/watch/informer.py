"""From watches and lists to the cache, and from the cache to the queue of keys."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from octavo_common.heap import give_memory_back
from octavo_engine.protocol.kubernetes import DEPLOYMENT_LABEL
from octavo_operator.cluster.api import Listing
from octavo_operator.decide.observed import DeploymentKey
from octavo_operator.errors import ApiRefused, ClusterError, NotFound
from octavo_operator.objects import kinds
from octavo_operator.watch.world import LISTED, WATCHED

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from random import Random

    from octavo_operator.cluster.api import Cluster
    from octavo_operator.metrics import OperatorMetrics
    from octavo_operator.objects.kinds import Kind, Object
    from octavo_operator.watch.world import World

logger = logging.getLogger("octavo.operator.intake")

RETRY_S = 2.0
OPTIONAL_TRIES = 5  # at start; an optional kind must not block the others
NEWEST = 1 << 62  # a version above all
SETTLE_S = 1.0  # a listing comes as a burst of events; one list after it is enough


class Informer:
    """The cache's only writer besides reconciles.

    Watches report changes, but not deletions during an interruption: whenever one has listed
    anew, and every few minutes anyway, each kind is listed as a whole and compared.
    """

    def __init__(
        self,
        cluster: Cluster,
        world: World,
        *,
        namespaces: Sequence[str],
        wake: Callable[[DeploymentKey], None],
        served: Callable[[frozenset[str]], None] = lambda capabilities: None,
        metrics: OperatorMetrics,
        clock: Callable[[], float],
        rng: Random,
        every_s: float = 300.0,
    ) -> None:
        self._cluster = cluster
        self._world = world
        self._namespaces: Sequence[str | None] = namespaces or (None,)
        self._wake = wake
        self._served = served  # called with the optional kinds there are, whenever they change
        self._metrics = metrics
        self._clock = clock
        self._rng = rng
        self._every_s = every_s
        self._relisted: set[Kind] = set()
        self._refused: set[tuple[Kind, str | None]] = set()  # where a list was not allowed
        self._capabilities: frozenset[str] = frozenset()
        self._relist_due = asyncio.Event()
        self.last_heard_at = clock()  # from a watch or a list
        self.tried_at = clock()  # to list, whatever came of it

    @property
    def max_age_s(self) -> float:
        """If the last event is older, this process or the API server is at fault; if no list was
        even tried for so long, it is this process."""
        return 2 * self._every_s + 60.0

    def event(self, kind: Kind, event_type: str | None, body: Object) -> None:
        """One event of a watch. `event_type` is None for what it listed when it began."""
        self._metrics.watch_events[kind.name] += 1
        self.last_heard_at = self._clock()
        body.setdefault("apiVersion", kind.api_version)
        body.setdefault("kind", kind.name)
        if event_type == "DELETED":
            if kind == kinds.LLM_DEPLOYMENT:  # its names are free
                for rival in self._world.rivals(
                    DeploymentKey(kinds.namespace_of(body), kinds.name_of(body))
                ):
                    self._wake(rival)
            key = self._world.drop(kind, body)
        else:
            key = self._world.keep(kind, body)
        if key is not None:
            self._wake(key)
        if event_type is None and kind in self._world.synced:
            self._relisted.add(kind)
            self._relist_due.set()

    async def fill(self) -> None:
        """List everything once; returns when that has succeeded."""
        for kind in WATCHED:
            while True:
                try:
                    await self.refresh(kind)
                    break
                except ClusterError as error:
                    logger.warning("Could not list", extra={"kind": kind.name, "error": str(error)})
                    await asyncio.sleep(RETRY_S)
        for _ in range(OPTIONAL_TRIES):
            if await self.refresh_optional():
                return
            await asyncio.sleep(RETRY_S)

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            wait_s = self._every_s * (0.9 + 0.2 * self._rng.random())
            try:
                async with asyncio.timeout(wait_s):
                    await self._relist_due.wait()
                await asyncio.sleep(SETTLE_S)
                stale: set[Kind] = self._relisted
            except TimeoutError:
                stale = set(WATCHED)
                await self.refresh_optional()
            self._relisted = set()
            self._relist_due.clear()
            for kind in WATCHED:
                if kind in stale:
                    await self._try(kind)
            # Lists of everything are the most that is read at once. Of what they took, the C
            # library would keep more after each interruption.
            give_memory_back()

    async def refresh(self, kind: Kind) -> None:
        """Compare with the whole list. Raises ClusterError."""
        self.tried()
        await self._compare(kind)
        self.last_heard_at = self._clock()
        self._metrics.num_objects = len(self._world)
        self._metrics.num_deployments = len(self._world.all_keys())

    def tried(self) -> None:
        self.tried_at = self._clock()

    async def refresh_optional(self) -> bool:
        """Which optional kinds there are, and what we have of them. False where that is not known
        of all; what was known of the others stays."""
        present, is_known = set(self._capabilities), True
        for kind in LISTED:
            try:
                await self._compare(kind)
                present.add(kind.capability)
            except (NotFound, ApiRefused) as error:
                # Not installed, or not for us: either way we cannot use it.
                if isinstance(error, ApiRefused) or kind.capability in present:
                    details = {"kind": kind.name, "error": str(error)}
                    logger.warning("Optional kind is not available", extra=details)
                present.discard(kind.capability)
                self._world.replace(kind, Listing([], NEWEST))
            except ClusterError as error:
                logger.warning("Could not list", extra={"kind": kind.name, "error": str(error)})
                is_known = False
        if frozenset(present) != self._capabilities:
            self._capabilities = frozenset(present)
            self._served(self._capabilities)
        return is_known

    async def _compare(self, kind: Kind) -> None:
        """A namespace that refuses, such as one that was deleted with its Role, keeps no other from
        being compared; what is known of it stays. Raises ApiRefused where all do."""
        is_users = kind in (kinds.LLM_DEPLOYMENT, kinds.LLM_ADAPTER)
        selector = "" if is_users else DEPLOYMENT_LABEL
        refusals: list[ApiRefused] = []
        for namespace in self._namespaces:
            try:
                listing = await self._cluster.find(kind, namespace, selector=selector)
            except NotFound:
                if kind.is_optional:
                    raise
                listing = Listing([], NEWEST)  # with a CRD go all its resources
            except ApiRefused as error:
                self._note_refusal(kind, namespace, error)
                refusals.append(error)
                continue
            self._refused.discard((kind, namespace))
            for key in self._world.replace(kind, listing, namespace=namespace):
                self._wake(key)
        if len(refusals) == len(self._namespaces):
            raise refusals[0]

    def _note_refusal(self, kind: Kind, namespace: str | None, error: ApiRefused) -> None:
        if (kind, namespace) not in self._refused:
            self._refused.add((kind, namespace))
            details = {"kind": kind.name, "namespace": namespace, "error": str(error)}
            logger.warning("Not permitted to list in a namespace", extra=details)

    async def _try(self, kind: Kind) -> None:
        try:
            await self.refresh(kind)
        except ClusterError as error:
            logger.warning("Could not list", extra={"kind": kind.name, "error": str(error)})
            self._relisted.add(kind)
            await asyncio.sleep(RETRY_S)
            self._relist_due.set()
