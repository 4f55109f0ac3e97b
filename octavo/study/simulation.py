"""One workload under one policy: arrivals are routed, engines compute, and it is written down."""

from __future__ import annotations

from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from typing import TYPE_CHECKING, Literal, NamedTuple

from octavo.study.engine import SimulatedEngine
from octavo.study.figures import RequestOutcome, StudyTally
from octavo.study.shapes import ChatText, TokenIds
from octavo.study.study_router import StudyRouter
from octavo.study.timeline import Timeline
from octavo_engine.errors import RequestError
from octavo_router.residency import native
from octavo_router.routing.outcome import AttemptResult, Outcome

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from octavo.study.adapters import AdapterSetup
    from octavo.study.engine_models import EngineModel
    from octavo.study.figures import Figures
    from octavo.study.shapes import Prepared, Shape
    from octavo.study.workload import Workload
    from octavo_engine.protocol.sides import SideTargets
    from octavo_engine.state.labels import Labels
    from octavo_engine.state.outputs import SequenceOutput
    from octavo_router.adapters.fleet import AdapterFleet
    from octavo_router.endpoints.endpoint import Endpoint
    from octavo_router.routing.dispatcher import Lease

ShapeName = Literal["ids", "text"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What all policies of a study have in common."""

    model: EngineModel
    num_engines: int = 8
    signal_delay_s: float = 0.01  # from an engine's step to the router's knowing of it
    shape: ShapeName = "ids"
    seed: int = 0
    adapters: AdapterSetup | None = None  # that requests are for; None: all are for the base model
    num_prefill: int = 0  # of the engines, those that begin by computing prompts for the others
    targets: SideTargets | None = None  # by which engines change sides; None: they stay
    mover: Callable[[StudyRouter, Timeline], None] | None = None  # that does so in place of routers
    transfer_token_s: float = 2e-6  # to hand a token's KV cache over: 64 GB/s for gpu-8b


class RoutingStudy:
    """Runs a workload under one policy after another. What depends on prompts only is kept."""

    def __init__(self, workload: Workload, setup: Setup) -> None:
        self.workload = workload
        self.setup = setup
        self._hot_path = native.load()
        self._shape: Shape = TokenIds() if setup.shape == "ids" else ChatText(self._hot_path.scan)

    def run(self, policy: str) -> Figures:
        """The same figures every time. Raises ConfigInvalid: there is no such policy."""
        return _Run(policy, self.workload, self.setup, self._shape, self._hot_path).run()


def compare(
    workload: Workload, setup: Setup, policies: Sequence[str], *, num_jobs: int = 1
) -> Iterator[Figures]:
    """Under each policy, in this order, each as soon as it is there; on so many cores."""
    if num_jobs == 1 or len(policies) == 1:
        study = RoutingStudy(workload, setup)
        yield from map(study.run, policies)
        return
    with ProcessPoolExecutor(num_jobs, mp_context=get_context("spawn")) as pool:
        yield from pool.map(partial(_run_alone, workload, setup), policies)


def _run_alone(workload: Workload, setup: Setup, policy: str) -> Figures:
    return RoutingStudy(workload, setup).run(policy)


class _Open(NamedTuple):
    """A request that an engine has."""

    lease: Lease
    record: RequestOutcome
    answer_labels: Callable[[], Labels | None]


class _Prompt(NamedTuple):
    """A prompt that one engine computes for another one's answer."""

    number: int
    prepared: Prepared
    lease: Lease  # of the answer
    prompt_lease: Lease
    arrived_at: float


class _Run:
    def __init__(
        self, policy: str, workload: Workload, setup: Setup, shape: Shape, hot_path: native.HotPath
    ) -> None:
        self._policy = policy
        self._arrivals = workload.arrivals
        self._shape = shape
        self._timeline = Timeline()
        self._tally = StudyTally()
        self._num_open = len(self._arrivals)
        self._open: dict[str, _Open] = {}
        self._prompts: dict[str, _Prompt] = {}
        self._transfer_token_s = setup.transfer_token_s
        self._followers: defaultdict[int, list[int]] = defaultdict(list)
        self._router = StudyRouter(
            policy, setup.model, self._timeline,
            num_engines=setup.num_engines, seed=setup.seed, hot_path=hot_path,
            adapters=setup.adapters, num_prefill=setup.num_prefill, targets=setup.targets,
            is_moved=setup.mover is not None,
        )  # fmt: skip
        if setup.mover is not None:
            setup.mover(self._router, self._timeline)
        self._engines: dict[str, SimulatedEngine] = {}
        self._num_placed: dict[str, int] = {}
        for number, follower in enumerate(self._router.followers):
            name = f"engine-{number}"
            self._engines[name] = SimulatedEngine(
                setup.model,
                self._timeline,
                on_outputs=self._on_outputs,
                deliver=follower.take,
                signal_delay_s=setup.signal_delay_s,
            )
            self._num_placed[name] = 0

    def run(self) -> Figures:
        first_at = min((a.delay_s for a in self._arrivals if a.after is None), default=0.0)
        for number, arrival in enumerate(self._arrivals):
            if arrival.after is not None:
                self._followers[arrival.after].append(number)
            else:
                self._arrive_after(arrival.delay_s - first_at, number)
        self._timeline.run(is_over=lambda: self._num_open == 0)
        engines = self._engines.values()
        return self._tally.figures(
            self._policy,
            requests=list(self._num_placed.values()),
            busy_s=[engine.busy_s for engine in engines],
            num_prefilled_tokens=sum(engine.num_prefilled_tokens for engine in engines),
            num_preemptions=sum(engine.scheduler.stats().preemptions for engine in engines),
            num_adapter_loads=self._router.num_adapter_loads,
            num_side_changes=self._router.num_side_changes,
        )

    def _arrive_after(self, delay_s: float, number: int) -> None:
        self._timeline.after(delay_s, lambda: self._arrive(number))

    def _arrive(self, number: int) -> None:
        """Place it, once its adapter is loaded; where an engine refuses, elsewhere."""
        arrival, now = self._arrivals[number], self._timeline.now
        prepared = self._shape.prepare(arrival)
        fleet = self._router.adapters
        if fleet is None or not arrival.adapter:
            self._place(number, prepared, now)
            return
        prepared.request.adapter = arrival.adapter
        fleet.note(prepared.request)
        self._place_adapter(fleet, number, prepared, now)

    def _place_adapter(
        self, fleet: AdapterFleet, number: int, prepared: Prepared, arrived_at: float
    ) -> None:
        if not fleet.needed(prepared.request):
            self._place(number, prepared, arrived_at)
            return
        fleet.wait(
            prepared.request, lambda _: self._place_adapter(fleet, number, prepared, arrived_at)
        )

    def _place(self, number: int, prepared: Prepared, arrived_at: float) -> None:
        refused: list[Endpoint] = []
        while True:
            lease = self._router.dispatcher.place(prepared.request, exclude=refused)
            if lease is None:
                self._give_up(number)
                return
            if self._hand_over(number, prepared, lease, arrived_at):
                return
            if self._submit(number, prepared, lease, arrived_at):
                return
            refused.append(lease.endpoint)
            lease.finish(Outcome(AttemptResult.REFUSED))

    def _hand_over(self, number: int, prepared: Prepared, lease: Lease, arrived_at: float) -> bool:
        """Whether another engine computes the prompt first."""
        dispatcher = self._router.dispatcher
        if not dispatcher.wants_prompt(lease) or not (there := dispatcher.place_prompt(lease)):
            return False
        request_id = f"prompt {number}"
        self._prompts[request_id] = _Prompt(number, prepared, lease, there, arrived_at)
        lease.first_token()  # nothing of the prompt is to be done where it is answered
        try:
            self._engines[there.endpoint.id].submit(
                request_id, prepared.tokens, range(1), prepared.labels()
            )
        except RequestError:
            del self._prompts[request_id]
            there.finish(Outcome(AttemptResult.REFUSED))
            return False
        return True

    def _handed_over(self, request_id: str) -> None:
        """The prompt is computed: its KV cache goes where it is answered."""
        prompt = self._prompts.pop(request_id)
        prompt.prompt_lease.finish(Outcome(AttemptResult.OK, ttft_s=0.0))
        number, prepared, lease, _, arrived_at = prompt
        delay_s = self._transfer_token_s * len(prepared.tokens)

        def answer() -> None:
            if not self._submit(number, prepared, lease, arrived_at, is_fetched=True):
                lease.finish(Outcome(AttemptResult.REFUSED))
                self._place(number, prepared, arrived_at)

        self._timeline.after(delay_s, answer)

    def _submit(
        self, number: int, prepared: Prepared, lease: Lease, arrived_at: float, *,
        is_fetched: bool = False,
    ) -> bool:  # fmt: skip
        arrival = self._arrivals[number]
        name = lease.endpoint.id
        request_id = str(number)
        try:
            self._engines[name].submit(
                request_id, prepared.tokens, arrival.answer, prepared.labels(),
                is_fetched=is_fetched,
            )  # fmt: skip
        except RequestError:
            return False
        self._num_placed[name] += 1
        record = RequestOutcome(
            arrived_at,
            num_prompt_tokens=len(prepared.tokens),
            num_predicted_tokens=min(lease.decision.matched_tokens, len(prepared.tokens) - 1),
        )
        self._open[request_id] = _Open(lease, record, prepared.answer_labels)
        return True

    def _give_up(self, number: int) -> None:
        """It is refused, and so are all that would have followed it."""
        self._tally.num_refused += 1
        self._num_open -= 1
        for following in self._followers[number]:
            self._give_up(following)

    def _on_outputs(self, outputs: Sequence[SequenceOutput]) -> None:
        # Hot path: once per token.
        now = self._timeline.now
        gaps = self._tally.gaps
        for output in outputs:
            if output.request_id in self._prompts:
                self._handed_over(output.request_id)
                continue
            lease, record, _ = request = self._open[output.request_id]
            if record.num_output_tokens == 0:
                record.first_at = now
                record.num_cached_tokens = output.num_cached_tokens
                lease.first_token()
            else:
                gaps.append(now - record.last_at)
            record.last_at = now
            record.num_output_tokens += 1
            if output.finish_reason is not None:
                self._end(output.request_id, request)

    def _end(self, request_id: str, request: _Open) -> None:
        del self._open[request_id]
        lease, record, answer_labels = request
        labels = answer_labels()
        if labels is not None:
            self._engines[lease.endpoint.id].label(request_id, labels)
        duration_s = record.last_at - record.arrived_at
        ttft_s = record.first_at - record.arrived_at
        num_gaps = record.num_output_tokens - 1
        lease.finish(
            Outcome(
                AttemptResult.OK,
                ttft_s=ttft_s,
                duration_s=duration_s,
                cached_tokens=record.num_cached_tokens,
                prompt_tokens=record.num_prompt_tokens,
                output_tokens=record.num_output_tokens,
                itl_s=(duration_s - ttft_s) / num_gaps if num_gaps else None,
            )
        )
        self._tally.add(record)
        self._num_open -= 1
        number = int(request_id)
        for following in self._followers.pop(number, ()):
            self._arrive_after(self._arrivals[following].delay_s, following)
