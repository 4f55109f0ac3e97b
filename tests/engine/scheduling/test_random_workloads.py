"""Thousands of random workloads: every token is the truth, every invariant holds at every step.

The workloads are small and mean: pools of a few blocks, budgets of a few tokens, prompts that share
stems, tenants, resumes, priorities, deadlines, prompt scores, failures, aborts at any moment. A
failing seed is reported by pytest; give it to `Workload` to see it again.

Mutants that turned these red: publish at admission instead of in update(); no pin on a copy's
source; `limit` of a match without the -1; free() in table order without the count check; the tail
published with one token too many; a preempted sequence keeping num_computed_tokens.
"""

from __future__ import annotations

import random
from functools import partial
from typing import TYPE_CHECKING

import pytest

from octavo_engine.config import SchedulerConfig
from octavo_engine.errors import ContextLengthExceeded, InvalidRequest, QueueFull
from octavo_engine.kv.states import StateSnapshots
from octavo_engine.scheduling.scheduler import Scheduler
from octavo_engine.scheduling.speculation import Speculation
from octavo_engine.state.retention import KVRetention
from tests.fakes.clock import ManualClock
from tests.fakes.guessing import AnswerGuesser
from tests.fakes.kv_machine import Loop, true_output
from tests.fakes.requests import make_prompt, make_request

if TYPE_CHECKING:
    from octavo_engine.state.request import EngineRequest
    from octavo_engine.state.sequence import Sequence


class Workload:
    """One random engine and what comes to it."""

    def __init__(
        self, seed: int, windows: tuple[int | None, ...] = (None,), *, has_states: bool = False
    ) -> None:
        rng = self.rng = random.Random(seed)
        self.config = SchedulerConfig(
            max_num_seqs=rng.choice([1, 2, 4, 8]),
            max_num_batched_tokens=rng.choice([1, 3, 16, 64, 500]),
            max_model_len=rng.choice([8, 40, 100, 200]),
            max_queue=rng.choice([3, 100]),
            policy=rng.choice(["fcfs", "priority"]),
            aging_s=rng.choice([0.0, 0.1, 5.0]),
            max_step_ms=rng.choice([1.0, 200.0]),
            enable_prefix_caching=rng.random() < 0.85,
            max_retained_kv=rng.choice([0.0, 0.5, 1.0]),
            max_retained_kv_per_tenant=rng.choice([0.25, 1.0]),
        )
        self.num_blocks = rng.choice([1, 2, 4, 8, 16]) * len(windows)
        self.clock = ManualClock()
        scheduler = Scheduler(
            self.config,
            num_blocks=self.num_blocks,
            windows=windows,
            states=self.make_states() if has_states else None,
            now=self.clock,
        )
        self.capacity = scheduler.kv.needs.tokens(self.num_blocks, self.config.max_model_len)
        scheduler._admission.ratio = rng.choice([0.0, 0.7])
        self.loop = Loop(scheduler)
        self.loop.between = lambda _: self.maybe_abort(0.03)
        self.loop.machine.fails = lambda _: rng.random() < 0.01
        self.requests: dict[str, EngineRequest] = {}
        self.stems = [make_prompt(rng.randint(1, 60), first=first) for first in range(3)]

    def make_states(self) -> StateSnapshots:
        return StateSnapshots(
            self.config.max_num_seqs,
            self.rng.choice([0, 1, 2, 6, 20]),
            stride=self.rng.choice([16, 16, 32, 48]),
        )

    def maybe_retention(self) -> KVRetention | None:
        rng = self.rng
        if rng.random() < 0.5:
            return None
        session = rng.choice(["", "s", "t"])
        ttl_s = rng.choice([0.05, 1.0, 1e6, *([0.0] if session else [])])
        return KVRetention(ttl_s, rng.choice([0, 50, 100]), session, rng.choice(["", "o"]))

    def maybe_add(self) -> None:
        rng = self.rng
        tail = [rng.randrange(3) for _ in range(rng.choice([0, 0, 1, 5, 20]))]
        prompt = rng.choice(self.stems)[: rng.randint(1, 60)] + tail
        request = make_request(
            prompt,
            request_id=f"r{len(self.requests)}",
            output=true_output(prompt, rng.choice([0, 0, 0, 1, 5])),
            max_tokens=rng.choice([1, 2, 10, 40, None]),
            min_tokens=rng.choice([0, 0, 1]),
            stop_token_ids=tuple(range(rng.choice([0, 0, 30]))),
            priority=rng.randint(0, 2),
            cache_salt=rng.choice(["", "", "tenant"]),
            group=rng.choice(["", "", "a", "b"]),
            deadline_at=rng.choice([None, None, None, self.clock() + rng.random()]),
            prompt_logprobs=rng.choice([None, None, None, None, None, 0]),
            retention=self.maybe_retention(),
        )
        try:
            self.loop.scheduler.add(request)
        except (QueueFull, ContextLengthExceeded, InvalidRequest):
            self.loop.scheduler.check_invariants()
        else:
            self.requests[request.request_id] = request

    def maybe_abort(self, probability: float) -> None:
        if self.requests and self.rng.random() < probability:
            output = self.loop.scheduler.abort(self.rng.choice(list(self.requests)))
            if output is not None:
                self.loop.take(output)

    def run(self) -> None:
        num_to_come = self.rng.randint(1, 25)
        while num_to_come or self.loop.scheduler.has_work:
            while num_to_come and self.rng.random() < 0.4:
                num_to_come -= 1
                self.maybe_add()
            self.maybe_abort(0.03)
            if self.loop.scheduler.has_work:
                self.loop.step()
            self.clock.advance(0.01)
        for request in self.requests.values():
            self.check(request)

    def check(self, request) -> None:
        """It ended once, for a reason that holds, and said nothing but the truth."""
        reason = self.loop.reasons[request.request_id]
        prompt, resumed = request.prompt_token_ids, request.output_token_ids
        whole = resumed + self.loop.outputs[request.request_id]
        assert whole == true_output(prompt, len(whole))
        limit = min(self.config.max_model_len, self.capacity + 1) - len(prompt)
        if request.params.max_tokens is not None:
            limit = min(limit, request.params.max_tokens)
        stops = [
            i
            for i, token in enumerate(whole[len(resumed) :], len(resumed) + 1)
            if token in request.params.stop_token_ids and i >= request.params.min_tokens
        ]
        if reason == "length":
            assert len(whole) == limit or len(whole) == len(resumed) >= limit
            assert not stops or len(whole) == len(resumed)
        elif reason == "stop":
            assert stops == [len(whole)] or len(whole) == len(resumed)
        else:
            assert reason in ("abort", "deadline", "error")
            assert not stops
            assert len(whole) <= limit


