"""The model of step times: what it learns, and how little noise changes it."""

from __future__ import annotations

import random

import pytest

from octavo_engine.scheduling.step_time import StepTimeModel


def trained(rng: random.Random, noise: float = 0.0, num_steps: int = 300) -> StepTimeModel:
    """5 ms a step, 0.2 ms a decoding sequence, 1 ms a prompt token."""
    model = StepTimeModel()
    for _ in range(num_steps):
        decodes = rng.randint(0, 32)
        prefill = rng.choice([0, 0, rng.randint(1, 200)]) if decodes else rng.randint(1, 200)
        step_s = 0.005 + 0.0002 * decodes + 0.001 * prefill
        model.observe(decodes, prefill, step_s * (1.0 + noise * rng.uniform(-1, 1)))
    return model


def test_step_times_are_learned():
    model = trained(random.Random(1))
    assert model.decode_s(10) == pytest.approx(0.007, rel=0.01)
    assert model.prefill_s(100) == pytest.approx(0.1, rel=0.1)
    assert model.prefill_tokens(0.057, num_decodes=10) == pytest.approx(50, abs=5)


def test_noise_is_averaged_out():
    model = trained(random.Random(2), noise=0.3)
    assert model.decode_s(16) == pytest.approx(0.0082, rel=0.2)
    assert model.prefill_s(100) == pytest.approx(0.1, rel=0.25)


def test_an_outlier_counts_little():
    model = trained(random.Random(3))
    before = model.prefill_s(100), model.decode_s(10)
    model.observe(10, 0, 20.0)
    model.observe(10, 20, 20.0)
    assert model.decode_s(10) < 1.5 * before[1]
    assert model.prefill_s(100) < 1.5 * before[0]


def test_a_lasting_change_is_followed():
    model = trained(random.Random(4))
    for _ in range(200):
        model.observe(10, 0, 0.014)
        model.observe(10, 50, 0.114)
    assert model.decode_s(10) == pytest.approx(0.014, rel=0.05)
    assert model.prefill_s(50) == pytest.approx(0.1, rel=0.1)


def test_without_observations_times_are_zero():
    model = StepTimeModel()
    assert (model.decode_s(5), model.prefill_s(5), model.tokens_per_s) == (0.0, 0.0, 0.0)
    assert model.prefill_tokens(0.2, num_decodes=1) == 128
    model.observe(4, 0, 0.01)
    assert model.decode_s(4) == model.decode_s(1) == pytest.approx(0.01)
    assert model.tokens_per_s == pytest.approx(400.0)
