"""Encoders of random weights over texts of all lengths, as a server has them: texts a second, and
the share of the device's products."""

from __future__ import annotations

import math
import statistics
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from benchmarks.gpu.random_model import RandomLoader
from octavo_engine.backends.pooling import make_step
from octavo_engine.backends.torch.cuda_pooling import CudaPoolingBackend
from octavo_engine.core.pooling.engine import PoolingEngine, PoolingLimits
from octavo_engine.models.pooling_config import read_pooling
from octavo_engine.state.pooling import PoolingParams, PoolingRequest

if TYPE_CHECKING:
    from benchmarks.gpu.measure import Ceilings
    from octavo_engine.backends.torch.cuda_loader import DeviceLinear
    from octavo_engine.config import KernelChoice

BERT: dict[str, Any] = {"architectures": ["BertModel"], "vocab_size": 30522, "hidden_act": "gelu"}
SHAPES: dict[str, dict[str, Any]] = {
    "minilm": {"hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 6,
               "num_attention_heads": 12},
    "bert_large": {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24,
                   "num_attention_heads": 16},
}  # fmt: skip
LENGTHS = (20, 200)  # tokens of a text, from and to
NUM_TEXTS = 2048
STEP_TOKENS = (2048, 8192)  # what --max-num-batched-tokens is by default, and a larger one
ROUNDS = 3


def encoders(
    ceilings: Ceilings,
    *,
    device: torch.device,
    shapes: dict[str, dict[str, Any]] = SHAPES,
    num_texts: int = NUM_TEXTS,
    step_tokens: tuple[int, ...] = STEP_TOKENS,
    kernels: KernelChoice = "auto",
) -> dict[str, float]:
    """All of an engine but the texts' way to it and from it."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(LENGTHS[0], LENGTHS[1] + 1, num_texts).tolist()
    texts = [rng.integers(0, 30000, length).tolist() for length in lengths]
    found = {}
    for name, shape in shapes.items():
        backend, layers = _backend(shape, device, kernels)
        weights = sum(math.prod(layer.weight.shape) for layer in layers)
        pairs = sum(length * length for length in lengths)
        columns, depth = shape["hidden_size"], shape["num_hidden_layers"]
        flops = 2 * weights * sum(lengths) + 4 * depth * columns * pairs
        for tokens in step_tokens:
            seconds = _served_s(backend, texts, tokens)
            label = f"{name}_{tokens}"
            found[f"{label}_texts_per_s"] = num_texts / seconds
            found[f"{label}_tokens_per_s"] = sum(lengths) / seconds
            found[f"{label}_peak_share"] = flops / seconds / ceilings.flops_per_s
            step_s, share = _device_s(backend, texts, tokens)
            found[f"{label}_step_ms"] = step_s * 1e3
            found[f"{label}_step_peak_share"] = flops * share / step_s / ceilings.flops_per_s
        found[f"{name}_one_text_ms"] = _alone_s(backend, texts[0]) * 1e3
        backend.close()
    return found


def _backend(
    shape: dict[str, Any], device: torch.device, kernels: KernelChoice
) -> tuple[CudaPoolingBackend, list[DeviceLinear]]:
    config = read_pooling(BERT | shape, None)
    assert config is not None
    loader = RandomLoader(device, torch.float16)
    backend = CudaPoolingBackend.of_loader(
        config, loader, max_model_len=512, dtype=torch.float16, device=device, kernels=kernels
    )
    return backend, loader.linears


def _served_s(backend: CudaPoolingBackend, texts: list[list[int]], max_tokens: int) -> float:
    """Of the quickest round: by then all that can be is captured."""
    limits = PoolingLimits(
        max_model_len=512, max_tokens=max_tokens, max_texts=256, max_queue=len(texts) + 1
    )
    engine = PoolingEngine(backend, limits)
    engine.warm_up()
    requests = [
        PoolingRequest(request_id=str(i), token_ids=ids, params=PoolingParams(task="embed"))
        for i, ids in enumerate(texts)
    ]
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        engine.add_pooling(requests)
        done = 0
        while engine.has_work:
            done += len(engine.step().pooled)
        times.append(time.perf_counter() - start)
        assert done == len(texts)
    return min(times)


def _device_s(
    backend: CudaPoolingBackend, texts: list[list[int]], max_tokens: int
) -> tuple[float, float]:
    """Seconds of a step that is launched again and again, without waiting for its rows; and the
    share of all tokens that it holds."""
    batch: list[tuple[list[int], list[int]]] = []
    room = max_tokens
    for ids in texts:
        if len(ids) <= room and len(batch) < 256:
            batch.append((ids, []))
            room -= len(ids)
    step = make_step(batch, is_last=False)
    for _ in range(3):
        backend.launch(step, is_per_token=False).wait()
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for _ in range(10):
            rows = backend.launch(step, is_per_token=False)
        rows.wait()
        times.append((time.perf_counter() - start) / 10)
    return min(times), (max_tokens - room) / sum(map(len, texts))


def _alone_s(backend: CudaPoolingBackend, ids: list[int]) -> float:
    step = make_step([(ids, ())], is_last=False)
    times = []
    for _ in range(20):
        start = time.perf_counter()
        backend.pool(step)
        times.append(time.perf_counter() - start)
    return statistics.median(times)
