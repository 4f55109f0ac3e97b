"""One writer among several replicas: a Lease, held, renewed, and given back.

The fence is time, measured on our own monotonic clock from *before* the last renewal was sent:
when `duration - margin` has passed since, we begin no more writes, and before anybody else may
begin we give up those under way (`time_left_s`). Others take the Lease over only after they have
seen it unchanged for the whole duration on their own clock, so that clocks which disagree do no
harm. So it is with a Lease that has vanished. What the API server still does with a write that we
have given up is bound by its precondition: what was seen must still be there.

The Lease belongs to the operator's Deployment: it goes when that is deleted, however we end.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo_operator.errors import ApiRefused, ClusterError, Conflict, NotFound
from octavo_operator.objects import kinds

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from octavo_operator.cluster.api import Cluster
    from octavo_operator.objects.kinds import Object

logger = logging.getLogger("octavo.operator.leader")


@dataclass(frozen=True, slots=True)
class LeaseTimes:
    duration_s: float = 15.0  # others wait so long after the last renewal they saw
    renew_every_s: float = 5.0
    margin_s: float = 3.0  # for the last write that was begun


class Leader:
    """Tries to hold the Lease. `is_leading` is the fence."""

    def __init__(
        self,
        cluster: Cluster,
        *,
        namespace: str,
        name: str,
        identity: str,
        clock: Callable[[], float],
        now_text: Callable[[], str],
        times: LeaseTimes | None = None,
        deployment: str = "",
    ) -> None:
        """`deployment`: the operator's own, in the same namespace; empty: there is none."""
        self._cluster = cluster
        self._namespace = namespace
        self._name = name
        self._identity = identity
        self._clock = clock
        self._now_text = now_text
        self._times = times or LeaseTimes()
        self._deployment = deployment
        self._owners: list[Object] | None = None  # None: not read yet
        self._lease: Object | None = None  # as we wrote it last
        self._held_until = float("-inf")
        self._term = 0  # how often we became the leader
        self._seen: tuple[str, float] = ("", float("-inf"))  # resourceVersion, when it was new

    def is_leading(self) -> bool:
        return self._clock() < self._held_until

    def time_left_s(self) -> float:
        """Until another may begin to write: what we have begun must have ended by then."""
        return self._held_until + self._times.margin_s - self._clock()

    async def run(self, began: Callable[[], None]) -> None:
        """Until cancelled. `began` is called whenever we have become the leader: also where the
        lead was lost and won again during one try, for what was refused meanwhile waits for it."""
        was_leading, term = False, self._term
        while True:
            began_at = self._clock()
            try:
                async with asyncio.timeout(self._times.duration_s - self._times.margin_s):
                    await self.try_once()
            except (ClusterError, TimeoutError) as error:
                logger.warning("Could not reach the Lease", extra={"error": str(error)})
            if was_leading and (not self.is_leading() or self._term != term):
                logger.info("Is no longer the leader", extra={"identity": self._identity})
            if self.is_leading() and self._term != term:
                logger.info("Became the leader", extra={"identity": self._identity})
                began()
            was_leading, term = self.is_leading(), self._term
            # Where the API server takes seconds, the next renewal begins the sooner.
            took_s = self._clock() - began_at
            await asyncio.sleep(max(0.0, self._times.renew_every_s - took_s))

    async def try_once(self) -> bool:
        """Take or renew the Lease if it can be ours; whether we lead."""
        if self._owners is None:
            self._owners = await self._find_owners()
        known, self._lease = self._lease, None
        if known is not None and self.is_leading():
            with suppress(Conflict, NotFound):  # somebody else wrote or deleted it: look again
                return await self._write(self._cluster.replace, self._renewed(known))
        lease = await self._cluster.get(kinds.LEASE, self._namespace, self._name)
        with suppress(Conflict):  # another was faster
            if lease is None and self._may_create():
                return await self._write(self._cluster.create, self._body(0, self._now_text()))
            if lease is not None and self._may_take(lease):
                return await self._write(self._cluster.replace, self._renewed(lease))
        self._held_until = float("-inf")
        return False

    async def _write(self, write: Callable[[Object], Awaitable[Object]], body: Object) -> bool:
        sent_at = self._clock()
        self._lease = stored = await write(body)
        self._seen = (str(stored["metadata"]["resourceVersion"]), sent_at)
        self._term += not self.is_leading()
        self._held_until = sent_at + self._times.duration_s - self._times.margin_s
        return self.is_leading()

    async def give_back(self) -> None:
        """So that the next one need not wait. From now on nothing is written."""
        was_leading = self.is_leading()
        self._held_until = float("-inf")
        if not was_leading:
            return
        try:
            lease = await self._cluster.get(kinds.LEASE, self._namespace, self._name)
            if lease is None or _spec(lease).get("holderIdentity") != self._identity:
                return
            lease["spec"]["holderIdentity"] = ""
            await self._cluster.replace(lease)
        except ClusterError as error:  # it will run out by itself
            logger.warning("Could not give back the Lease", extra={"error": str(error)})

    async def _find_owners(self) -> list[Object]:
        """One owner, or none if it cannot be found: then the Lease outlives us, without harm."""
        if not self._deployment:
            return []
        try:
            found = await self._cluster.get(kinds.DEPLOYMENT, self._namespace, self._deployment)
        except ApiRefused as error:
            logger.warning("May not read our own Deployment", extra={"error": str(error)})
            return []
        if found is None:
            logger.warning("Found no Deployment of ours", extra={"deployment": self._deployment})
            return []
        api_version, kind = kinds.DEPLOYMENT.api_version, kinds.DEPLOYMENT.name
        reference = {"apiVersion": api_version, "kind": kind, "name": self._deployment}
        return [{**reference, "uid": kinds.uid_of(found)}]

    def _may_create(self) -> bool:
        """It was deleted: its holder notices only when it renews."""
        return self.is_leading() or self._clock() - self._seen[1] >= self._times.duration_s

    def _may_take(self, lease: Object) -> bool:
        holder = _spec(lease).get("holderIdentity") or ""
        if holder in ("", self._identity):
            return True
        version = str(lease["metadata"]["resourceVersion"])
        now = self._clock()
        if self._seen[0] != version:
            self._seen = (version, now)
            return False
        duration_s = max(
            float(_spec(lease).get("leaseDurationSeconds") or 0), self._times.duration_s
        )
        return now - self._seen[1] >= duration_s

    def _renewed(self, lease: Object) -> Object:
        spec = _spec(lease)
        is_ours = spec.get("holderIdentity") == self._identity
        transitions = int(spec.get("leaseTransitions") or 0)
        acquired_at = spec.get("acquireTime") if is_ours else None
        body = self._body(
            transitions if is_ours else transitions + 1, acquired_at or self._now_text()
        )
        body["metadata"] = {**lease["metadata"], **self._owned()}
        return body

    def _owned(self) -> Object:
        return {"ownerReferences": self._owners} if self._owners else {}

    def _body(self, transitions: int, acquired_at: str) -> Object:
        return {
            "apiVersion": kinds.LEASE.api_version,
            "kind": kinds.LEASE.name,
            "metadata": {"namespace": self._namespace, "name": self._name, **self._owned()},
            "spec": {
                "holderIdentity": self._identity,
                "leaseDurationSeconds": int(self._times.duration_s),
                "acquireTime": acquired_at,
                "renewTime": self._now_text(),
                "leaseTransitions": transitions,
            },
        }


def _spec(lease: Object) -> Object:
    """Anybody may have made it, and left it empty."""
    spec: Object = lease.get("spec") or {}
    return spec
