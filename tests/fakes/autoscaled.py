"""A pool that scales itself, in virtual time: nothing is modelled but steps and Kubernetes.

Requests meet the router's own registry, dispatcher and metrics, and the engine's own scheduler and
KV pool. The operator's `RouterDemand` reads the router's state page once a second, and its own
`decide` says how many engines there shall be. Modelled are how long a step takes, how long a pod
takes to serve, and that a pod which must go finishes what it has.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from octavo.study.engine import SimulatedEngine
from octavo.study.shapes import POOL, TokenIds
from octavo.study.study_router import StudyRouter
from octavo.study.timeline import Timeline
from octavo_engine.protocol.state import State
from octavo_operator.decide.autoscale import ScaleHistory, decide
from octavo_operator.requeue import TICK_S
from octavo_operator.routers.poller import RouterDemand
from octavo_router.admin.state import StateReporter
from octavo_router.endpoints.endpoint import Address, Endpoint, EndpointSpec
from octavo_router.flow.admin import AdminAccess
from octavo_router.flow.admission import AdmissionDemand as Waiting
from octavo_router.metrics import RequestRecord, RouterMetrics
from octavo_router.observer import MetricsObserver
from octavo_router.residency import native
from octavo_router.routing.outcome import AttemptResult, Outcome

if TYPE_CHECKING:
    from collections.abc import Sequence

    from octavo.study.engine_models import EngineModel
    from octavo.study.shapes import Prepared
    from octavo.study.workload import Arrival
    from octavo_engine.protocol.stream import Delta
    from octavo_engine.state.outputs import SequenceOutput
    from octavo_operator.spec import AutoscalingSpec
    from octavo_router.routing.dispatcher import Lease
    from octavo_router.signals.follow import Follower

POLL_S = 1.0
ROUTER = "router-0"


class Answer(NamedTuple):
    """What a client got."""

    arrival: Arrival
    ttft_s: float
    num_tokens: int


class Scaled(NamedTuple):
    """Another number of engines was requested."""

    at: float
    was: int
    replicas: int
    reason: str


@dataclass(slots=True)
class _Request:
    """On its way. Held while it has no lease."""

    arrived_at: float
    arrival: Arrival
    prepared: Prepared
    lease: Lease | None = None
    first_at: float | None = None
    num_tokens: int = 0


@dataclass(slots=True, eq=False)
class _Pod:
    engine: SimulatedEngine
    endpoint: Endpoint
    started_at: float
    follower: Follower | None = None  # None: it starts
    is_leaving: bool = False
    ended_at: float | None = None


class AutoscaledPool:
    """Runs one trace; what came of it is to be read from the attributes."""

    def __init__(
        self, rules: AutoscalingSpec, model: EngineModel, *, replicas: int, startup_s: float
    ) -> None:
        self.answers: list[Answer] = []
        self.scaled: list[Scaled] = []
        self.num_arrived = 0
        self.num_left_busy = 0  # engines that had to go while they answered somebody
        self._rules = rules
        self._model = model
        self._startup_s = startup_s
        self._timeline = timeline = Timeline()
        self._metrics = RouterMetrics(now=timeline.clock)
        self._router = StudyRouter(
            "prefix-load", model, timeline, num_engines=0, seed=0, hot_path=native.load()
        )
        self._router.dispatcher.observer = MetricsObserver(self._metrics)
        self._page = StateReporter(
            self._router.registry, self._waiting, self._metrics,
            replica=ROUTER, admin=AdminAccess(), known_pools=lambda: [POOL],
        )  # fmt: skip
        self._demand = RouterDemand(timeline.clock)
        self._demand.expect([ROUTER])
        self._decoder = msgspec.json.Decoder(State)
        self._memory = ScaleHistory()
        self._replicas = 0
        self._shape = TokenIds()
        self._requests: dict[str, _Request] = {}
        self._held: list[str] = []
        self._pods: list[_Pod] = []
        self._set_replicas(replicas)

    def run(self, arrivals: Sequence[Arrival], *, until_s: float) -> None:
        for arrival in arrivals:
            self._timeline.at(arrival.delay_s, partial(self._arrive, arrival))
        self._poll()
        self._decide()
        self._timeline.at(until_s, lambda: None)
        self._timeline.run(is_over=lambda: self._timeline.now >= until_s)

    @property
    def num_open(self) -> int:
        return len(self._requests)

    @property
    def replica_s(self) -> float:
        """Paid for: from a pod's start, through loading and draining, to its end."""
        now = self._timeline.now
        return sum((pod.ended_at or now) - pod.started_at for pod in self._pods)

    # the operator

    def _poll(self) -> None:
        state = self._decoder.decode(msgspec.json.encode(self._page.state()))
        if POOL in self._demand.learn(ROUTER, state):
            self._look()
        self._timeline.after(POLL_S, self._poll)

    def _decide(self) -> None:
        self._look()
        self._timeline.after(TICK_S, self._decide)

    def _look(self) -> None:
        serving = sum(self._demand.holders(pod.endpoint.id).are_all for pod in self._staying())
        signals = self._demand.signals(POOL, serving=serving)
        now, was = self._timeline.now, self._replicas
        decision = decide(self._rules, signals, was, self._memory, now)
        self._memory = decision.history
        if decision.replicas != was:
            why = f"{decision.reason}: {decision.message}"
            self.scaled.append(Scaled(now, was, decision.replicas, why))
            self._set_replicas(decision.replicas)

    # Kubernetes

    def _set_replicas(self, replicas: int) -> None:
        self._replicas = replicas
        staying = self._staying()
        for _ in range(replicas - len(staying)):
            self._start()
        # Who serves nobody first, then the least busy.
        staying.sort(key=lambda pod: (pod.follower is not None, pod.endpoint.in_flight))
        for pod in staying[: max(0, len(staying) - replicas)]:
            pod.is_leaving = True
        self._publish()

    def _start(self) -> None:
        number = len(self._pods)
        address = Address(f"10.0.{number // 250}.{number % 250 + 1}", 8000)
        spec = EndpointSpec(f"engine-{number}", address, POOL, kind="octavo")
        (endpoint,) = self._router.registry.replace(spec.id, [spec]).added

        def deliver(delta: Delta) -> None:
            if pod.follower is not None and pod.ended_at is None:
                pod.follower.take(delta)

        engine = SimulatedEngine(
            self._model, self._timeline,
            on_outputs=self._on_outputs, deliver=deliver, signal_delay_s=0.01,
        )  # fmt: skip
        pod = _Pod(engine, endpoint, self._timeline.now)
        self._pods.append(pod)
        self._timeline.after(self._startup_s, lambda: self._serve(pod))

    def _serve(self, pod: _Pod) -> None:
        if pod.is_leaving:
            return
        pod.follower = self._router.follow(pod.endpoint)
        held, self._held = self._held, []
        for request_id in held:
            self._place(request_id)

    def _publish(self) -> None:
        """The router hears of those who leave; those who have nothing left are gone."""
        for pod in self._pods:
            if not pod.is_leaving or pod.ended_at is not None:
                continue
            if pod.endpoint.reported_state != "draining":
                self.num_left_busy += pod.endpoint.in_flight > 0
                self._router.registry.report(pod.endpoint, "draining", "it is being deleted")
            if not pod.endpoint.in_flight:
                pod.ended_at = self._timeline.now
                self._router.registry.replace(pod.endpoint.id, ())

    def _staying(self) -> list[_Pod]:
        return [pod for pod in self._pods if not pod.is_leaving]

    # clients and their requests

    def _waiting(self, pool: str) -> Waiting:
        tokens = sum(self._requests[name].arrival.num_prompt_tokens for name in self._held)
        return Waiting(held=len(self._held), queued=0, queued_tokens=tokens)

    def _arrive(self, arrival: Arrival) -> None:
        request_id = str(self.num_arrived)
        self.num_arrived += 1
        self._requests[request_id] = _Request(
            self._timeline.now, arrival, self._shape.prepare(arrival)
        )
        self._place(request_id)

    def _place(self, request_id: str) -> None:
        request = self._requests[request_id]
        request.lease = self._router.dispatcher.place(request.prepared.request)
        if request.lease is None:
            self._held.append(request_id)
            return
        chosen = request.lease.endpoint
        pod = next(pod for pod in self._pods if pod.endpoint is chosen)
        pod.engine.submit(
            request_id, request.prepared.tokens, request.arrival.answer, request.prepared.labels()
        )

    def _on_outputs(self, outputs: Sequence[SequenceOutput]) -> None:
        for output in outputs:
            request = self._requests[output.request_id]
            assert request.lease is not None
            request.num_tokens += len(output.token_ids)
            if request.first_at is None:
                request.first_at = self._timeline.now
                request.lease.first_token()
            if output.finish_reason is not None:
                self._end(output.request_id, request, request.lease, request.first_at)

    def _end(self, request_id: str, request: _Request, lease: Lease, first_at: float) -> None:
        del self._requests[request_id]
        duration_s, ttft_s = self._timeline.now - request.arrived_at, first_at - request.arrived_at
        prompt_tokens = request.arrival.num_prompt_tokens
        lease.finish(
            Outcome(
                AttemptResult.OK, ttft_s=ttft_s, duration_s=duration_s, cached_tokens=0,
                prompt_tokens=prompt_tokens, output_tokens=request.num_tokens,
            )
        )  # fmt: skip
        self._metrics.finish(
            RequestRecord(
                request_id=request_id, model=POOL, is_known_model=True, pool=POOL, status=200,
                outcome="ok", is_stream=True, duration_s=duration_s, ttft_s=ttft_s,
                prompt_tokens=prompt_tokens, output_tokens=request.num_tokens,
            )
        )  # fmt: skip
        self.answers.append(Answer(request.arrival, ttft_s, request.num_tokens))
        self._publish()
