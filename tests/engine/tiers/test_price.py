"""Load or recompute: the quicker of the two, for tiers whose prices have to be learned.

Red when: the comparison is turned round; a measurement is not taken in; a tier that was slow once
is never tried again.
"""

import random

from octavo_engine.tiers.price import TierMeter, is_worth_loading


def test_the_choice_is_right_for_tiers_and_models_of_any_speed():
    chance = random.Random(7)
    right = total = 0
    for _ in range(60):
        byte_s, token_s = 10 ** chance.uniform(-10, -7), 10 ** chance.uniform(-5, -2)
        token_bytes = 10 ** chance.uniform(3.5, 5.5)
        meter = TierMeter(latency_s=5e-3, bytes_per_s=2e8)
        for _ in range(60):  # what is read on other occasions
            size = int(token_bytes * chance.randint(16, 4000))
            meter.observe(size, 5e-3 + size * byte_s * chance.uniform(0.95, 1.05))
        for _ in range(100):
            tokens = chance.randint(1, 256) * 16
            true_s = 5e-3 + tokens * token_bytes * byte_s
            load_s = meter.seconds(int(tokens * token_bytes))
            chosen = is_worth_loading(load_s=load_s, recompute_s=tokens * token_s)
            right += chosen == (true_s < tokens * token_s)
            total += 1
    assert right / total >= 0.99


def test_while_the_time_of_a_step_is_unknown_loading_is_tried():
    assert is_worth_loading(load_s=9.0, recompute_s=0.0)


def test_a_tier_that_was_slow_once_is_tried_again():
    meter = TierMeter(latency_s=0.0, bytes_per_s=1e8)
    meter.observe(1000, 60.0)
    slow_s = meter.seconds(10**6)
    assert not is_worth_loading(load_s=slow_s, recompute_s=0.1)
    for _ in range(1000):
        meter.refused()
    assert is_worth_loading(load_s=meter.seconds(10**6), recompute_s=0.1)
    assert meter.seconds(10**6) >= 0.01, "never quicker than was assumed"


def test_a_tier_quicker_than_assumed_stays_so_when_it_is_refused():
    meter = TierMeter(latency_s=0.0, bytes_per_s=1e3)
    for _ in range(100):
        meter.observe(10**6, 1e-3)
    before = meter.seconds(10**6)
    meter.refused()
    assert meter.seconds(10**6) == before
