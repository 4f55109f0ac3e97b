"""The state of all router replicas: pods they hold, demand, and metrics of each revision.

`RouterDemand` merges their states; `RouterPoller` fetches it once a second from each replica.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, Protocol

import msgspec

from octavo_engine.protocol.endpoints import ROUTER_PORT, STATE_PATH
from octavo_engine.protocol.kubernetes import COMPONENT_LABEL, ROUTER_COMPONENT
from octavo_engine.protocol.loading import LOADING, LoadProgress
from octavo_engine.protocol.state import (
    EndpointState,
    ModelState,
    PoolState,
    RevisionState,
    State,
)
from octavo_operator.decide.autoscale import LoadSignals
from octavo_operator.decide.canary import CanaryTotals, Sample
from octavo_operator.decide.flip import EngineFigures, FlipSignals
from octavo_operator.decide.observed import condition_of
from octavo_operator.decide.readiness_gate import Holders
from octavo_operator.errors import ClusterError
from octavo_operator.objects import kinds

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from octavo_operator.cluster.api import Cluster
    from octavo_operator.decide.canary import CanaryState
    from octavo_operator.metrics import OperatorMetrics

logger = logging.getLogger("octavo.operator.routers")
SELECTOR = f"{COMPONENT_LABEL}={ROUTER_COMPONENT}"
# Older states are ignored.
MAX_AGE_S = 5.0
TTFT_WINDOW_S = 60.0
REFUSED_WINDOW_S = 10.0
QUIET_S = 60.0  # between two complaints of one kind about one router
_NO_REVISION: Final = ""  # what speaks against none, such as a lack of room
_ADVICE: Final = MappingProxyType(
    {
        "unauthorized": "give the operator the routers' state token: --router-token",
        "tls": "check --router-scheme and --router-tls-ca, and the names in the certificate",
        "unreachable": "check that the operator may reach it, and by http or https: "
        "--router-scheme",
        "bad_answer": "check that it is a router of this version",
    }
)


# A router that has not tried yet says less than one that has.
_RANK: Final = MappingProxyType({"loaded": 0, "loading": 1, "failed": 2, "unloaded": 3})

Trouble = Literal["unauthorized", "tls", "unreachable", "bad_answer"]


class RouterUnreachable(Exception):
    """A router did not report its state, with the reason."""

    def __init__(self, reason: Trouble, problem: str) -> None:
        super().__init__(problem)
        self.reason: Trouble = reason


class Fetch(Protocol):
    """GET a URL. Raises RouterUnreachable or OSError."""

    async def __call__(self, url: str) -> bytes: ...


@dataclass(slots=True)
class _Replica:
    state: State | None = None
    at: float = float("-inf")


@dataclass(frozen=True, slots=True)
class _Past:
    at: float
    sample: Sample


class _Serving(NamedTuple):
    """How many replicas a pool has, and since when."""

    replicas: int
    since: float


@dataclass(slots=True)
class _Tally:
    """Counters of one revision, summed over replicas and their restarts."""

    total: Sample = field(default_factory=Sample)
    history: list[_Past] = field(default_factory=list)


class RouterDemand:
    """Confined to the event loop. Times are monotonic."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._replicas: dict[str, _Replica] = {}
        self._tallies: dict[tuple[str, str], _Tally] = {}  # by pool and revision
        self._trials: dict[tuple[str, str], _Tally] = {}  # by pool and adapter
        # By replica, epoch, pool, and what is counted.
        self._last: dict[tuple[str, str, str, str], Sample] = {}
        self._is_known = False
        self._serving: dict[str, _Serving] = {}  # by pool

    @property
    def has_routers(self) -> bool:
        return bool(self._replicas)

    @property
    def num_answering(self) -> int:
        return len(self._fresh())

    def expect(self, replicas: Collection[str]) -> None:
        """The router replicas there are now. Before the first call nothing is routable: an operator
        that has just started does not know whether there are any."""
        self._is_known = True
        for name in [name for name in self._replicas if name not in replicas]:
            del self._replicas[name]
            self._last = {key: value for key, value in self._last.items() if key[0] != name}
        for name in replicas:
            self._replicas.setdefault(name, _Replica())

    def learn(self, name: str, state: State) -> set[str]:
        """Take in one replica's answer; the pools about which something has changed."""
        replica = self._replicas.get(name)
        if replica is None:
            return set()
        changed = _changed_pools(replica.state, state)
        is_known = replica.state is not None and replica.state.epoch == state.epoch
        replica.state, replica.at = state, self._clock()
        for pool in state.pools:
            samples = {one.revision: _sample(one) for one in pool.revisions}
            plain = samples.get(_NO_REVISION, Sample())  # of a pool without weights
            samples[_NO_REVISION] = replace(plain, refused=pool.refused)
            source = (name, state.epoch, pool.pool)
            for revision, sample in samples.items():
                new = self._new_since_last((*source, revision), sample, is_known)
                self._tally(self._tallies, (pool.pool, revision), new)
            for trial in pool.adapter_trials:
                key = (*source, f"adapter {trial.revision}")
                new = self._new_since_last(key, _sample(trial), is_known)
                self._tally(self._trials, (pool.pool, trial.revision), new)
        return changed

    def holders(self, pod_uid: str) -> Holders:
        """Which router replicas send the pod traffic."""
        fresh = self._fresh()
        holding = sum(
            any(e.id == pod_uid and e.state == "ready" for e in state.endpoints) for state in fresh
        )
        return Holders(holding, len(fresh), len(self._replicas), self._is_known)

    def in_flight(self, pool: str) -> dict[str, int]:
        """Requests by pod UID."""
        counts: dict[str, int] = {}
        for endpoint in self._endpoints(pool):
            counts[endpoint.id] = counts.get(endpoint.id, 0) + endpoint.in_flight
        return counts

    def loading(self, pod_uid: str) -> float | None:
        """How much of its weights a pod has loaded, from 0 to 1, as it reported to a router."""
        reported = [
            e.loading for state in self._fresh() for e in state.endpoints if e.id == pod_uid
        ]
        return max((share for share in reported if share is not None), default=None)

    def progress(self, pod_uid: str) -> LoadProgress | None:
        """The same in bytes, if the engine reports them: the furthest that any router knows."""
        reported = [
            e.progress for state in self._fresh() for e in state.endpoints if e.id == pod_uid
        ]
        known = [progress for progress in reported if progress is not None]
        # Loading comes after fetching, whatever the numbers.
        return max(known, key=lambda p: (p.phase == LOADING, p.bytes_done), default=None)

    def model(self, pool: str, revision: str) -> ModelState | None:
        """The model that its engines report; None if none has reported it."""
        reported = (e.model for e in self._endpoints(pool) if e.revision == revision)
        return next((model for model in reported if model is not None), None)

    def adapter_states(self, pool: str) -> dict[str, tuple[str, str]]:
        """What becomes of each adapter of a pool, and why: the best that any router reports."""
        best: dict[str, tuple[str, str]] = {}
        for state in self._fresh():
            for adapters in (p.adapters for p in state.pools if p.pool == pool):
                for one in adapters:
                    known = best.get(one.name)
                    if known is None or _RANK.get(one.state, 9) < _RANK.get(known[0], 9):
                        best[one.name] = (one.state, one.reason)
        return best

    def adapter_holders(self, pool: str) -> dict[str, set[str]]:
        """By adapter, the ready engines that have it loaded: UIDs of pods."""
        holders: dict[str, set[str]] = {}
        for endpoint in self._endpoints(pool):
            for name in endpoint.adapters if endpoint.state == "ready" else ():
                holders.setdefault(name, set()).add(endpoint.id)
        return holders

    def max_model_len(self, pool: str, revision: str) -> int:
        """The longest sequence that its engines accept; 0 if none has reported it."""
        reported = [e.max_model_len for e in self._endpoints(pool) if e.revision == revision]
        return max(reported, default=0)

    def signals(self, pool: str, *, serving: int, without: Collection[str] = ()) -> LoadSignals:
        """`without`: UIDs of pods whose load is not that of the replicas."""
        fresh = self._fresh()
        if not fresh:
            return LoadSignals(serving=serving)
        pools = [p for state in fresh for p in state.pools if p.pool == pool]
        # Engines report the same to every router: the highest value, once per engine.
        engines: dict[str, EndpointState] = {}
        endpoints = [e for e in self._endpoints(pool) if e.id not in without]
        others = sum(e.in_flight for e in self._endpoints(pool) if e.id in without)
        for endpoint in endpoints:
            known = engines.get(endpoint.id)
            if known is None or endpoint.queued_tokens > known.queued_tokens:
                engines[endpoint.id] = endpoint
        engines_running: dict[str, int] = {}
        for endpoint in endpoints:
            if endpoint.state != "down":  # what it reported before it went is no work
                busy = max(endpoint.running + endpoint.waiting, engines_running.get(endpoint.id, 0))
                engines_running[endpoint.id] = busy
        ages = [p.last_request_age_s for p in pools if p.last_request_age_s is not None]
        usages = [e.kv_usage for e in engines.values() if e.state == "ready"]
        return LoadSignals(
            serving=serving,
            queued_tokens=sum(p.queued_tokens for p in pools)
            + sum(e.queued_tokens for e in engines.values()),
            kv_usage=sum(usages) / len(usages) if usages else None,
            ttft_p95_s=self._recent(pool).ttft_p95_s,
            refused_share=self._refused_share(pool, serving),
            in_flight=sum(p.in_flight for p in pools) - others,
            held=sum(p.held for p in pools),
            last_request_age_s=min(ages, default=None),
            running=sum(engines_running.values()),
            is_known=True,
            is_complete=len(fresh) == len(self._replicas),
        )

    def prefill_signals(self, pool: str, *, serving: int, pods: Collection[str]) -> LoadSignals:
        """What the prefill pods have to do: prompts that routers have there, and the tokens of
        them that are still to be computed. `pods`: their UIDs.

        While no router has one that is ready, the pods that answer compute all prompts, and how
        many there would be is not known."""
        fresh = self._fresh()
        if not fresh:
            return LoadSignals(serving=serving)
        endpoints = [e for e in self._endpoints(pool) if e.id in pods and e.state != "down"]
        queued_tokens: dict[str, int] = {}  # engines report the same to every router
        for endpoint in endpoints:
            known = queued_tokens.get(endpoint.id, 0)
            queued_tokens[endpoint.id] = max(known, endpoint.queued_tokens)
        is_used = any(e.state == "ready" for e in endpoints)
        return LoadSignals(
            serving=serving,
            queued_tokens=sum(queued_tokens.values()) if is_used else None,
            in_flight=sum(e.in_flight for e in endpoints) if is_used else None,
            is_known=True,
            is_complete=len(fresh) == len(self._replicas),
        )

    def flip_signals(self, pool: str) -> FlipSignals:
        """What its ready engines reported last, from the router that has the latest of it."""
        latest: dict[str, EndpointState] = {}
        for endpoint in self._endpoints(pool):
            known = latest.get(endpoint.id)
            is_newer = known is None or endpoint.computed_tokens > known.computed_tokens
            if endpoint.state == "ready" and is_newer:
                latest[endpoint.id] = endpoint
        engines = {
            id_: EngineFigures(
                one.running, one.queued_tokens, one.computed_tokens, one.prompt_token_s, one.step_s
            )
            for id_, one in latest.items()
        }
        sizes = [
            p.prompt_tokens
            for state in self._fresh()
            for p in state.pools
            if p.pool == pool and p.prompt_tokens
        ]
        return FlipSignals(engines, sum(sizes) / len(sizes) if sizes else 0.0)

    def total(self, pool: str, revision: str) -> Sample:
        """What clients got from a revision since this operator began to listen."""
        tally = self._tallies.get((pool, revision))
        return tally.total if tally else Sample()

    def canary_totals(self, pool: str, state: CanaryState) -> CanaryTotals:
        """Of the stable revision and the one on trial."""
        return CanaryTotals(
            self.total(pool, state.stable),
            self.total(pool, state.revision),
            is_reported=bool(self.num_answering),
        )

    def adapter_totals(self, pool: str, stable: str, trial: str) -> CanaryTotals:
        """Of an adapter and the one that is on trial beside it."""
        nothing = _Tally()
        return CanaryTotals(
            self._trials.get((pool, stable), nothing).total,
            self._trials.get((pool, trial), nothing).total,
            is_reported=bool(self.num_answering),
        )

    def forget(self, pool: str) -> None:
        for tallies in (self._tallies, self._trials):
            for key in [key for key in tallies if key[0] == pool]:
                del tallies[key]
        self._last = {key: value for key, value in self._last.items() if key[2] != pool}
        self._serving.pop(pool, None)

    def _fresh(self) -> list[State]:
        oldest = self._clock() - MAX_AGE_S
        return [r.state for r in self._replicas.values() if r.state is not None and r.at >= oldest]

    def _endpoints(self, pool: str) -> list[EndpointState]:
        return [e for state in self._fresh() for e in state.endpoints if e.pool == pool]

    def _new_since_last(
        self, key: tuple[str, str, str, str], now: Sample, is_known: bool
    ) -> Sample | None:
        """What came since the last look. None: nothing was known before."""
        before = self._last.get(key)
        self._last[key] = now
        if before is None and is_known:
            before = Sample()
        # Counted before we looked: it may be hours old, or of this second. Not evidence.
        return None if before is None else now - before

    def _tally(
        self, tallies: dict[tuple[str, str], _Tally], key: tuple[str, str], new: Sample | None
    ) -> None:
        tally = tallies.setdefault(key, _Tally())
        if new is None:
            return
        tally.total = tally.total + new
        at = self._clock()
        if not tally.history or at - tally.history[-1].at >= 1.0:
            tally.history.append(_Past(at, tally.total))
        while len(tally.history) > 2 and tally.history[1].at <= at - TTFT_WINDOW_S:
            tally.history.pop(0)

    def _recent(self, pool: str, since: float = float("-inf")) -> Sample:
        recent = Sample()
        for (name, _), tally in self._tallies.items():
            if name == pool and tally.history:
                before = tally.history[0]
                for past in tally.history:
                    before = past if past.at <= since else before
                recent = recent + (tally.total - before.sample)
        return recent

    def _refused_share(self, pool: str, serving: int) -> float:
        """Requests refused for lack of room, of those that engines took in, lately. What was
        refused by fewer or more replicas says nothing about these."""
        now = self._clock()
        known = self._serving.get(pool)
        if known is None or known.replicas != serving:
            known = self._serving[pool] = _Serving(serving, now)
        recent = self._recent(pool, max(known.since, now - REFUSED_WINDOW_S))
        return recent.refused / max(1, recent.requests)


