"""Sizes of the KV pool and of the context: cut, refused or granted, each with its numbers."""

import pytest

from octavo_engine.config import EngineConfig, SchedulerConfig
from octavo_engine.core.capacity import gib, kv_memory, settle_capacity
from octavo_engine.errors import ConfigError
from octavo_engine.kv.needs import KVNeeds

GIB = 2**30


def settle(max_blocks, own=4096, **config):
    return settle_capacity(
        EngineConfig(**config),
        KVNeeds(),
        own_max_model_len=own,
        max_blocks=max_blocks,
        where="the pool",
    )


def test_a_share_of_free_memory_goes_to_the_cache():
    assert kv_memory(EngineConfig(memory_fraction=0.25), 8 * GIB) == 2 * GIB
    assert kv_memory(EngineConfig(), 8 * GIB) == 4 * GIB


def test_a_size_that_was_asked_for_is_taken_or_refused():
    assert kv_memory(EngineConfig(kv_cache_memory_bytes=3 * GIB), 4 * GIB) == 3 * GIB
    with pytest.raises(ConfigError, match=r"asks for 3\.00 GiB, but only 2\.00 GiB"):
        kv_memory(EngineConfig(kv_cache_memory_bytes=3 * GIB), 2 * GIB)


def test_never_more_blocks_than_all_sequences_can_use():
    capacity = settle(10**6, own=100, scheduler=SchedulerConfig(max_num_seqs=3))
    assert (capacity.num_blocks, capacity.max_model_len) == (3 * 7, 100)


def test_the_models_own_context_is_cut_to_the_pool_and_said():
    capacity = settle(100, own=4096)
    assert (capacity.num_blocks, capacity.max_model_len) == (100, 1600)
    assert "cut from the model's own 4096" in capacity.note


def test_a_context_that_was_asked_for_is_not_cut():
    assert settle(100, max_model_len=1600).max_model_len == 1600
    with pytest.raises(
        ConfigError, match="1601 tokens needs 101 KV blocks, but the pool holds 100"
    ):
        settle(100, max_model_len=1601)


def test_a_context_beyond_the_models_own_is_refused():
    with pytest.raises(ConfigError, match=r"--max-model-len 4097 .* \(4096 tokens\)"):
        settle(10**6, max_model_len=4097)


@pytest.mark.parametrize("max_blocks", [0, 1, 7])
def test_memory_too_small_for_one_sequence_is_said_with_the_numbers(max_blocks):
    with pytest.raises(ConfigError, match=f"needs 8 KV blocks, but the pool holds {max_blocks};"):
        settle(max_blocks)


def test_a_small_model_needs_no_more_than_its_own_context():
    assert settle(1, own=16).max_model_len == 16
    assert settle(1, max_model_len=5).max_model_len == 5


def test_sizes_are_readable():
    assert (gib(3 * GIB), gib(5 * 2**20)) == ("3.00 GiB", "5.0 MiB")
