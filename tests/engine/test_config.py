"""The engine's settings: each that cannot work is refused by its flag, before loading."""

import pytest

from octavo_engine.config import EngineConfig, SchedulerConfig
from octavo_engine.errors import ConfigError


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("device", "gpu", "--device must be one of auto, cpu, cuda, plugin, torch, sim; got gpu"),
        ("dtype", "int3", "--dtype must be one of auto, bfloat16, float16, float32; got int3"),
        ("load_format", "pt", "--load-format must be one of auto, dummy; got pt"),
        ("max_model_len", 0, "--max-model-len must be at least 1; got 0"),
        ("num_threads", 0, "--num-threads must be from 1 to 1024; got 0"),
        ("num_threads", 10**6, "--num-threads must be from 1 to 1024; got 1000000"),
        ("memory_fraction", 0.0, "--memory-fraction must be above 0 and at most 1; got 0.0"),
        ("memory_fraction", float("nan"), "--memory-fraction must be above 0 and at most 1"),
        ("kv_cache_memory_bytes", -5, "--kv-cache-memory-bytes must be above 0; got -5"),
    ],
)
def test_a_setting_that_cannot_work_is_refused_by_its_flag(field, value, message):
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**{field: value})


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("max_num_seqs", 0, "--max-num-seqs must be at least 1; got 0"),
        ("max_num_batched_tokens", 0, "--max-num-batched-tokens must be at least 1; got 0"),
        ("max_queue", 0, "--max-queue must be at least 1; got 0"),
        ("max_step_ms", 0.0, "--max-step-ms must be above 0; got 0.0"),
        ("policy", "lifo", "--scheduling-policy must be one of fcfs, priority; got lifo"),
    ],
)
def test_so_is_one_of_the_scheduler(field, value, message):
    with pytest.raises(ConfigError, match=message):
        EngineConfig(scheduler=SchedulerConfig(**{field: value}))


def test_the_model_answers_to_its_reference_unless_named():
    assert EngineConfig(model="org/name").names == ("org/name",)
    assert EngineConfig(served_model_names=("a", "b")).names == ("a", "b")
