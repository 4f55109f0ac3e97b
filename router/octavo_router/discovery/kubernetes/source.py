"""The Kubernetes source: mirrors of pods, Services and EndpointSlices, reported as endpoints."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from octavo_engine.protocol.kubernetes import (
    COMPONENT_LABEL,
    DEPLOYMENT_LABEL,
    ENGINE_COMPONENT,
    PREFILL_COMPONENT,
)
from octavo_router.discovery.kubernetes import specs
from octavo_router.discovery.kubernetes.objects import EndpointSlice, KubernetesService, Pod
from octavo_router.discovery.kubernetes.readiness_damping import Steadiness
from octavo_router.discovery.kubernetes.watch import Mirror, WatchSettings

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from octavo_router.discovery.kubernetes.account import ServiceAccount
    from octavo_router.discovery.source import Publish
    from octavo_router.metrics import DiscoveryCounts

logger = logging.getLogger(__name__)

POD_SELECTOR = f"{DEPLOYMENT_LABEL},{COMPONENT_LABEL} in ({ENGINE_COMPONENT},{PREFILL_COMPONENT})"
COALESCE_S = 0.02  # a rollout changes many objects at once


@dataclass
class _Namespace:
    """What is mirrored of one namespace; "" is all of them."""

    pods: Mirror[Pod]
    services: Mirror[KubernetesService]
    slices: Mirror[EndpointSlice]
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    has_slices: bool = False  # they are mirrored only where somebody wants them
    needs_slices: bool = False  # a plain Service wants routing; else they tell zones alone


class KubernetesSource:
    """A source. Namespaces are named one by one, or "*" for all."""

    name = "kubernetes"

    def __init__(
        self,
        account: ServiceAccount,
        namespaces: Sequence[str] = (),
        *,
        label_selector: str = "",
        counts: DiscoveryCounts,
        settings: WatchSettings | None = None,
        reads_zones: bool = False,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._counts = counts
        self._now = now
        self._changed = asyncio.Event()
        self._steadiness = Steadiness()
        self._reported: set[specs.Problem] = set()
        self._reads_zones = reads_zones
        self._zones: dict[str, str] = {}  # by pod UID, kept while a pod is in no slice
        self._account = account
        self._settings = settings or WatchSettings()
        wanted = ["*"] if "*" in namespaces else list(namespaces) or [account.namespace]
        self._namespaces = [self._mirrors(each, label_selector) for each in wanted]

    async def run(self, publish: Publish) -> None:
        try:
            for namespace in self._namespaces:
                self._start(namespace, namespace.pods)
                self._start(namespace, namespace.services)
            while True:
                await self._wait()
                self._look(publish)
        finally:
            tasks = [task for namespace in self._namespaces for task in namespace.tasks]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for namespace in self._namespaces:
                namespace.tasks.clear()
                namespace.has_slices = namespace.needs_slices = False

    def _mirrors(self, namespace: str, selector: str) -> _Namespace:
        scope = "" if namespace == "*" else f"/namespaces/{namespace}"
        common: dict[str, Any] = {
            "counts": self._counts,
            "on_change": self._changed.set,
            "settings": self._settings,
        }
        slices = f"/apis/discovery.k8s.io/v1{scope}/endpointslices"
        return _Namespace(
            pods=Mirror(
                f"/api/v1{scope}/pods", Pod, self._account, selector=POD_SELECTOR, **common
            ),
            services=Mirror(
                f"/api/v1{scope}/services",
                KubernetesService,
                self._account,
                selector=selector,
                **common,
            ),
            # A slice carries its Service's labels, so the same selector finds it.
            slices=Mirror(slices, EndpointSlice, self._account, selector=selector, **common),
        )

    def _start(self, namespace: _Namespace, mirror: Mirror[Any]) -> None:
        namespace.tasks.append(asyncio.create_task(self._keep_running(mirror)))

    async def _keep_running(self, mirror: Mirror[Any]) -> None:
        while True:
            try:
                await mirror.run()
            except Exception:
                self._counts.errors += 1
                logger.exception("Unhandled error in a Kubernetes API response")
                await asyncio.sleep(self._settings.backoff_max_s)

    async def _wait(self) -> None:
        """For a change, or for a pod that is held back to prove steady."""
        again_at = self._steadiness.look_again_at
        try:
            async with asyncio.timeout(None if again_at is None else again_at - self._now()):
                await self._changed.wait()
        except TimeoutError:
            return
        await asyncio.sleep(COALESCE_S)

    def _look(self, publish: Publish) -> None:
        self._changed.clear()
        services = [s for each in self._namespaces for s in each.services.objects.values()]
        wanted, problems = specs.served(services)
        self._complain(problems)
        for namespace in self._namespaces:
            namespace.needs_slices = namespace.needs_slices or self._wants_slices(namespace)
            if not namespace.has_slices and (namespace.needs_slices or self._reads_zones):
                namespace.has_slices = True
                self._start(namespace, namespace.slices)
        if not self._is_synced():
            return
        pods = [pod for each in self._namespaces for pod in each.pods.objects.values()]
        slices = [part for each in self._namespaces for part in each.slices.objects.values()]
        if self._reads_zones:
            uids = {pod.metadata.uid for pod in pods}
            known = {**self._zones, **dict(specs.zones_of(slices))}
            self._zones = {uid: zone for uid, zone in known.items() if uid in uids}
        found = specs.find(
            wanted,
            pods,
            slices,
            steadiness=self._steadiness,
            now=self._now(),
            zones=self._zones,
        )
        publish(found)

    def _is_synced(self) -> bool:
        """A namespace that may not be read, such as one that was deleted with its Role, keeps no
        other from being served; where none may be read, nothing is known."""
        synced = [namespace for namespace in self._namespaces if _is_synced(namespace)]
        return bool(synced) and all(
            namespace in synced or _is_forbidden(namespace) for namespace in self._namespaces
        )

    def _wants_slices(self, namespace: _Namespace) -> bool:
        wanted, _ = specs.served(namespace.services.objects.values())
        return any(not each.has_pods for each in wanted)

    def _complain(self, problems: list[specs.Problem]) -> None:
        for problem in set(problems) - self._reported:
            logger.warning(
                "Ignored a routing annotation", extra={"object": problem.where, "why": problem.what}
            )
        self._reported = set(problems)


def _is_synced(namespace: _Namespace) -> bool:
    slices = namespace.slices.is_synced or not namespace.needs_slices
    return namespace.pods.is_synced and namespace.services.is_synced and slices


def _is_forbidden(namespace: _Namespace) -> bool:
    """For zones alone no right is needed: without it they are not known."""
    slices = namespace.needs_slices and namespace.slices.is_forbidden
    return namespace.pods.is_forbidden or namespace.services.is_forbidden or slices
