"""How much KV fits beside a step."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from octavo_engine.backends.backend import BackendLimits
from octavo_engine.backends.torch.cuda_loader import DeviceLinear
from octavo_engine.backends.torch.memory import (
    GRAPH_BYTES,
    SPARE_BYTES,
    count_bytes,
    expanded_bytes,
    graph_bytes,
    kv_budget,
    step_bytes,
)
from octavo_engine.backends.torch.packed import GroupedWeight, PackedExperts
from octavo_engine.errors import ConfigError

GIB = 1 << 30
SHAPE = SimpleNamespace(
    hidden_size=4096, intermediate_size=14336, num_heads=32, num_kv_heads=8, head_dim=128,
    vocab_size=128256, experts=None, recurrent=None,
)  # fmt: skip
LIMITS = BackendLimits(max_tokens=2048, max_seqs=256, max_logit_rows=320, max_model_len=8192)


def test_a_step_of_an_8b_model_is_counted():
    layer = 2048 * (4096 * 16 + 14336 * 3 * 2)
    assert step_bytes(SHAPE, LIMITS, 2) == layer + 320 * 128256 * 24


def test_counts_of_all_rows_tokens_are_counted():
    assert count_bytes(SHAPE, LIMITS) == 256 * 128256 * 4


def test_the_largest_weight_that_a_step_expands_is_counted():
    """Experts and the head never are, and what lies in 16 bits need not be."""

    def four_bits(rows):
        packed = torch.zeros((rows, 64), dtype=torch.int8)
        return GroupedWeight(packed, torch.zeros((rows, 1)), None, bits=4, half=64)

    plain = DeviceLinear(torch.zeros((999, 128)))
    made = [
        DeviceLinear(four_bits(8)),
        DeviceLinear(four_bits(24)),
        plain,
        DeviceLinear(four_bits(500), is_head=True),
        PackedExperts(four_bits(400), 4),
    ]
    assert expanded_bytes(made, 2) == 24 * 128 * 2
    assert expanded_bytes([plain], 2) == 0


def test_graphs_are_counted_with_their_step_results_and_launches():
    counted = graph_bytes(SHAPE, LIMITS, 2, num_graphs=48, max_tokens=512)
    layer = 512 * (4096 * 16 + 14336 * 3 * 2)
    assert counted == layer + 256 * 128256 * 10 + 48 * GRAPH_BYTES
    many = dataclasses.replace(LIMITS, max_seqs=1024)  # then decode steps are the largest
    assert graph_bytes(SHAPE, many, 2, num_graphs=0, max_tokens=512) > 2 * layer


def test_kv_gets_its_share_but_never_what_a_step_needs():
    assert kv_budget(100 * GIB, 2 * GIB, fraction=0.5) == 50 * GIB
    assert kv_budget(100 * GIB, 2 * GIB, fraction=1.0) == 98 * GIB - SPARE_BYTES


def test_too_little_memory_is_told_with_both_numbers():
    with pytest.raises(
        ConfigError, match=r"1\.00 GiB of device memory.*needs 2\.75 GiB.*--max-num"
    ):
        kv_budget(GIB, 2 * GIB, fraction=0.9)
