"""How many layers each stage gets, by the time that layers take on this host.

Layers that are written down alike take the same time, so that one of each kind is loaded, computes
a few steps of one token for each sequence, and is let go of. The first one has the embedding, the
last one the head and the sampling of what it gives.
"""

from __future__ import annotations

import logging
import time
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import numpy as np

from octavo_engine import _native
from octavo_engine.backends.backend import BackendLimits, BackendStep, StateStep
from octavo_engine.backends.native.stages import StagePlace, balance, layer_kinds
from octavo_engine.backends.registry import build_rank, whole_graph
from octavo_engine.config import BLOCK_SIZE
from octavo_engine.executor.stage_rows import MEASURED
from octavo_engine.sampling.batch import SAMPLING_ROW, SamplingBatch

if TYPE_CHECKING:
    from collections.abc import Callable

    from octavo_engine.backends.native.backend import NativeBackend
    from octavo_engine.config import EngineConfig
    from octavo_engine.weights.source import ModelFiles

logger = logging.getLogger(__name__)

CONTEXT = 128  # tokens that each sequence has behind it
MAX_STREAMS = 32  # whose tokens are shared out over the steps that are under way
_WARM_UP_STEPS = 3
_MEASURE_S = 0.1  # for one kind of layer, once it is loaded
_MIN_STEPS = 5


def settle_partition(
    config: EngineConfig,
    files: ModelFiles,
    measure: Callable[[EngineConfig, ModelFiles, StagePlace], float] | None = None,
) -> EngineConfig:
    """With the layers of each stage where they are to be measured, by `measure` in seconds a step;
    otherwise as it is. Raises ConfigError and ModelError."""
    if config.pipeline_layer_partition != MEASURED:
        return config
    costs = _layer_costs(config, files, measure or measure_layer)
    sizes = balance(costs, config.pipeline_parallel_size)
    times = [sum(costs[a:b]) / 1e6 for a, b in pairwise(accumulate(sizes, initial=0))]
    logger.info(
        "Stages of %s layers, by measured time: %s ms a step",
        ",".join(map(str, sizes)),
        ", ".join(f"{ms:.2f}" for ms in times),
    )
    return config.replace(pipeline_layer_partition=",".join(map(str, sizes)))


def _layer_costs(
    config: EngineConfig,
    files: ModelFiles,
    measure: Callable[[EngineConfig, ModelFiles, StagePlace], float],
) -> list[int]:
    """Nanoseconds of each layer in a step."""
    graph, num_layers = whole_graph(config, files)
    kinds = layer_kinds(graph, num_layers)
    found: dict[object, int] = {}
    for layer, kind in enumerate(kinds):
        if kind not in found:
            # As on a host of its own: it has the threads of one stage to itself.
            place = StagePlace(layer, num_layers, (1,) * num_layers, has_host=True)
            found[kind] = round(1e9 * measure(config, files, place))
    return [found[kind] for kind in kinds]


def measure_layer(config: EngineConfig, files: ModelFiles, place: StagePlace) -> float:
    """Seconds of a step in the stage at `place`, at best."""
    num_stages = config.pipeline_parallel_size
    threads = config.num_threads
    if config.nnodes == 1 and config.distributed_executor_backend != "ray":
        threads = max(1, (threads or _native.available_cores()) // num_stages)
    num_rows = max(1, min(config.scheduler.max_num_seqs, MAX_STREAMS) // num_stages)
    backend = build_rank(config.replace(num_threads=threads), files, stage=place)
    try:
        step, sampling = _prepare(backend, place, num_rows)
        return _best_time(backend, step, sampling if place.is_last else None)
    finally:
        backend.close()


def _best_time(backend: NativeBackend, step: BackendStep, sampling: SamplingBatch | None) -> float:
    times: list[float] = []
    while len(times) < _WARM_UP_STEPS + _MIN_STEPS or sum(times) < _MEASURE_S:
        begin = time.perf_counter()
        if sampling is None:
            backend.logits(step)
        else:
            backend.execute(step, sampling)
        times.append(time.perf_counter() - begin)
    return min(times[_WARM_UP_STEPS:])


def _prepare(
    backend: NativeBackend, place: StagePlace, num_rows: int
) -> tuple[BackendStep, SamplingBatch]:
    """A step of one token for each of `num_rows` sequences, which its last layer samples."""
    blocks_each = CONTEXT // BLOCK_SIZE + 1
    length = blocks_each * BLOCK_SIZE
    num_groups = len(backend.cache_layout.groups)
    limits = BackendLimits(
        max_tokens=num_rows,
        max_seqs=num_rows,
        max_logit_rows=num_rows,
        max_model_len=length,
        num_state_slots=num_rows,
    )
    backend.prepare(limits, num_rows * blocks_each * num_groups)
    shape = (num_groups, num_rows, blocks_each)
    tables = np.arange(num_groups * num_rows * blocks_each, dtype=np.int32).reshape(shape)
    rows = np.arange(num_rows, dtype=np.int32)
    hidden = backend.config.hidden_size
    inputs = np.random.default_rng(0).standard_normal((num_rows, hidden), np.float32)
    states = None
    if backend.cache_layout.states:
        nothing = np.full(num_rows, -1, np.int32)
        states = StateStep(rows, nothing, np.empty((0, 2), np.int32))
    step = BackendStep(
        token_ids=rows % backend.vocab_size,
        positions=np.full(num_rows, CONTEXT, np.int32),
        slots=tables[:, :, -1] * BLOCK_SIZE + CONTEXT % BLOCK_SIZE,
        seq_starts=np.arange(num_rows + 1, dtype=np.int32),
        seq_lens=np.full(num_rows, CONTEXT + 1, np.int32),
        rows=rows,
        block_tables=tables,
        logit_rows=rows,
        copies=np.empty((0, 3), np.int32),
        states=states,
        input_rows=None if place.is_first else rows,
        inputs=None if place.is_first else inputs,
    )
    table = np.zeros(num_rows, SAMPLING_ROW)
    table["top_p"] = table["repetition_penalty"] = 1.0
    sampling = SamplingBatch(
        table=table,
        rows=rows,
        positions=np.full(num_rows, CONTEXT + 1, np.int32),
        targets=np.full(num_rows, -1, np.int32),
        history=np.zeros((num_rows, length), np.int32),
    )
    return step, sampling