class RouterPoller:
    """Reads the state of every router replica; calls back with the pools that changed."""

    def __init__(
        self,
        cluster: Cluster,
        demand: RouterDemand,
        *,
        namespace: str,
        fetch: Fetch,
        wake: Callable[[str], None],
        metrics: OperatorMetrics,
        every_s: float = 1.0,
        find_every_s: float = 10.0,
        clock: Callable[[], float],
        scheme: str = "http",
    ) -> None:
        self._cluster = cluster
        self._scheme = scheme
        self._complained_at: dict[tuple[str, Trouble], float] = {}
        self._demand = demand
        self._namespace = namespace
        self._fetch = fetch
        self._wake = wake
        self._metrics = metrics
        self._every_s = every_s
        self._find_every_s = find_every_s
        self._clock = clock
        self._urls: dict[str, str] = {}
        self._found_at = float("-inf")
        self._decoder = msgspec.json.Decoder(State)

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self.poll()
            await asyncio.sleep(self._every_s)

    async def poll(self) -> None:
        """One round."""
        if self._clock() - self._found_at >= self._find_every_s:
            await self._find()
        async with asyncio.TaskGroup() as tasks:
            for name, url in self._urls.items():
                tasks.create_task(self._ask(name, url))
        self._metrics.num_routers = self._demand.num_answering

    async def _find(self) -> None:
        try:
            listing = await self._cluster.find(kinds.POD, self._namespace, selector=SELECTOR)
        except ClusterError as error:
            logger.warning("Could not list the routers", extra={"error": str(error)})
            return
        self._found_at = self._clock()
        self._urls = {
            kinds.name_of(pod): _url(self._scheme, str(pod["status"]["podIP"]))
            for pod in listing.items
            # One that is not ready gets no clients; one that is leaving gets no new ones.
            if condition_of(pod, "Ready") == "True"
            and not pod["metadata"].get("deletionTimestamp")
            and (pod.get("status") or {}).get("podIP")
        }
        self._demand.expect(self._urls.keys())

    async def _ask(self, name: str, url: str) -> None:
        try:
            body = await self._fetch(url)
            state = self._decoder.decode(body)
        except RouterUnreachable as error:
            self._complain(name, error.reason, str(error))
            return  # its earlier state expires by itself
        except OSError as error:  # TimeoutError is one
            self._complain(name, "unreachable", str(error) or f"{url} did not answer in time")
            return
        except (ValueError, RecursionError) as error:
            self._complain(name, "bad_answer", str(error))
            return
        for pool in self._demand.learn(name, state):
            self._wake(pool)

    def _complain(self, name: str, reason: Trouble, problem: str) -> None:
        """Its pods stay unroutable meanwhile, so the cause has to be in the log."""
        self._metrics.router_errors[reason] += 1
        now = self._clock()
        self._complained_at = {
            key: at for key, at in self._complained_at.items() if now - at < QUIET_S
        }
        if (name, reason) in self._complained_at:
            return
        self._complained_at[name, reason] = now
        logger.warning(
            "A router did not report its state",
            extra={
                "router": name, "reason": reason, "problem": problem, "advice": _ADVICE[reason],
            },
        )  # fmt: skip


