"""Kubernetes Events: what was done and what went wrong, each reason at most once a minute."""

from __future__ import annotations

import hashlib
import logging
from typing import TYPE_CHECKING, Literal

from octavo_operator.cluster.guard import NotLeader
from octavo_operator.errors import ClusterError
from octavo_operator.objects import kinds

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from octavo_operator.cluster.api import Cluster
    from octavo_operator.objects.kinds import Object

logger = logging.getLogger("octavo.operator.events")

COMPONENT = "octavo-operator"
MAX_MESSAGE = 1000  # the API server takes 1024
MAX_REMEMBERED = 20_000


class EventRecorder:
    """A failure to record an Event is logged and never raised."""

    def __init__(
        self,
        cluster: Cluster,
        *,
        clock: Callable[[], float],
        now_text: Callable[[], str],
        least_gap_s: float = 60.0,
    ) -> None:
        self._cluster = cluster
        self._clock = clock
        self._now_text = now_text
        self._least_gap_s = least_gap_s
        self._recorded_at: dict[tuple[str, str], float] = {}  # uid, reason

    async def record(
        self, about: Object, kind: Literal["Normal", "Warning"], reason: str, message: str
    ) -> None:
        key = (kinds.uid_of(about), reason)
        now = self._clock()
        if now - self._recorded_at.get(key, float("-inf")) < self._least_gap_s:
            return
        if len(self._recorded_at) >= MAX_REMEMBERED:
            horizon = now - self._least_gap_s
            self._recorded_at = {k: at for k, at in self._recorded_at.items() if at > horizon}
        self._recorded_at[key] = now
        try:
            await self._cluster.create(self._event(about, kind, reason, message))
        except (ClusterError, NotLeader) as error:
            logger.warning("Could not record an event", extra={"error": str(error)})

    def _event(self, about: Object, kind: str, reason: str, message: str) -> Object:
        at = self._now_text()
        namespace, name = kinds.namespace_of(about), kinds.name_of(about)
        unique = hashlib.sha256(f"{kinds.uid_of(about)} {reason} {at}".encode()).hexdigest()[:16]
        return {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"namespace": namespace, "name": f"{name[:200]}.{unique}"},
            "involvedObject": {
                "apiVersion": about["apiVersion"],
                "kind": about["kind"],
                "namespace": namespace,
                "name": name,
                "uid": kinds.uid_of(about),
                "resourceVersion": about["metadata"].get("resourceVersion", ""),
            },
            "type": kind,
            "reason": reason,
            "message": message[:MAX_MESSAGE],
            "source": {"component": COMPONENT},
            "reportingComponent": COMPONENT,
            "reportingInstance": COMPONENT,
            "firstTimestamp": at,
            "lastTimestamp": at,
            "count": 1,
        }


def by_verb(details: Sequence[str]) -> dict[str, str]:
    """One message per verb (Created, Updated, Flipped, …) that lists all its objects."""
    objects: dict[str, list[str]] = {}
    for detail in details:
        verb, _, what = detail.partition(" ")
        objects.setdefault(verb, []).append(what)
    return {verb: f"{verb} {', '.join(names)}" for verb, names in objects.items()}
