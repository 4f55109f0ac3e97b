"""Weights and KV that leave the device and come back: the bits of an answer are the same."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from octavo_engine.backends.torch.cuda_loader import DeviceLinear
from octavo_engine.backends.torch.parking import Parking
from octavo_engine.executor.executor import ReleasesKV, ReleasesWeights
from octavo_engine.models.config import ModelConfig
from tests.engine.backends.driver import Driver, random_tokens
from tests.engine.backends.torch_cuda.opening import open_cuda
from tests.engine.backends.torch_cuda.test_packed_models import Quantized
from tests.engine.models.tiny import tiny_model


def test_a_storage_is_parked_once_and_all_its_views_come_back():
    whole = torch.arange(12.0)
    half, bias = whole.view(3, 4)[1:], torch.ones(3)
    weight = DeviceLinear(whole.view(3, 4), bias)
    parking = Parking([weight, half, DeviceLinear(half)])
    assert parking.num_bytes == 4 * (12 + 3)
    before = [whole.clone(), bias.clone()]
    parking.park()
    assert parking.num_bytes == 0
    parking.unpark()
    assert torch.equal(whole, before[0]) and torch.equal(bias, before[1])
    assert torch.equal(half, before[0].view(3, 4)[1:])
    parking.unpark()  # a second call does nothing
    assert torch.equal(whole, before[0])


@pytest.mark.parametrize("kind", ["plain", "int4", "fp8"])
@pytest.mark.parametrize("keep", [True, False])
def test_answers_are_the_same_after_each_level_of_sleep(keep, kind, device):
    model = tiny_model("qwen3")
    checkpoint = model.checkpoint() if kind == "plain" else Quantized(kind)
    backend = open_cuda(
        ModelConfig.from_hf(model.config), checkpoint, max_model_len=512,
        dtype=torch.float16, device=device.type, kernels="plain",
    )  # fmt: skip
    assert isinstance(backend, ReleasesKV) and isinstance(backend, ReleasesWeights)
    driver = Driver(backend)
    token_ids = random_tokens(40)
    before = driver.add(0, token_ids)
    driver.step([(before, 40)])
    for _ in range(2):  # the second call does nothing; and so it goes a second time
        for _ in range(2):
            backend.release_kv()
            backend.release_weights(keep=keep)
        assert (backend._parking is not None) == keep
        if backend._parking is not None:
            assert backend._parking.num_bytes == 0
        for _ in range(2):
            backend.restore_weights()
            backend.restore_kv()
        after = driver.add(1, token_ids)
        driver.step([(after, 40)])
        assert np.array_equal(np.array(after.logits), np.array(before.logits))
    backend.close()


def test_what_came_from_no_file_stays(device):
    from benchmarks.gpu.random_model import TINY, Bench
    from octavo_engine.backends.backend import BackendLimits

    limits = BackendLimits(max_tokens=8, max_seqs=2, max_logit_rows=4, max_model_len=64)
    bench = Bench.make(TINY, limits, device=device.type, dtype=torch.float32, kernels="plain")
    step = bench.step([0], [5])
    before = bench.backend.logits(step)
    bench.backend.release_weights(keep=False)
    assert np.array_equal(bench.backend.logits(step), before)
