"""The benchmark of single layers: what it counts, and that each kind of layer runs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from benchmarks import layers
from octavo.measure.machine_limits import MachineLimits
from octavo_engine import _native

LIMITS = MachineLimits(2, 10.0, {"bf16": 100.0, "float32": 50.0, "int8": 200.0})
TINY: dict[str, Any] = {
    "latents": layers.Latents(2, 32, 16, 16, 16),
    "experts": layers.Experts(4, 2, 64, 32, "q4"),
    "4-bit floats": layers.Experts(4, 2, 64, 32, "mxfp4"),
    "ssd": layers.Scan("ssd", (4, 16, 2, 16)),
    "delta": layers.Scan("delta", (2, 4, 16, 16)),
}


@pytest.mark.parametrize("name", TINY)
def test_each_kind_of_layer_runs_and_has_shares(monkeypatch, name):
    monkeypatch.setattr(layers, "SHAPES", TINY)
    monkeypatch.setattr(layers, "FAR_BEYOND_CACHES", 1 << 16)
    monkeypatch.setattr(layers, "ARENA", 1 << 20)
    result = layers.measure(_native.Team(1), name, 2, 32, LIMITS)
    assert result.ms > 0
    assert 0 < result.read_share <= result.limit_share * 1.001
    assert (result.latent_share is not None) == (name == "latents")


def test_a_step_over_latents_reads_them_and_the_heads_matrices():
    work = layers.latent_work(layers.Latents(4, 512, 64, 128, 128), 1, 1000)
    assert work.latent_bytes == 1000 * 576 * 2
    assert work.read_bytes == work.latent_bytes + 4 * 512 * 256 * 2
    assert work.flops == 2 * 4 * (1000 * (576 + 512) + 512 * 256)


def test_only_experts_that_a_token_chose_count():
    shape = layers.Experts(8, 2, 64, 32, "q4")
    [alone, *_] = layers.chosen_experts(shape, 1, [0])
    assert alone == 2
    assert all(2 <= count <= 8 for count in layers.chosen_experts(shape, 6, range(5)))
    assert layers.expert_work(shape, 2, 1).read_bytes == 2 * 3 * 64 * 32 * 5 // 8


def test_states_are_read_and_written_back():
    assert layers.scan_work(layers.Scan("ssd", (4, 16, 2, 8)), 3).read_bytes == 3 * 2 * 4 * 512
    assert layers.Scan("delta", (2, 4, 16, 8)).values == 4 * 16 * 8


def test_the_round_nearest_to_its_limit_counts():
    works = [layers.Work(int(1e9)), layers.Work(int(2e9), flops=50e9)]
    best = layers.best_of("x", 1, [0.2, 0.25], works, LIMITS)
    assert best.read_share == pytest.approx(0.8)
    slow = layers.best_of("x", 1, [1.0], [layers.Work(int(1e9), int(5e8), 50e9)], LIMITS)
    assert slow.limit_share == pytest.approx(0.5)
    assert slow.read_share == pytest.approx(0.1)
    assert slow.latent_share == pytest.approx(0.05)


def test_scores_of_tokens_are_what_the_program_embeds():
    """The experts that are counted are those that a step chooses."""
    shape = layers.Experts(4, 1, 32, 16, "q4")
    bench = layers.expert_layers(_native.Team(1), shape, 1, 4)
    bench.step_s(2)
    rows = np.random.default_rng(4).standard_normal((4, 4))
    assert bench.program.expert_tokens()[0][int(np.argmax(rows[2]))] == 1
