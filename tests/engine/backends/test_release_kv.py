"""The native backend gives the memory of its KV cache back to the system, and takes it again."""

from __future__ import annotations

import numpy as np
import psutil

from octavo_engine.backends.native.backend import NativeBackend
from octavo_engine.backends.registry import build_backend
from octavo_engine.config import EngineConfig
from octavo_engine.executor.executor import ReleasesKV
from octavo_engine.weights.source import resolve_model
from tests.engine.backends.driver import NUM_BLOCKS, Driver

TOKENS = [1, 9690, 198, 2683, 359, 253, 5356]


def test_the_memory_is_the_systems_until_it_is_taken_again():
    config = EngineConfig(device="cpu", num_threads=1)
    backend = build_backend(config, resolve_model("demo://smollm2"))
    assert isinstance(backend, NativeBackend)
    assert isinstance(backend, ReleasesKV)
    driver = Driver(backend)  # whose poison touches every page
    request = driver.add(0, TOKENS)
    driver.step([(request, len(TOKENS))])
    process = psutil.Process()

    before = process.memory_info().rss
    backend.release_kv()
    backend.release_kv()
    freed = before - process.memory_info().rss
    assert freed > 0.9 * NUM_BLOCKS * backend.kv_bytes_per_block

    backend.restore_kv()
    backend.restore_kv()
    again = driver.add(1, TOKENS)
    driver.step([(again, len(TOKENS))])
    assert np.array_equal(again.logits, request.logits)
    backend.close()
