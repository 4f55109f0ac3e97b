"""Engines whose tiers have known prices choose the quicker of loading and computing.

Simulated: the model and the store take their time on a clock that only they move. The engine learns
both prices from what it sees, from its first request on.

Red when: a price is not learned, or not for all sizes of reads; a store that became quicker is
never tried again.
"""

from __future__ import annotations

import random
from typing import Any, cast

import numpy as np
import pytest

from octavo_engine.backends.sim.backend import SimBackend
from octavo_engine.backends.sim.clock import VirtualClock
from octavo_engine.config import BLOCK_SIZE, EngineConfig, SchedulerConfig, SimConfig
from octavo_engine.core.build import build_engine
from tests.fakes.requests import make_request

REQUESTS = 200
NOISE = 0.05


class PricedStore:
    """Has every block, at a price."""

    num_blocks = num_bytes = num_unsaved = 0

    def __init__(self, clock, chance, page_bytes, *, latency_s, page_s):
        self.clock, self.chance, self.page_bytes = clock, chance, page_bytes
        self.latency_s, self.page_s = latency_s, page_s
        self.listeners = []

    def __contains__(self, name):
        return True

    def put(self, name, page):
        pass

    def drop(self, names):
        pass

    def close(self):
        pass

    def true_s(self, num_pages):
        return self.latency_s + num_pages * self.page_s

    def fetch(self, names, done, *, is_wanted):
        noise = self.chance.uniform(1 - NOISE, 1 + NOISE)
        self.clock.sleep(self.true_s(len(names)) * noise)
        done([np.zeros(self.page_bytes, np.uint8) for _ in names])


def make_engine(tmp_path, chance):
    clock = VirtualClock()
    token_s = 10 ** chance.uniform(-5, -2.5)
    config = EngineConfig(
        device="sim",
        max_model_len=4096,
        scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=2048),
        sim=SimConfig(kv_blocks=512, prefill_token_ms=token_s * 1e3, step_base_ms=0.01),
        kv_disk_path=str(tmp_path),
    )
    engine, _ = build_engine(config, backend=SimBackend(config, clock), now=clock.now)
    assert engine._tiers is not None
    (tier,) = engine._tiers.stored
    tier.store.close()
    store = PricedStore(
        clock, chance, engine._tiers._sizes.block,
        latency_s=10 ** chance.uniform(-4, -1),
        page_s=token_s * BLOCK_SIZE * 10 ** chance.uniform(-2, 1),
    )  # fmt: skip
    tier.store = cast("Any", store)
    return engine, store, token_s


def chose_to_load(engine, chance, num_tokens):
    before = engine.stats().tiers.disk_hit_blocks
    prompt = [chance.randrange(512) for _ in range(num_tokens)]
    engine.add(make_request(prompt, max_tokens=1, temperature=0.0))
    while engine.has_work:
        engine.step()
    return engine.stats().tiers.disk_hit_blocks > before


def run_world(engine, store, token_s, chance):
    """How many of the choices were right: no more than the noise dearer than the other one."""
    right = 0
    for _ in range(REQUESTS):
        num_blocks = int(2 ** chance.uniform(0, 7))
        loaded = chose_to_load(engine, chance, num_blocks * BLOCK_SIZE + 1)
        load_s, compute_s = store.true_s(num_blocks), num_blocks * BLOCK_SIZE * token_s
        taken, other = (load_s, compute_s) if loaded else (compute_s, load_s)
        right += taken <= other * (1 + NOISE)
    return right


@pytest.mark.slow
def test_loading_and_computing_are_chosen_by_price(tmp_path):
    rights = []
    for seed in range(24):
        chance = random.Random(seed)
        engine, store, token_s = make_engine(tmp_path / str(seed), chance)
        rights.append(run_world(engine, store, token_s, chance))
        engine.close()
    assert sum(rights) / (REQUESTS * len(rights)) >= 0.99, rights
    assert min(rights) >= 0.95 * REQUESTS, rights


def test_a_store_that_became_quicker_is_read_again(tmp_path):
    chance = random.Random(5)
    engine, store, token_s = make_engine(tmp_path, chance)
    store.latency_s, store.page_s = 0.0, 10 * BLOCK_SIZE * token_s
    for _ in range(20):
        chose_to_load(engine, chance, 1025)
    assert not chose_to_load(engine, chance, 1025)
    store.page_s = BLOCK_SIZE * token_s / 10
    assert any([chose_to_load(engine, chance, 1025) for _ in range(120)][100:])
    engine.close()
