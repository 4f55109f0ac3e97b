"""Preemption, admission, overtaking: what happens when not everything fits.

Red when: a resumed sequence repeats or loses a token; preemption takes from the first instead of
the last; admission never learns; a small request waits behind a large one, or passes it forever.
"""

from __future__ import annotations

import random

import pytest

from octavo_engine.config import SchedulerConfig
from octavo_engine.scheduling.scheduler import Scheduler
from tests.fakes.clock import ManualClock
from tests.fakes.kv_machine import Loop, true_output
from tests.fakes.requests import make_prompt, make_request


def make_loop(num_blocks: int, clock: ManualClock | None = None, **config) -> Loop:
    settings = SchedulerConfig(**{"max_num_seqs": 8, **config})
    return Loop(Scheduler(settings, num_blocks=num_blocks, now=clock or ManualClock()))


@pytest.mark.parametrize("caching", [True, False])
def test_preemption_at_every_step_changes_no_token(caching):
    """Two sequences; one is thrown out before step i, for every i, between chunks and while
    decoding."""
    prompts = [make_prompt(37), make_prompt(20, first=3)]

    def run(step: int, victim: int) -> int:
        loop = make_loop(16, max_num_batched_tokens=16, enable_prefix_caching=caching)
        requests = [make_request(prompt, max_tokens=20) for prompt in prompts]
        for request in requests:
            loop.scheduler.add(request)
        num_steps = 0
        while loop.scheduler.has_work:
            sequence = loop.scheduler.sequences.get(requests[victim].request_id)
            if num_steps == step and sequence is not None and sequence.row >= 0:
                loop.scheduler._preempt(sequence)
                loop.scheduler.check_invariants()
            loop.step()
            num_steps += 1
        for request, prompt in zip(requests, prompts, strict=True):
            assert loop.outputs[request.request_id] == true_output(prompt, 20)
        return num_steps

    for victim in (0, 1):
        for step in range(run(-1, victim)):
            run(step, victim)


def test_a_preempted_sequence_finds_its_blocks_again():
    loop = make_loop(16)
    request = make_request(40, max_tokens=5)
    loop.scheduler.add(request)
    loop.step()
    loop.scheduler._preempt(loop.scheduler.running[0])
    loop.run()
    assert loop.machine.num_computed == 40 + 4  # nothing was computed twice: the new token was due
    assert loop.outputs[request.request_id] == true_output(make_prompt(40), 5)


def test_the_last_in_line_gives_way():
    loop = make_loop(5)
    loop.scheduler._admission.ratio = 0.0
    first, second = (make_request(make_prompt(30, first=i), max_tokens=20) for i in (0, 1))
    loop.scheduler.add(first)
    loop.scheduler.add(second)
    victims = []
    while loop.scheduler.has_work:
        loop.step()
        victims += [s.request_id for s in loop.scheduler.waiting if s.num_preemptions]
    assert set(victims) == {second.request_id}
    assert loop.scheduler.stats().preemptions == 1
    for i, request in enumerate((first, second)):
        assert loop.outputs[request.request_id] == true_output(make_prompt(30, first=i), 20)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_ten_times_the_pool_at_once_all_complete_without_a_storm(seed):
    """40 blocks for about 400 blocks of work, at most optimistic: nobody is preempted over and
    over."""
    rng = random.Random(seed)
    loop = make_loop(40, max_num_seqs=32, max_num_batched_tokens=128, max_model_len=400)
    loop.scheduler._admission.ratio = 0.0
    requests = []
    for i in range(60):
        prompt = make_prompt(rng.randint(1, 60), first=i)
        requests.append(make_request(prompt, max_tokens=rng.randint(1, 150)))
        loop.scheduler.add(requests[-1])
    sequences = list(loop.scheduler.sequences.values())
    loop.run()
    for request in requests:
        expected = true_output(request.prompt_token_ids, request.params.max_tokens or 0)
        assert loop.outputs[request.request_id] == expected
    preemptions = [sequence.num_preemptions for sequence in sequences]
    assert 0 < sum(preemptions) <= 60
    assert max(preemptions) <= 6


def test_admission_learns_from_preemption_and_forgets_slowly():
    loop = make_loop(5)
    admission = loop.scheduler._admission
    admission.ratio = 0.1
    for first in (0, 1):
        loop.scheduler.add(make_request(make_prompt(30, first=first), max_tokens=20))
    while not loop.scheduler.stats().preemptions:
        loop.step()
    assert admission.ratio > 0.5
    before = admission.ratio
    admission.after_step()
    assert before - 0.002 < admission.ratio < before


def test_a_small_request_passes_a_large_one_that_memory_cannot_hold_yet():
    loop = make_loop(10, max_num_batched_tokens=200)
    running = make_request(make_prompt(90), max_tokens=30)  # up to 8 blocks
    large = make_request(make_prompt(80, first=1), max_tokens=1)
    small = make_request(make_prompt(5, first=2), max_tokens=1)
    for request in (running, large, small):
        loop.scheduler.add(request)
    loop.step()
    assert loop.reasons == {small.request_id: "length"}
    loop.run()
    assert len(loop.reasons) == 3


