"""Between the operator and its cluster: writes only while we lead, not too many, all counted."""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING, TypeVar

from octavo_operator.errors import ClusterError, ClusterUnavailable, OperatorError
from octavo_operator.objects import kinds

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from octavo_operator.cluster.api import Cluster, Listing
    from octavo_operator.metrics import OperatorMetrics
    from octavo_operator.objects.kinds import Kind, Object

T = TypeVar("T")


class NotLeader(OperatorError):
    """Another replica may lead by now: nothing more is written."""


class TokenBucket:
    """So many at once, so many a second. `take` says how long to wait."""

    def __init__(self, *, per_second: float, burst: int, clock: Callable[[], float]) -> None:
        self._per_second = per_second
        self._burst = float(burst)
        self._tokens = float(burst)
        self._clock = clock
        self._at = clock()

    def take(self) -> float:
        self._fill()
        self._tokens -= 1
        return 0.0 if self._tokens >= 0 else -self._tokens / self._per_second

    def try_take(self) -> bool:
        """For what can be left out: nothing is taken where there is none."""
        self._fill()
        has_one = self._tokens >= 1
        self._tokens -= has_one
        return has_one

    def _fill(self) -> None:
        now = self._clock()
        self._tokens = min(self._burst, self._tokens + (now - self._at) * self._per_second)
        self._at = now


class GuardedCluster:
    """A Cluster. `may_write` is called right before each write, after any waiting, and a write that
    lasts longer than `time_left_s` then says is given up."""

    def __init__(
        self,
        cluster: Cluster,
        *,
        may_write: Callable[[], bool],
        bucket: TokenBucket,
        metrics: OperatorMetrics,
        time_left_s: Callable[[], float] = lambda: math.inf,
    ) -> None:
        self._cluster = cluster
        self._may_write = may_write
        self._time_left_s = time_left_s
        self._bucket = bucket
        self._metrics = metrics

    async def get(self, kind: Kind, namespace: str, name: str) -> Object | None:
        return await self._count("get", kind, self._cluster.get(kind, namespace, name))

    async def find(
        self, kind: Kind, namespace: str | None, *, selector: str = "", fields: str = ""
    ) -> Listing:
        call = self._cluster.find(kind, namespace, selector=selector, fields=fields)
        return await self._count("list", kind, call)

    async def apply(self, body: Object) -> Object:
        await self._admit()
        return await self._write("apply", kinds.kind_of(body), self._cluster.apply(body))

    async def apply_status(self, body: Object) -> Object:
        await self._admit()
        call = self._cluster.apply_status(body)
        return await self._write("apply_status", kinds.kind_of(body), call)

    async def create(self, body: Object) -> Object:
        await self._admit()
        return await self._write("create", kinds.kind_of(body), self._cluster.create(body))

    async def replace(self, body: Object) -> Object:
        await self._admit()
        return await self._write("replace", kinds.kind_of(body), self._cluster.replace(body))

    async def patch(
        self, kind: Kind, namespace: str, name: str, patch: Object, *, subresource: str = ""
    ) -> Object:
        await self._admit()
        call = self._cluster.patch(kind, namespace, name, patch, subresource=subresource)
        return await self._write("patch", kind, call)

    async def set_pod_condition(self, namespace: str, name: str, condition: Object) -> Object:
        await self._admit()
        call = self._cluster.set_pod_condition(namespace, name, condition)
        return await self._write("patch_status", kinds.POD, call)

    async def log(self, namespace: str, pod: str, container: str, *, lines: int) -> str:
        call = self._cluster.log(namespace, pod, container, lines=lines)
        return await self._count("log", kinds.POD, call)

    async def delete(
        self, kind: Kind, namespace: str, name: str, *, uid: str, resource_version: str = ""
    ) -> None:
        await self._admit()
        call = self._cluster.delete(
            kind, namespace, name, uid=uid, resource_version=resource_version
        )
        await self._write("delete", kind, call)

    async def _admit(self) -> None:
        wait_s = self._bucket.take()
        if wait_s > 0:
            await asyncio.sleep(wait_s)
        if not self._may_write():
            raise NotLeader("this replica does not hold the Lease")

    async def _write(self, verb: str, kind: Kind, call: Awaitable[T]) -> T:
        left_s = self._time_left_s()
        try:
            async with asyncio.timeout(None if left_s == math.inf else left_s):
                return await self._count(verb, kind, call)
        except TimeoutError:
            self._metrics.errors[(verb, "TimeoutError")] += 1
            raise ClusterUnavailable(
                f"{verb} of {kind.name}: no answer while the Lease was surely ours"
            ) from None

    async def _count(self, verb: str, kind: Kind, call: Awaitable[T]) -> T:
        self._metrics.calls[(verb, kind.name)] += 1
        try:
            return await call
        except ClusterError as error:
            self._metrics.errors[(verb, type(error).__name__)] += 1
            raise