@pytest.mark.parametrize("batch", range(10))
def test_random_workloads(batch):
    for seed in range(batch * 60, (batch + 1) * 60):
        try:
            Workload(seed).run()
        except BaseException as error:
            error.add_note(f"Workload({seed})")
            raise


ONE_IN_SIX = (None, *[24] * 5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "windows",
    [(24,), (2,), (100,), (None, 24), (None, 2, 40), ONE_IN_SIX],
    ids=lambda windows: "-".join(map(str, windows)),
)
@pytest.mark.parametrize("batch", range(2))
def test_random_workloads_of_layers_with_windows(windows, batch):
    for seed in range(1000 + batch * 40, 1000 + (batch + 1) * 40):
        try:
            Workload(seed, windows).run()
        except BaseException as error:
            error.add_note(f"Workload({seed}, {windows})")
            raise


@pytest.mark.slow
@pytest.mark.parametrize(
    "windows", [(None,), (24,), (None, 24)], ids=lambda windows: "-".join(map(str, windows))
)
@pytest.mark.parametrize("batch", range(2))
def test_random_workloads_of_layers_with_states(windows, batch):
    num_loads = 0
    for seed in range(2000 + batch * 60, 2000 + (batch + 1) * 60):
        workload = Workload(seed, windows, has_states=True)
        try:
            workload.run()
        except BaseException as error:
            error.add_note(f"Workload({seed}, {windows}, has_states=True)")
            raise
        num_loads += sum(len(batch.state_loads) for batch in workload.loop.batches)
    assert num_loads > 0


@pytest.mark.slow
@pytest.mark.parametrize("windows", [(None,), (None, 24)], ids=["None", "None-24"])
@pytest.mark.parametrize("batch", range(2))
def test_random_workloads_of_layers_with_states_and_drafts(windows, batch):
    """Many of which are wrong: the machine sees whether a state stands behind the tokens it should,
    and Loop whether every slot has one owner."""
    num_accepted = num_wrong = num_snapshots = 0
    for seed in range(3000 + batch * 60, 3000 + (batch + 1) * 60):
        workload = Workload(seed, windows, has_states=True)
        scheduler = workload.loop.scheduler
        scheduler._speculation = Speculation(partial(guesser, random.Random(seed)))
        workload.loop.step_s = 0.0  # no time is known: whatever is guessed is verified
        try:
            workload.run()
        except BaseException as error:
            error.add_note(f"Workload({seed}, {windows}, has_states=True), with drafts")
            raise
        stats = scheduler.stats()
        num_accepted += stats.spec_accepted_tokens
        num_wrong += stats.spec_draft_tokens - stats.spec_accepted_tokens
        assert scheduler.kv.states is not None
        num_snapshots += len(scheduler.kv.states.cached)
    assert min(num_accepted, num_wrong) > 300 and num_snapshots > 20


def guesser(rng: random.Random, sequence: Sequence) -> AnswerGuesser:
    truth = true_output(list(sequence.request.prompt_token_ids), 300)
    return AnswerGuesser(truth, sequence.num_prompt_tokens, honesty=0.7, rng=rng)


def test_the_same_seed_replays_the_same_steps():
    def replay(seed: int):
        workload = Workload(seed)
        workload.run()
        batches = workload.loop.batches
        return [(b.rows, b.starts, b.counts, b.copies, b.grown) for b in batches]

    for seed in range(20):
        assert replay(seed) == replay(seed)


def test_lifecycles_leave_nothing_behind():
    """Many short lives in one engine: at the end all blocks, rows and books are as at the start."""
    rng = random.Random(5)
    config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=64)
    loop = Loop(Scheduler(config, num_blocks=10, now=ManualClock()))
    loop.machine.fails = lambda _: rng.random() < 0.05
    for i in range(1500):
        request = make_request(
            make_prompt(rng.randint(1, 40), first=rng.randrange(4)),
            request_id=f"r{i}",
            max_tokens=rng.randint(1, 4),
        )
        loop.scheduler.add(request)
        if rng.random() < 0.2:
            output = loop.scheduler.abort(f"r{rng.randint(0, i)}")
            if output is not None:
                loop.take(output)
        loop.step()
    loop.run()
    assert len(loop.reasons) == 1500
    assert set(loop.reasons.values()) == {"length", "abort", "error"}
    assert loop.scheduler.kv.pool.num_free == 10
    assert not loop.scheduler.sequences
    assert not loop.scheduler.kv.computing
    assert sorted(loop.scheduler.free_rows) == [0, 1, 2, 3]
