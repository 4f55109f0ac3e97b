"""Unique prefixes without end leave nothing behind; the long form is benchmarks/router/soak.py."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

import pytest

from benchmarks.router.soak import MIB, Sample, gauge, slope, soak
from octavo_router.config.settings import RouterConfig
from octavo_router.residency import native
from octavo_router.residency.api import CHAT, MESSAGES, RESPONSES

if TYPE_CHECKING:
    from tests.router.conftest import Platform

pytestmark = pytest.mark.slow

NUM_BLOCKS = 3 * 4096  # of the platform's engines


def test_a_router_is_as_large_after_unique_prompts_as_in_their_midst(platform: Platform):
    """What it knows is bounded by what engines hold; what it takes, by what it knows."""
    samples: list[Sample] = []
    num_requests = seed = 0
    while num_requests <= 50 or len(samples) < 6:  # what the engines hold is over then
        seed += 1
        assert seed < 10
        more, count = asyncio.run(
            soak(
                platform.router.url, platform.router.process.pid, model="sim", duration_s=6.0,
                every_s=0.5, num_clients=4, num_words=300, seed=seed, tell=False,
            )
        )  # fmt: skip
        samples += more
        num_requests += count
    # A key for each 64 bytes, and 16 tokens a block of a byte each: four blocks a key.
    assert max(one.num_keys for one in samples) <= NUM_BLOCKS
    middle = samples[len(samples) // 2]
    assert samples[-1].rss_bytes - middle.rss_bytes < 8 * MIB, samples


def test_history_of_plain_servers_is_bounded_for_all_shapes():
    """What was sent to them is remembered; the oldest is forgotten."""
    hot_path = native.load()
    limit = 2_000
    index = hot_path.ResidencyIndex(max_assumed_keys_per_slot=limit)
    slot = index.add_slot()
    assert RouterConfig().routing.max_keys_per_endpoint >= limit
    sizes = []
    for number in range(600):
        text = f"{number} " * 300
        messages = [{"role": "user", "content": text}]
        for kind, body in (
            (CHAT, {"messages": messages}),
            (MESSAGES, {"messages": messages, "system": text}),
            (RESPONSES, {"input": text, "instructions": "x" + text}),
        ):
            keys = hot_path.scan(json.dumps(body).encode(), kind).keys
            assert len(keys) >= 8 * 10
            index.assume(slot, keys, 16.0)
        assert index.num_keys(slot) <= limit
        sizes.append(index.memory_bytes)
    assert max(sizes[300:]) <= 1.1 * max(sizes[150:300])  # it goes up and down, between bounds


def test_what_is_measured_is_what_is_there():
    page = 'octavo_router_index_keys{endpoint="a"} 3\noctavo_router_index_keys{endpoint="b"} 4.0\n'
    assert gauge(page, "index_keys") == 7
    assert gauge(page, "index_memory_bytes") == 0
    rising = [Sample(at, 0, 0, 1000 * at) for at in range(10)]
    assert slope(rising) == 1000.0
    assert slope([one._replace(rss_bytes=5) for one in rising]) == 0.0
