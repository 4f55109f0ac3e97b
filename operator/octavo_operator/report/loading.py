"""Progress of the next pod, and the model its fetch found: from pods, a log's last line, routers.

Read at most every few seconds per LLMDeployment, and only while a pod is starting, so that it does
not cause more writes of the status.
"""

from __future__ import annotations

import asyncio
import json
import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from octavo_engine.protocol.loading import FETCHING, LoadProgress
from octavo_operator.errors import ApiRefused, ClusterError
from octavo_operator.objects import kinds, labels
from octavo_operator.objects.names import ENGINE_CONTAINER, FETCH_CONTAINER

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from octavo_operator.cluster.api import Cluster
    from octavo_operator.objects.kinds import Object
    from octavo_operator.routers.poller import RouterDemand

logger = logging.getLogger("octavo.operator.loading")

EVERY_S = 5.0
LOG_S = 2.0  # a kubelet that does not answer must not hold a worker
DENIED_S = 600.0  # after a refusal of the log; a Role may change
MAX_BYTES = 2**53

Phase = Literal["Pending", "Fetching", "Loading", "Ready"]
_ORDER: tuple[Phase, ...] = ("Pending", "Fetching", "Loading", "Ready")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadingState:
    """Where the most advanced replica of the new revision is, before it serves."""

    phase: Phase
    pod: str = ""
    percent: int | None = None
    bytes_done: int | None = None
    bytes_total: int | None = None
    bytes_per_s: int | None = None
    remaining_s: int | None = None
    message: str = ""

    def to_status(self) -> Object:
        fields = {
            "phase": self.phase,
            "pod": self.pod or None,
            "percent": self.percent,
            "bytesDone": self.bytes_done,
            "bytesTotal": self.bytes_total,
            "bytesPerSecond": self.bytes_per_s,
            "remainingSeconds": self.remaining_s,
            "message": self.message[:512] or None,
        }
        return {name: value for name, value in fields.items() if value is not None}


class LoadingReader:
    """Confined to the event loop. Losing its state costs one read."""

    def __init__(self, cluster: Cluster, demand: RouterDemand, clock: Callable[[], float]) -> None:
        self._cluster = cluster
        self._demand = demand
        self._clock = clock
        # by UID of the LLMDeployment: when, of which pod in which phase, what
        self._last: dict[str, tuple[float, tuple[Phase, str], LoadingState]] = {}
        self._denied_at = float("-inf")

    async def read(
        self,
        uid: str,
        pods: Sequence[Object],
        workers: Mapping[str, Sequence[Object]] | None = None,
    ) -> LoadingState | None:
        """`pods`: those of the new revision that serve; `workers` of groups, by the UID of the pod
        that they compute for. None where there are none."""
        groups = [(pod, (workers or {}).get(kinds.uid_of(pod), ())) for pod in pods]
        found = most_advanced(groups, self._demand.loading)
        if found is None:
            self._last.pop(uid, None)
            return None
        phase, pod = found
        rank = kinds.labels_of(pod).get(labels.RANK_LABEL, "0")
        if phase in ("Pending", "Ready"):
            self._last.pop(uid, None)
            percent = 100 if phase == "Ready" else None
            if rank == "0":
                return LoadingState(phase=phase, percent=percent)
            text = f"Its group waits for rank {rank}, which does not run yet."
            return LoadingState(phase=phase, pod=kinds.name_of(pod), message=text)
        now = self._clock()
        subject = (phase, kinds.name_of(pod))
        last = self._last.get(uid)
        if last is not None and last[1] == subject and now - last[0] < EVERY_S:
            return last[2]
        loading = await self._look(phase, pod)
        if rank != "0":
            loading = replace(loading, message=f"Rank {rank}: {loading.message}".rstrip(": "))
        self._last[uid] = (now, subject, loading)
        return loading

    def forget(self, uid: str) -> None:
        self._last.pop(uid, None)

    async def _look(self, phase: Phase, pod: Object) -> LoadingState:
        name = kinds.name_of(pod)
        if phase == "Loading":
            uid = kinds.uid_of(pod)
            return loaded(name, self._demand.loading(uid), self._demand.progress(uid))
        return fetched_so_far(name, await self._log(pod))

    async def _log(self, pod: Object) -> str:
        """The last lines of the fetch; empty if they cannot be read."""
        now = self._clock()
        if now - self._denied_at < DENIED_S:
            return ""
        namespace, name = kinds.namespace_of(pod), kinds.name_of(pod)
        try:
            async with asyncio.timeout(LOG_S):
                return await self._cluster.log(namespace, name, FETCH_CONTAINER, lines=3)
        except ApiRefused as error:
            if error.status == 403:
                self._denied_at = now
                details = {"error": str(error), "advice": "grant get on pods/log"}
                logger.warning("Not permitted to read the progress of fetches", extra=details)
        except (ClusterError, TimeoutError) as error:
            logger.debug(
                "Could not read the log of a fetch", extra={"pod": name, "error": str(error)}
            )
        return ""