def _url(scheme: str, address: str) -> str:
    host = f"[{address}]" if ":" in address else address
    return f"{scheme}://{host}:{ROUTER_PORT}{STATE_PATH}"


def _changed_pools(before: State | None, now: State) -> set[str]:
    """Those whose endpoints changed, or where requests begin to wait."""
    if before is None:
        return {pool.pool for pool in now.pools} | {endpoint.pool for endpoint in now.endpoints}
    old, new = _standing(before), _standing(now)
    return {pool for pool, _ in old.items() ^ new.items()}


def _standing(state: State) -> Mapping[str, frozenset[tuple[str, str]]]:
    seen: dict[str, set[tuple[str, str]]] = {}
    for endpoint in state.endpoints:
        seen.setdefault(endpoint.pool, set()).add((endpoint.id, endpoint.state))
    for pool in state.pools:
        for adapter in pool.adapters:
            seen.setdefault(pool.pool, set()).add((adapter.name, adapter.state))
        if _is_waiting(pool):
            seen.setdefault(pool.pool, set()).add(("", "held"))
    return {pool: frozenset(facts) for pool, facts in seen.items()}


def _is_waiting(pool: PoolState) -> bool:
    return pool.held > 0


def _sample(revision: RevisionState) -> Sample:
    return Sample(
        requests=revision.requests,
        errors=revision.errors,
        ttft_s_sum=revision.ttft_s_sum,
        ttft_count=revision.ttft_count,
        itl_s_sum=revision.itl_s_sum,
        itl_count=revision.itl_count,
        ttft_buckets=tuple(revision.ttft_buckets),
    )
