"""The registry: which endpoints exist, by pool, and which of them may get new requests.

Discovery says which endpoints there are, each source its own whole set; signals say how each one
is; health may take one out. All of that meets here, so that the hot path reads one cached list.
Belongs to the event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from octavo_router.endpoints.endpoint import Endpoint, EndpointSpec, State


class Slots(Protocol):
    """The part of the residency index that the registry owns: a slot per endpoint."""

    def add_slot(self) -> int: ...

    def drop_slot(self, slot: int) -> None: ...


class Changes(NamedTuple):
    """What one `replace` did."""

    added: list[Endpoint]
    removed: list[Endpoint]
    updated: list[Endpoint]  # same process, new address, labels or state


@dataclass(frozen=True, slots=True)
class Candidates:
    """Who may serve a pool now. One object per change, so it may be compared by identity."""

    endpoints: list[Endpoint]
    slots: list[int]  # of the same endpoints, for the residency index
    is_panic: bool = False  # all of them are ejected: better a bad one than none


class Change(NamedTuple):
    """One thing a subscriber may care for: `state` is also a change of names or of adapters."""

    kind: str  # "added" | "removed" | "updated" | "state"
    endpoint: Endpoint


Subscriber = Callable[[Change], None]

NO_CANDIDATES = Candidates([], [])


class Registry:
    """All endpoints by id. Who changes one calls the registry."""

    __slots__ = (
        "_candidates", "_index", "_pools", "_prefillers", "_sources", "_subscribers",
        "endpoints", "version",
    )  # fmt: skip

    def __init__(self, index: Slots | None = None) -> None:
        self.endpoints: dict[str, Endpoint] = {}
        self.version = 0  # grows with every change
        self._index = index
        self._sources: dict[str, dict[str, EndpointSpec]] = {}
        self._pools: dict[str, list[Endpoint]] = {}
        self._candidates: dict[tuple[str, str], Candidates] = {}
        self._prefillers: dict[tuple[str, str], Candidates] = {}
        self._subscribers: list[Subscriber] = []

    # discovery

    def replace(self, source: str, specs: Sequence[EndpointSpec]) -> Changes:
        """Make `specs` all that `source` knows. The same id is the same process: it lives on."""
        wanted = {spec.id: spec for spec in specs}
        before = self._sources.get(source, {})
        self._sources[source] = wanted
        changes = Changes([], [], [])
        for gone in before.keys() - wanted.keys():
            other = self._spec_elsewhere(gone)
            endpoint = self.endpoints[gone]
            if other is None:
                self._remove(endpoint)
                changes.removed.append(endpoint)
            elif other != endpoint.spec:
                self._update(endpoint, other)
                changes.updated.append(endpoint)
        for spec in wanted.values():
            known = self.endpoints.get(spec.id)
            if known is None:
                changes.added.append(self._add(spec))
            elif known.spec != spec:
                self._update(known, spec)
                changes.updated.append(known)
        if any(changes):
            self._forget_lists()
            for kind, group in (
                ("removed", changes.removed),
                ("updated", changes.updated),
                ("added", changes.added),
            ):
                for endpoint in group:
                    self._tell(Change(kind, endpoint))
        return changes

    # signals and health

    def report(self, endpoint: Endpoint, state: State, reason: str = "") -> None:
        """What signals know of an endpoint's state. Terminating ones stay draining."""
        if endpoint.spec.is_terminating and state in ("ready", "connecting"):
            state, reason = "draining", "it is being deleted"
        endpoint.reported_state = state
        self._settle(endpoint, reason)

    def eject(self, endpoint: Endpoint, reason: str) -> None:
        """Take it out of rotation, whatever it says of itself; `readmit` ends that."""
        endpoint.is_ejected, endpoint.ejected_for = True, reason
        self._settle(endpoint, reason)

    def readmit(self, endpoint: Endpoint) -> None:
        endpoint.is_ejected = False
        self._settle(endpoint, "")

    def changed(self, endpoint: Endpoint) -> None:
        """Its names, adapters, role or limits changed."""
        self._forget_lists()
        self._tell(Change("state", endpoint))

    # reading

    def pool(self, name: str) -> list[Endpoint]:
        """All endpoints of a pool, whatever their state."""
        return self._pools.get(name, [])

    @property
    def pools(self) -> list[str]:
        return sorted(self._pools)

    def routable(self, pool: str, revision: str = "") -> list[Endpoint]:
        """Who may get new requests. The list is shared: do not change it."""
        return self.candidates(pool, revision).endpoints

    def candidates(self, pool: str, revision: str = "") -> Candidates:
        """`routable` with the index's slots. Hot path: once per request."""
        found = self._candidates.get((pool, revision))
        if found is None:
            found = self._candidates[pool, revision] = self._find(pool, revision)
        return found

    def prefillers(self, pool: str, revision: str = "") -> Candidates:
        """Who computes prompts of a pool for others to answer."""
        found = self._prefillers.get((pool, revision))
        if found is None:
            ready = [
                endpoint
                for endpoint in self._members(pool, revision)
                if endpoint.role == "prefill"
                and endpoint.state == "ready"
                and endpoint.hands_kv_over
            ]
            found = Candidates(ready, [endpoint.slot for endpoint in ready])
            self._prefillers[pool, revision] = found
        return found

    def subscribe(self, callback: Subscriber) -> Callable[[], None]:
        """Call `callback` after each change; what is returned ends that."""
        self._subscribers.append(callback)
        return lambda: self._subscribers.remove(callback)

    # below here: keeping the lists

    def _add(self, spec: EndpointSpec) -> Endpoint:
        self._displace(spec)
        endpoint = Endpoint(spec, names=spec.names, kind=spec.kind or "openai")
        if self._index is not None:
            endpoint.slot = self._index.add_slot()
        self.endpoints[spec.id] = endpoint
        self._pools.setdefault(spec.pool, []).append(endpoint)
        if spec.is_terminating:
            self.report(endpoint, "draining")
        return endpoint

    def _displace(self, spec: EndpointSpec) -> None:
        # An address belongs to one process. Whoever had it before is gone, though its deletion
        # may be reported later: a prompt must never reach a stranger.
        for other in self.endpoints.values():
            uids = {other.spec.pod_uid, spec.pod_uid}
            if other.spec.address == spec.address and len(uids) == 2 and "" not in uids:
                self.report(other, "down", f"its address belongs to {spec.id} now")

    def _update(self, endpoint: Endpoint, spec: EndpointSpec) -> None:
        before, endpoint.spec = endpoint.spec, spec
        if before.pool != spec.pool:
            self._leave_pool(endpoint, before.pool)
            self._pools.setdefault(spec.pool, []).append(endpoint)
        if spec.names and spec.names != before.names:
            endpoint.names = spec.names
        if spec.is_terminating:
            self.report(endpoint, "draining", "it is being deleted")

    def _remove(self, endpoint: Endpoint) -> None:
        del self.endpoints[endpoint.id]
        self._leave_pool(endpoint, endpoint.pool)
        endpoint.state = endpoint.reported_state = "down"
        endpoint.reason = "it is gone"
        if self._index is not None:
            self._index.drop_slot(endpoint.slot)
        if endpoint.tiers is not None:
            endpoint.tiers.close()
        endpoint.slot = -1  # the slot is another's from now on

    def _leave_pool(self, endpoint: Endpoint, pool: str) -> None:
        members = self._pools[pool]
        members.remove(endpoint)
        if not members:
            del self._pools[pool]

    def _spec_elsewhere(self, id_: str) -> EndpointSpec | None:
        return next((specs[id_] for specs in self._sources.values() if id_ in specs), None)

    def _settle(self, endpoint: Endpoint, reason: str) -> None:
        reported = endpoint.reported_state
        state: State = reported
        if endpoint.is_ejected and reported == "ready":
            state, reason = "ejected", endpoint.ejected_for  # whatever brought it back
        if endpoint.state == state:
            endpoint.reason = reason or endpoint.reason
            return
        endpoint.state, endpoint.reason = state, reason
        if self.endpoints.get(endpoint.id) is not endpoint:
            return  # a late report of one that is gone
        self._forget_lists()
        self._tell(Change("state", endpoint))

    def _find(self, pool: str, revision: str) -> Candidates:
        # Prefill engines hand their work over; alone they answer nobody.
        members = [
            endpoint for endpoint in self._members(pool, revision) if endpoint.role != "prefill"
        ]
        ready = [endpoint for endpoint in members if endpoint.state == "ready"] or [
            endpoint
            for endpoint in self._members(pool, revision)
            if endpoint.could_answer and endpoint.state == "ready"
        ]
        is_panic = not ready
        chosen = ready or [endpoint for endpoint in members if endpoint.state == "ejected"]
        if not chosen:
            return NO_CANDIDATES
        return Candidates(chosen, [endpoint.slot for endpoint in chosen], is_panic)

    def _members(self, pool: str, revision: str) -> list[Endpoint]:
        members = self._pools.get(pool, [])
        return [one for one in members if not revision or one.spec.revision == revision]

    def _forget_lists(self) -> None:
        self.version += 1
        self._candidates.clear()
        self._prefillers.clear()

    def _tell(self, change: Change) -> None:
        for subscriber in tuple(self._subscribers):
            subscriber(change)