def test_no_request_passes_one_that_has_waited_too_long():
    """A stream of small requests keeps memory busy; after aging_s the large one is next all the
    same."""
    clock = ManualClock()
    loop = make_loop(10, clock, aging_s=0.5, max_num_batched_tokens=300)
    small = iter(range(1000))

    def add_small() -> None:
        prompt = make_prompt(40, first=next(small))
        loop.scheduler.add(make_request(prompt, max_tokens=4))

    for _ in range(2):
        add_small()
    loop.step()
    large = make_request(make_prompt(140, first=77), max_tokens=1)  # nine of ten blocks
    loop.scheduler.add(large)
    num_steps = 0
    while large.request_id not in loop.reasons:
        add_small()
        loop.step()
        clock.advance(0.05)
        num_steps += 1
        assert num_steps < 20
    assert num_steps > 10  # it was passed for half a second first
    assert len(loop.reasons) > 5
    loop.run()


def test_long_prompts_do_not_hold_up_short_ones():
    """Two long prompts under way; a short one that comes later is answered in the next step."""
    loop = make_loop(400, max_num_batched_tokens=64, max_model_len=2000)
    for first in (0, 1, 2):
        loop.scheduler.add(make_request(make_prompt(1500, first=first), max_tokens=1))
    loop.step()
    assert loop.scheduler.stats().num_running == 2  # a third would hold memory and get nowhere
    short = make_request(make_prompt(20, first=9), max_tokens=1)
    loop.scheduler.add(short)
    loop.step()
    assert loop.reasons == {short.request_id: "length"}
    assert loop.run() <= (3 * 1500) // 64 + 3  # and no step was wasted


def test_long_prompts_that_wait_are_not_looked_up_in_each_step(monkeypatch):
    loop = make_loop(400, max_num_batched_tokens=64, max_model_len=2000)
    for first in range(42):
        loop.scheduler.add(make_request(make_prompt(1500, first=first), max_tokens=1))
    loop.step()
    kv, looked_up = loop.scheduler.kv, list[object]()
    monkeypatch.setattr(type(kv), "match", spy(type(kv).match, looked_up))
    for _ in range(16):
        loop.step()
    assert loop.scheduler.stats().num_running == 2
    assert len(looked_up) == 2 * 40


def spy(match, looked_up):
    def seen(self, sequence):
        looked_up.append(sequence)
        return match(self, sequence)

    return seen


def test_a_stream_of_short_prompts_does_not_hold_up_a_long_one():
    """The oldest gets half of every step, whatever comes after it."""
    loop = make_loop(400, max_num_batched_tokens=64, max_model_len=2000)
    long = make_request(make_prompt(640), max_tokens=1)
    loop.scheduler.add(long)
    num_steps = 0
    while long.request_id not in loop.reasons:
        for i in range(4):
            prompt = make_prompt(16, first=100 + 4 * num_steps + i)
            loop.scheduler.add(make_request(prompt, max_tokens=1))
        loop.step()
        num_steps += 1
    assert num_steps <= 640 // 28
    loop.run()


def test_equal_prompts_are_served_in_turn_and_not_in_slices():
    loop = make_loop(400, max_num_batched_tokens=64)
    ids = []
    for first in range(6):
        request = make_request(make_prompt(64, first=first), max_tokens=1)
        loop.scheduler.add(request)
        ids.append(request.request_id)
    loop.run()
    assert list(loop.reasons) == ids
    assert len(loop.batches) <= 7


def test_priority_decides_who_goes_first():
    loop = make_loop(64, policy="priority", max_num_seqs=1)
    ids = {}
    for priority in (5, 0, 2):
        request = make_request(make_prompt(5, first=priority), priority=priority, max_tokens=1)
        loop.scheduler.add(request)
        ids[request.request_id] = priority
    loop.run()
    assert [ids[i] for i in loop.reasons] == [0, 2, 5]


def test_under_fcfs_priority_is_ignored():
    loop = make_loop(64, max_num_seqs=1)
    ids = []
    for priority in (5, 0, 2):
        ids.append(f"p{priority}")
        loop.scheduler.add(
            make_request(5 + priority, priority=priority, request_id=ids[-1], max_tokens=1)
        )
    loop.run()
    assert list(loop.reasons) == ids


def test_urgent_requests_delay_the_others_for_a_bounded_time():
    clock = ManualClock()
    loop = make_loop(64, clock, policy="priority", max_num_seqs=1, aging_s=2.0)
    patient = make_request(make_prompt(5, first=400), priority=3, max_tokens=1)
    loop.scheduler.add(patient)
    waited = 0.0
    while patient.request_id not in loop.reasons:
        loop.scheduler.add(make_request(make_prompt(5, first=int(waited)), max_tokens=1))
        loop.step()
        clock.advance(1.0)
        waited += 1.0
    assert waited == 7.0  # three levels of two seconds each, and the step it runs in


