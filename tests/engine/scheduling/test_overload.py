"""More than an engine can do, in virtual time: what it computes is what a client gets."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from octavo.study.timeline import Timeline
from octavo_engine.backends.sim.backend import step_seconds
from octavo_engine.config import SchedulerConfig, SimConfig
from octavo_engine.errors import QueueFull
from octavo_engine.scheduling.scheduler import Scheduler
from octavo_engine.state.outputs import StepResult
from octavo_engine.state.request import BACKGROUND, EngineRequest
from octavo_engine.state.sampling_params import SamplingParams

SEATS = 8
ANSWER = 50  # tokens; a step takes 20 ms
SIM = SimConfig(step_base_ms=20.0, decode_token_ms=0.0, prefill_token_ms=0.02)
CAPACITY = SEATS / (ANSWER * SIM.step_base_ms * 1e-3)  # requests a second, about
PATIENCE_S = 5.0


@dataclass
class Client:
    sent_at: float
    ended_at: float = 0.0
    ending: str = ""
    retry_after_s: int = 0


@dataclass
class World:
    """One engine, and clients that come at a rate and leave after `PATIENCE_S`."""

    has_deadline: bool = True
    is_whole: bool = True
    queue_timeout_s: float = 30.0
    seats: int = SEATS
    sim: SimConfig = SIM
    timeline: Timeline = field(default_factory=Timeline)

    def __post_init__(self) -> None:
        config = SchedulerConfig(max_num_seqs=self.seats, queue_timeout_s=self.queue_timeout_s)
        self.scheduler = Scheduler(config, num_blocks=4096, now=self.timeline.clock)
        self.clients: dict[str, Client] = {}
        self._rng = random.Random(1)
        self._is_busy = False

    def load(self, rate: float, *, start: float, end: float) -> None:
        at = start
        while (at := at + self._rng.expovariate(rate)) < end:
            self.timeline.at(at, self._arrive)

    def run(self, until: float) -> None:
        self.timeline.at(until, lambda: None)
        self.timeline.run(is_over=lambda: self.timeline.now >= until)

    def arrive(self, *, priority: int = 0, max_tokens: int = ANSWER) -> Client:
        now, name = self.timeline.now, f"r{len(self.clients)}"
        client = self.clients[name] = Client(now)
        request = EngineRequest(
            request_id=name,
            prompt_token_ids=list(range(100 + len(self.clients), 164 + len(self.clients))),
            params=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
            deadline_at=now + PATIENCE_S if self.has_deadline else None,
            priority=priority,
            is_whole=self.is_whole,
        )
        try:
            self.scheduler.add(request)
        except QueueFull as error:
            client.retry_after_s = error.retry_after_s or 0
            self._end(name, "refused")
            return client
        if not self.has_deadline:
            self.timeline.after(PATIENCE_S, lambda: self._leave(name))
        if not self._is_busy:
            self._is_busy = True
            self.timeline.after(0.0, self._begin_step)
        return client

    def _arrive(self) -> None:
        self.arrive()

    def served(self, start: float, end: float) -> float:
        """Answers a second that somebody got in that time."""
        whole = [c for c in self.clients.values() if c.ending == "length"]
        return sum(start <= c.ended_at < end for c in whole) / (end - start)

    def _leave(self, name: str) -> None:
        sequence = self.scheduler.sequences.get(name)
        if sequence is not None:
            self.scheduler.abort(name, has_left=True)
            self._end(name, "left")

    def _begin_step(self) -> None:
        batch = self.scheduler.schedule()
        self._take(self.scheduler.take_finished())
        if batch.is_empty:
            self._is_busy = False
            return
        step_s = step_seconds(
            self.sim, num_decodes=batch.num_decodes,
            num_prefill_tokens=batch.num_tokens - batch.num_decodes,
        )  # fmt: skip

        def end_step() -> None:
            result = StepResult([7] * len(batch.sequences))
            self._take(self.scheduler.update(batch, result, step_s))
            self._begin_step()

        self.timeline.after(step_s, end_step)

    def _take(self, outputs) -> None:
        for output in outputs:
            if output.finish_reason is not None:
                self._end(output.request_id, output.finish_reason)

    def _end(self, name: str, ending: str) -> None:
        client = self.clients[name]
        if not client.ending:
            client.ending, client.ended_at = ending, self.timeline.now


def peak(**kind) -> float:
    """What is served where no more comes than can be done."""
    world = World(**kind)
    world.load(0.95 * CAPACITY, start=0.0, end=60.0)
    world.run(60.0)
    return world.served(10.0, 60.0)


@pytest.mark.slow
@pytest.mark.parametrize("times", [1.3, 3.0, 10.0])
@pytest.mark.parametrize(
    "kind",
    [
        {"has_deadline": True},
        {"has_deadline": False, "is_whole": True},
        {"has_deadline": False, "is_whole": False},
    ],
    ids=["deadlines", "clients that leave", "streams that are left"],
)
def test_work_is_done_only_for_those_who_get_it(kind, times):
    world = World(**kind)
    world.load(times * CAPACITY, start=0.0, end=60.0)
    world.load(0.5 * CAPACITY, start=60.0, end=80.0)
    world.run(80.0)
    assert world.served(10.0, 60.0) >= 0.95 * peak(**kind)
    # By then it has seen clients leave, where there are no deadlines to say it.
    known = [c for c in world.clients.values() if c.sent_at > 30.0]
    refused = [c for c in known if c.ending == "refused"]
    lost = [c for c in known if c.ending in ("left", "deadline")]
    assert refused
    assert all(1 <= c.retry_after_s <= 30 for c in refused)
    assert len(lost) <= 0.05 * len(refused)
    # Over at once when the load falls.
    later = [c for c in world.clients.values() if 62.0 <= c.sent_at < 75.0]
    assert {c.ending for c in later} == {"length"}


def test_what_was_never_measured_refuses_no_request():
    world = World()
    clients = [world.arrive() for _ in range(100)]
    assert {c.ending for c in clients} == {""}


def test_a_request_that_waits_alone_is_accepted_whatever_was_forecast():
    """Else nobody waits, nothing is measured, and the last estimate stands for ever."""
    world = World()
    world.load(3 * CAPACITY, start=0.0, end=20.0)
    world.run(20.0)
    scheduler = world.scheduler
    for sequence in list(scheduler.waiting):
        scheduler.abort(sequence.request_id)
    assert world.arrive().ending == ""
    assert world.arrive(max_tokens=1000).ending in ("", "refused")


def test_after_a_stall_it_serves_as_before():
    world = World()
    world.load(3 * CAPACITY, start=0.0, end=60.0)
    world.run(20.0)
    world.timeline.now += 30.0  # nothing happens
    world.load(3 * CAPACITY, start=50.0, end=80.0)
    world.run(80.0)
    assert world.served(60.0, 80.0) >= 0.9 * peak()


def test_patient_clients_may_wait_as_long_as_is_allowed():
    """No deadline, and nobody leaves: the queue is as long as --queue-timeout says."""
    world = World(has_deadline=False, queue_timeout_s=10.0)
    world._leave = lambda name: None  # type: ignore[method-assign]
    world.load(3 * CAPACITY, start=0.0, end=60.0)
    world.run(60.0)
    done = [c for c in world.clients.values() if c.ending == "length" and c.ended_at > 30.0]
    waits = [c.ended_at - c.sent_at for c in done]
    assert 8.0 <= max(waits) <= 14.0
    assert world.served(10.0, 60.0) >= 0.95 * peak()


def test_background_work_is_neither_refused_nor_in_the_way():
    world = World()
    world.load(3 * CAPACITY, start=0.0, end=20.0)
    world.run(20.0)
    batch = [world.arrive(priority=BACKGROUND) for _ in range(200)]
    assert {c.ending for c in batch} == {""}
    assert world.scheduler.waiting.num_foreground < len(world.scheduler.waiting)
    before = world.scheduler.stats().queue_wait_s
    assert 0.0 < before < PATIENCE_S


def test_a_burst_that_has_room_is_not_refused():
    """Long answers after short ones, on an idle engine whose steps are slow: they share steps."""
    slow = SimConfig(step_base_ms=90.0, decode_token_ms=5.0, prefill_token_ms=15.0)
    world = World(has_deadline=False, is_whole=False, seats=128, sim=slow)
    world._leave = lambda name: None  # type: ignore[method-assign]

    def burst(start: float, max_tokens: int) -> None:
        def arrive() -> None:
            world.arrive(max_tokens=max_tokens)

        for number in range(8):
            world.timeline.at(start + 0.05 * number, arrive)

    burst(0.0, 8)
    burst(60.0, 64)
    world.run(180.0)
    assert {client.ending for client in world.clients.values()} == {"length"}
    assert max(client.ended_at - client.sent_at for client in world.clients.values()) < 30.0