def most_advanced(
    groups: Sequence[tuple[Object, Sequence[Object]]], loading: Callable[[str], float | None]
) -> tuple[Phase, Object] | None:
    """Of equals the one that has loaded most, else the first by name. A group, which is a pod that
    serves and its workers, is where the slowest of its pods is."""
    return max(
        (slowest(*group) for group in sorted(groups, key=lambda group: kinds.name_of(group[0]))),
        key=lambda found: (_ORDER.index(found[0]), loading(kinds.uid_of(found[1])) or 0.0),
        default=None,
    )


def slowest(leader: Object, workers: Sequence[Object]) -> tuple[Phase, Object]:
    """Of equals the leader, which reports most, then the lowest rank. A worker reports nothing: it
    counts until its engine runs."""
    first = _phase(leader)
    if first == "Ready":
        return first, leader
    ranked = sorted(workers, key=lambda pod: int(kinds.labels_of(pod)[labels.RANK_LABEL]))
    behind = [(_phase(pod), pod) for pod in ranked]
    late = [found for found in behind if found[0] in ("Pending", "Fetching")]
    return min([(first, leader), *late], key=lambda found: _ORDER.index(found[0]))


def loaded(pod: str, share: float | None, progress: LoadProgress | None) -> LoadingState:
    """`share` of the weights, from 0 to 1; `progress` in bytes, from engines that report it."""
    percent = None if share is None else int(100 * min(1.0, max(0.0, share)))
    if progress is None:
        message = "" if percent is None else f"Loading weights: {percent} %."
        return LoadingState(phase="Loading", pod=pod, percent=percent, message=message)
    return _of_progress(pod, progress, percent)


def _of_progress(pod: str, progress: LoadProgress, percent: int | None) -> LoadingState:
    text = str(progress)
    return LoadingState(
        # An engine fetches by itself if no init container did.
        phase="Fetching" if progress.phase == FETCHING else "Loading",
        pod=pod,
        percent=percent if progress.share is None else int(100 * progress.share),
        bytes_done=progress.bytes_done,
        bytes_total=progress.bytes_total or None,
        bytes_per_s=progress.bytes_per_s or None,
        remaining_s=progress.remaining_s,
        message=f"{text[0].upper()}{text[1:]}.",
    )


def fetched_so_far(pod: str, log: str) -> LoadingState:
    """From lines of JSON as `octavo fetch` writes them."""
    facts = last_facts(log)
    if facts.get("phase") == "waiting":
        text = "Waiting for another pod, which fetches the same model into the same volume."
        return LoadingState(phase="Fetching", pod=pod, message=text)
    done, total = _count(facts.get("bytes")), _count(facts.get("total"))
    if done is None or not total:
        return LoadingState(phase="Fetching", pod=pod, bytes_done=done)
    progress = LoadProgress(FETCHING, done, total, _count(facts.get("rate")) or 0)
    return _of_progress(pod, progress, None)


def found_model(uri: str, pods: Sequence[Object], previous: Mapping[str, Any]) -> Object:
    """What the pods' fetches found; what was known before stays, while it is about this model."""
    model: Object = {"uri": uri}
    if previous.get("uri") == uri:
        model = {**previous}
    for pod in sorted(pods, key=kinds.name_of):
        ended = _state(pod, "initContainerStatuses", FETCH_CONTAINER).get("terminated") or {}
        facts = last_facts(str(ended.get("message") or "")) if not ended.get("exitCode") else {}
        if facts.get("phase") != "complete":
            continue
        fields = {
            "revision": str(facts.get("revision") or "")[:256] or None,
            "digest": str(facts.get("digest") or "")[:128] or None,
            "bytes": _count(facts.get("bytes")),
        }
        model |= {name: value for name, value in fields.items() if value is not None}
    return model


def last_facts(text: str) -> dict[str, Any]:
    """The last line that is a JSON object; a log may be cut anywhere."""
    for line in reversed(text.splitlines()):
        try:
            facts = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(facts, dict):
            return facts
    return {}


def _phase(pod: Object) -> Phase:
    engine = _container(pod, "containerStatuses", ENGINE_CONTAINER)
    if engine.get("ready"):
        return "Ready"
    if "running" in (engine.get("state") or {}):
        return "Loading"
    if "running" in _state(pod, "initContainerStatuses", FETCH_CONTAINER):
        return "Fetching"
    return "Pending"


def _state(pod: Object, place: str, name: str) -> Object:
    state: Object = _container(pod, place, name).get("state") or {}
    return state


def _container(pod: Object, place: str, name: str) -> Object:
    found: Sequence[Object] = (pod.get("status") or {}).get(place) or []
    return next((each for each in found if each.get("name") == name), {})


def _count(value: object) -> int | None:
    """A number from a log, which may hold anything, as the schema accepts it."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e300:
        return None
    return min(int(value), MAX_BYTES)
