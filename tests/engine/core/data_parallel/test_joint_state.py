"""Figures, health and settings of several cores as those of one engine."""

from __future__ import annotations

from typing import Any

import pytest

from octavo_engine.config import EngineConfig
from octavo_engine.core.data_parallel.core_share import core_share
from octavo_engine.core.data_parallel.data_parallel_client import profile_path
from octavo_engine.core.data_parallel.joint_health import join_health
from octavo_engine.core.data_parallel.joint_stats import join_stats
from octavo_engine.core.info import CoreHealth
from octavo_engine.errors import ConfigError
from octavo_engine.protocol.loading import LOADING, LoadProgress
from octavo_engine.state.outputs import EngineStats, TierStats

READY = CoreHealth("ready")
DEAD = CoreHealth("dead", "it is started again in 1 s")
GONE = CoreHealth("dead", "given up", restarts=False)


def test_counts_add_up_and_the_last_step_is_of_one_core() -> None:
    one = EngineStats(
        num_running=2, prompt_tokens=10, steps=5, step_ms=3.0, step_tokens=7, last_step_at=100.0,
        spec_accepted_per_pos=[3, 1], running_adapters=["b", "a"], prefill_tokens_per_s=50.0,
        queue_wait_s=4.0, longest_wait_s=2.0, tiers=TierStats(host_blocks=3),
    )  # fmt: skip
    two = EngineStats(
        num_running=1, prompt_tokens=5, steps=2, step_ms=8.0, step_tokens=1, last_step_at=90.0,
        spec_accepted_per_pos=[1, 1, 1], running_adapters=["a"], prefill_tokens_per_s=25.0,
        queue_wait_s=1.0, longest_wait_s=0.5,
    )  # fmt: skip
    joint = join_stats([one, two])
    assert (joint.num_running, joint.prompt_tokens, joint.steps) == (3, 15, 7)
    assert (joint.step_ms, joint.step_tokens, joint.last_step_at) == (3.0, 7, 100.0)
    assert joint.spec_accepted_per_pos == [4, 2, 1]
    assert joint.running_adapters == ["a", "b"]
    assert joint.prefill_tokens_per_s == 75.0
    assert (joint.queue_wait_s, joint.longest_wait_s) == (1.0, 0.5)
    assert joint.tiers == TierStats(host_blocks=3)
    assert joint.cores == [one, two]


@pytest.mark.parametrize(
    ("cores", "was_ready", "state", "reason"),
    [
        ([READY, READY], True, "ready", ""),
        ([READY, DEAD], True, "ready", "data-parallel rank 1 of 2: it is started again in 1 s"),
        ([GONE, READY], True, "dead", "data-parallel rank 0 of 2: given up"),
        ([READY, CoreHealth("loading")], False, "loading", "data-parallel rank 1 of 2: loading"),
        ([DEAD, CoreHealth("loading")], True, "loading", "rank 0 of 2: it is started"),
        ([DEAD, CoreHealth("stalled", "stuck")], True, "stalled", "rank 1 of 2: stuck"),
        ([DEAD, DEAD], True, "dead", "rank 1 of 2: it is started again"),
    ],
)
def test_an_engine_is_ready_while_a_core_is(
    cores: list[CoreHealth], was_ready: bool, state: str, reason: str
) -> None:
    health = join_health(cores, was_ready=was_ready)
    assert health.state == state
    assert reason in health.reason
    assert health.restarts == (GONE not in cores)


def test_progress_is_that_of_all() -> None:
    half = CoreHealth("loading", "", 0.5, LoadProgress(LOADING, 50, 100, 10))
    health = join_health([half, READY], was_ready=False)
    assert health.progress == 0.75
    health = join_health([half, half], was_ready=False)
    assert health.loading == LoadProgress(LOADING, 100, 200, 20)


def test_threads_and_memory_are_divided() -> None:
    config = EngineConfig(
        device="cpu", data_parallel_size=2, data_parallel_rank=1, num_threads=4,
        kv_cache_memory_bytes=1001, kv_offloading_size=3.0,
    )  # fmt: skip
    share = core_share(config)
    assert (share.num_threads, share.kv_cache_memory_bytes) == (2, 500)
    assert (share.memory_fraction, share.kv_offloading_size) == (0.25, 1.5)
    assert (share.data_parallel_size, share.data_parallel_rank) == (1, 0)
    assert share.scheduler == config.scheduler
    alone = EngineConfig()
    assert core_share(alone) is alone


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data_parallel_size": 0}, "--data-parallel-size must be from 1 to 64; got 0"),
        ({"data_parallel_rank": 2}, "must be below --data-parallel-size; got 2"),
        ({"device": "cuda"}, "it must be 1 here, with an engine for each GPU behind"),
        ({"kv_disk_path": "/x"}, "--kv-disk-path needs --data-parallel-size 1"),
        ({"kv_events_config": '{"enable_kv_cache_events": true, "publisher": "zmq"}'},
         "--kv-events-config needs --data-parallel-size 1"),
    ],
)  # fmt: skip
def test_settings_that_cannot_be_combined(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(data_parallel_size=2).replace(**changes)


def test_each_core_writes_a_file_of_its_own() -> None:
    assert profile_path("/a/octavo-1.json.gz", 0) == "/a/octavo-1.json.gz"
    assert profile_path("/a/octavo-1.json.gz", 2) == "/a/octavo-1-rank2.json.gz"