# -- deadlines ------------------------------------------------------------------------------------


def test_a_deadline_ends_those_that_wait_and_those_that_run():
    clock = ManualClock(0.0)
    loop = make_loop(64, clock, max_num_seqs=1)
    running = make_request(5, deadline_at=1.0, max_tokens=50)
    waiting = make_request(make_prompt(5, first=1), deadline_at=1.0)
    patient = make_request(make_prompt(5, first=2), max_tokens=2)
    for request in (running, waiting, patient):
        loop.scheduler.add(request)
    loop.step()
    clock.advance(1.0)
    outputs = loop.step()
    assert {o.request_id: o.finish_reason for o in outputs} == {
        running.request_id: "deadline",
        waiting.request_id: "deadline",
        patient.request_id: None,
    }
    loop.run()
    assert loop.reasons[patient.request_id] == "length"


def test_a_prompt_that_cannot_make_its_deadline_is_not_computed():
    clock = ManualClock(0.0)
    loop = make_loop(64, clock)
    loop.step_s = 1.0
    loop.scheduler.add(make_request(make_prompt(100), max_tokens=1))
    loop.run()
    before = loop.machine.num_computed
    late = make_request(make_prompt(100, first=1), deadline_at=0.9)
    in_time = make_request(make_prompt(50, first=2), deadline_at=0.9, max_tokens=1)
    loop.scheduler.add(late)
    loop.scheduler.add(in_time)
    loop.run()
    assert loop.reasons[late.request_id] == "deadline"
    assert loop.reasons[in_time.request_id] == "length"
    assert loop.machine.num_computed == before + 50


def test_deadlines_of_finished_requests_do_not_pile_up():
    loop = make_loop(64)
    for _ in range(1000):
        loop.scheduler.add(make_request(2, deadline_at=1e9, max_tokens=1))
        loop.run()
    assert len(loop.scheduler._deadlines) < 100


# -- time -----------------------------------------------------------------------------------------


def test_prefill_is_cut_so_that_decoding_goes_on_in_time():
    """1 ms a prefill token, 10 ms a step: with 50 ms a step there is room for about 40 tokens."""
    loop = make_loop(400, max_num_batched_tokens=512, max_step_ms=50.0, max_model_len=2000)

    def measure(batch) -> None:
        num_decodes = batch.counts.count(1)
        loop.step_s = 0.010 + 0.001 * (batch.num_tokens - num_decodes)

    loop.between = measure
    loop.scheduler.add(make_request(make_prompt(100), max_tokens=300))
    for _ in range(50):
        loop.step()
    loop.scheduler.add(make_request(make_prompt(1000, first=1), max_tokens=1))
    for _ in range(20):
        loop.step()
        assert loop.step_s <= 0.055
    assert 30 <= max(loop.batches[-1].counts) <= 45


def test_however_slow_a_step_is_prompts_advance():
    loop = make_loop(400, max_step_ms=0.001)
    loop.step_s = 60.0
    loop.scheduler.add(make_request(make_prompt(100), max_tokens=100))
    loop.step()
    loop.step()
    loop.scheduler.add(make_request(make_prompt(100, first=1), max_tokens=1))
    loop.step()
    assert sorted(loop.batches[-1].counts) == [1, 16]
    loop.run()


def test_stats_count_what_is_queued():
    loop = make_loop(64, max_num_seqs=1, max_num_batched_tokens=16)
    for first in range(2):
        loop.scheduler.add(make_request(make_prompt(40, first=first), max_tokens=1))
    assert loop.scheduler.stats().queued_tokens == 80
    loop.step()
    stats = loop.scheduler.stats()
    assert (stats.queued_tokens, stats.num_running, stats.num_waiting) == (64, 1, 1)
    assert (stats.kv_blocks_used, stats.kv_blocks_total) == (3, 64)
    loop.run()
    assert loop.scheduler.stats().queued_tokens == 0


def test_a_prompt_that_memory_does_not_suffice_for_is_not_looked_up_in_each_step(monkeypatch):
    loop = make_loop(20, max_model_len=300)
    loop.scheduler.add(make_request(make_prompt(100), max_tokens=120))
    loop.step()
    waiting = make_request(make_prompt(250, first=9), max_tokens=1)
    loop.scheduler.add(waiting)
    looked_up = list[object]()
    kv = loop.scheduler.kv
    monkeypatch.setattr(type(kv), "match", spy(type(kv).match, looked_up))
    for _ in range(64):
        loop.step()
    assert 1 <= len(looked_up) <= 9
    assert len(loop.scheduler.running) == 1
    loop.run()
    assert loop.reasons[waiting.request_id] == "length"
