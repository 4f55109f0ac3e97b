"""Sizes of the KV pool and of the context: cut, refused or granted, each with its numbers."""

import pytest

from octavo_engine.backends.native.kv_format import settle_kv_format
from octavo_engine.caches import KVSpec, group_layers, one_group
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


# -- layers with windows

GEMMA_3_1B = group_layers([KVSpec(1, 256, None if (i + 1) % 6 == 0 else 512) for i in range(26)])


def test_tokens_that_fit_are_counted_by_windows():
    needs = KVNeeds((None, *[512] * 6), max_step_tokens=2048)
    config = EngineConfig(scheduler=SchedulerConfig(max_num_seqs=4))
    capacity = settle_capacity(
        config, needs, own_max_model_len=32768, max_blocks=10**6, where="the pool"
    )
    # All tokens in one group; in six, a window of 32 blocks behind the 129 that a step touches.
    assert needs.blocks(32768) == 2048 + 6 * (32 + 129)
    assert capacity.num_blocks == 4 * needs.blocks(32768)
    assert f"sequences of up to 32768 tokens in {needs.blocks(32768)} blocks each" in capacity.note
    small = settle_capacity(
        config, needs, own_max_model_len=32768, max_blocks=2000, where="the pool"
    )
    assert small.max_model_len == (2000 - 6 * 161) * 16
    assert needs.blocks(small.max_model_len) == 2000


def test_a_window_in_all_layers_makes_the_context_endless():
    needs = KVNeeds((4096,), max_step_tokens=2048)
    capacity = settle_capacity(
        EngineConfig(), needs, own_max_model_len=10**6, max_blocks=256 + 129, where="the pool"
    )
    assert capacity.max_model_len == 10**6
    with pytest.raises(ConfigError, match="needs 385 KV blocks, but the pool holds 384"):
        settle_capacity(
            EngineConfig(max_model_len=10**6), needs,
            own_max_model_len=10**6, max_blocks=256 + 128, where="the pool",
        )  # fmt: skip


def test_128k_tokens_of_gemma_3_in_a_sixth_of_the_memory_and_in_8_bits_in_a_tenth():
    """Its layers without a window alone are 4 of 26: in one format there is no getting below."""
    length = 131072
    bf16, int8 = settle_kv_format("bfloat16", "bf16"), settle_kv_format("int8", "bf16")
    before = one_group(GEMMA_3_1B.specs).page_bytes(bf16.bytes_of) * length // 16
    needs = KVNeeds(GEMMA_3_1B.windows, max_step_tokens=2048)
    now = GEMMA_3_1B.page_bytes(bf16.bytes_of) * needs.blocks(length)
    assert before == 3.25 * GIB
    assert 4 / 26 < now / before < 1 / 5.8
    assert GEMMA_3_1B.page_bytes(int8.bytes_of) * needs.blocks(length) < before / 11
