"""The scheduler's parts on their own: sharing a step, places in line, step times, limits."""

from __future__ import annotations

import random

import pytest

from octavo_engine.config import SchedulerConfig
from octavo_engine.scheduling.admission import AdmissionControl
from octavo_engine.scheduling.chunks import demand, share_budget
from octavo_engine.scheduling.policy import WaitingQueue, place_in_line
from octavo_engine.scheduling.step_time import StepTimeModel
from tests.fakes.requests import make_sequence


@pytest.mark.parametrize(
    ("needs", "budget", "shares"),
    [
        ([], 10, []),
        ([5], 10, [5]),
        ([50], 10, [10]),
        ([50, 3], 10, [7, 3]),  # the oldest has half and what the short one leaves
        ([50, 50], 10, [9, 1]),  # one each, and equals in turn
        ([50, 4, 4], 10, [5, 4, 1]),
        ([3, 50, 3], 10, [3, 4, 3]),
        ([4, 4, 4], 12, [4, 4, 4]),
        ([9, 9, 9], 2, [1, 1, 0]),
        ([9], 0, [0]),
    ],
)
def test_sharing_a_step(needs, budget, shares):
    assert share_budget(needs, budget) == shares


def test_sharing_wastes_nothing_and_starves_nobody_old():
    rng = random.Random(3)
    for _ in range(2000):
        needs = [rng.choice([1, 3, 20, 500]) for _ in range(rng.randint(1, 9))]
        budget = rng.randint(1, 300)
        shares = share_budget(needs, budget)
        assert sum(shares) == min(sum(needs), budget)
        assert all(0 <= share <= need for share, need in zip(shares, needs, strict=True))
        assert shares[0] >= min(needs[0], (budget - len(needs)) // 2)
        assert sum(share > 0 for share in shares) >= min(len(needs), budget)


def test_long_prompts_claim_half_a_step_between_them():
    assert demand([], 100) == 0
    assert demand([1000], 100) == 50
    assert demand([1000, 1000], 100) == 50
    assert demand([1000, 50, 20], 100) == 120


def test_places_in_line():
    fcfs, priority = SchedulerConfig(), SchedulerConfig(policy="priority", aging_s=5.0)
    assert place_in_line(fcfs, priority=9, number=1, arrived_at=50.0) < place_in_line(
        fcfs, priority=0, number=2, arrived_at=1.0
    )
    waits = place_in_line(priority, priority=1, number=1, arrived_at=100.0)
    assert place_in_line(priority, priority=0, number=2, arrived_at=104.9) < waits
    assert place_in_line(priority, priority=0, number=3, arrived_at=105.1) > waits


def test_the_waiting_queue_keeps_order_and_counts_tokens():
    queue = WaitingQueue()
    sequences = [make_sequence(i + 1) for i in range(4)]
    for i in (2, 0, 3, 1):
        sequences[i].order = (0.0, i)
        queue.push(sequences[i])
    assert list(queue) == sequences
    assert queue.num_tokens == 10
    queue.remove(sequences[2])
    assert list(queue) == [*sequences[:2], sequences[3]]
    assert queue.num_tokens == 7


# -- step times -----------------------------------------------------------------------------------


def taught(rng: random.Random, noise: float = 0.0, num_steps: int = 300) -> StepTimeModel:
    """5 ms a step, 0.2 ms a decoding sequence, 1 ms a prompt token."""
    model = StepTimeModel()
    for _ in range(num_steps):
        decodes = rng.randint(0, 32)
        prefill = rng.choice([0, 0, rng.randint(1, 200)]) if decodes else rng.randint(1, 200)
        step_s = 0.005 + 0.0002 * decodes + 0.001 * prefill
        model.observe(decodes, prefill, step_s * (1.0 + noise * rng.uniform(-1, 1)))
    return model


def test_step_times_are_learned():
    model = taught(random.Random(1))
    assert model.decode_s(10) == pytest.approx(0.007, rel=0.01)
    assert model.prefill_s(100) == pytest.approx(0.1, rel=0.1)
    assert model.prefill_tokens(0.057, num_decodes=10) == pytest.approx(50, abs=5)


def test_noise_is_averaged_out():
    model = taught(random.Random(2), noise=0.3)
    assert model.decode_s(16) == pytest.approx(0.0082, rel=0.2)
    assert model.prefill_s(100) == pytest.approx(0.1, rel=0.25)


def test_a_hiccup_counts_little():
    model = taught(random.Random(3))
    before = model.prefill_s(100), model.decode_s(10)
    model.observe(10, 0, 20.0)
    model.observe(10, 20, 20.0)
    assert model.decode_s(10) < 1.5 * before[1]
    assert model.prefill_s(100) < 1.5 * before[0]


def test_a_lasting_change_is_followed():
    model = taught(random.Random(4))
    for _ in range(200):
        model.observe(10, 0, 0.014)
        model.observe(10, 50, 0.114)
    assert model.decode_s(10) == pytest.approx(0.014, rel=0.05)
    assert model.prefill_s(50) == pytest.approx(0.1, rel=0.1)


def test_nothing_known_is_said_so():
    model = StepTimeModel()
    assert (model.decode_s(5), model.prefill_s(5), model.tokens_per_s) == (0.0, 0.0, 0.0)
    assert model.prefill_tokens(0.2, num_decodes=1) == 128
    model.observe(4, 0, 0.01)
    assert model.decode_s(4) == model.decode_s(1) == pytest.approx(0.01)
    assert model.tokens_per_s == pytest.approx(400.0)


# -- admission ------------------------------------------------------------------------------------


def test_the_more_often_preempted_the_more_is_reserved():
    admission = AdmissionControl()
    admission.ratio = 0.1
    sequence = make_sequence(10, max_num_tokens=170)
    reserves = []
    for times in range(6):
        sequence.num_preemptions = times
        reserves.append(admission.reserve(sequence))
    assert reserves == pytest.approx([1.0, 3.5, 6.0, 8.5, 10.0, 10.0])


def test_the_ratio_decays_to_its_floor():
    admission = AdmissionControl()
    for _ in range(10_000):
        admission.after_step()
    assert admission.ratio == pytest.approx(0.1)
    for _ in range(10_000):
        admission.after_preemption([])
    assert admission.ratio == 1.0
