"""Layers with windows on a device hold their windows and no more: block tables by groups of layers.

Red when: a layer reads another group's table; a graph reads the tables of the step it was captured
with; what left a window is sent, or read.
"""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest
import torch

from octavo_engine.backends.torch.device_kv import device_layout
from octavo_engine.backends.torch.device_step import StepBuffer, StepSizes, cut_walks
from octavo_engine.backends.torch.device_tables import DeviceTables
from octavo_engine.caches import CacheSpec, KVSpec, LatentSpec, StateSpec, one_group
from octavo_engine.models.config import ModelConfig
from tests.engine.backends.driver import Driver, random_tokens, run_alone
from tests.engine.backends.tolerance import FLOAT32
from tests.engine.backends.torch_cuda import test_pretended as pretended_engines
from tests.engine.backends.torch_cuda.opening import open_cuda
from tests.engine.backends.torch_cuda.recorders import RunAgain
from tests.engine.backends.torch_cuda.steps import LIMITS, make_sampling, make_step
from tests.engine.core.test_windows import MAX_MODEL_LEN, NUM_LAYERS, Rig
from tests.engine.models.tiny import tiny_model
from tests.fakes.random_life import random_requests

pytestmark = pytest.mark.slow

FAMILIES = ["mistral", "gemma2", "gemma3"]


def build(family, device, *, kernels="plain", keeps_all=False, **options):
    model = tiny_model(family, num_hidden_layers=NUM_LAYERS[family])
    config = ModelConfig.from_hf(model.config)
    backend = open_cuda(
        config, model.checkpoint(), max_model_len=MAX_MODEL_LEN, dtype=torch.float32,
        device=device.type, kernels=kernels, **options,
    )  # fmt: skip
    if keeps_all:
        backend.cache_layout = one_group(config.caches())
    return backend


def test_layers_are_grouped_by_windows_if_kernels_read_several_tables():
    near, far = KVSpec(2, 16, 24), KVSpec(2, 16)
    specs: list[CacheSpec] = [near, far, near, far, StateSpec((3, 8))]
    assert device_layout(specs, has_one_table=False).windows == (None, 24)
    assert device_layout(specs, has_one_table=True).windows == (None,)
    assert device_layout([near, KVSpec(4, 16)], has_one_table=False).windows == (None,)
    assert device_layout([LatentSpec(16, 8)], has_one_table=False).windows == (None,)
    assert device_layout([StateSpec((3, 8))], has_one_table=False).windows == (None,)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_freed_windows_are_transformers_own(family, device):
    model = tiny_model(family, num_hidden_layers=NUM_LAYERS[family])
    token_ids = random_tokens(170, seed=3)
    backend = build(family, device)
    logits = run_alone(backend, token_ids, chunks=[50, 1, 1, 30, 7, 40, 1], frees=True)
    np.testing.assert_allclose(logits, model.logits(token_ids), **FLOAT32)


@pytest.mark.parametrize(
    ("family", "options"),
    [("mistral", {"batch_invariant": True}), ("gemma2", {}), ("gemma3", {})],
)
def test_triton_kernels_read_no_more_than_windows(family, options, device):
    """Blocks that left them are poisoned, and in no table."""
    model = tiny_model(family, num_hidden_layers=NUM_LAYERS[family])
    token_ids = random_tokens(75, seed=3)
    backend = build(family, device, kernels="triton", **options)
    logits = run_alone(backend, token_ids, chunks=[45, 1, 1, 20, 1], frees=True)
    np.testing.assert_allclose(logits, model.logits(token_ids), **FLOAT32)


def test_replayed_steps_read_the_tables_of_their_own(device):
    """Everything of a graph but the graph: mixed steps, and single tokens that leave blocks."""
    backend = build("gemma2", device, kernels="triton")
    backend._use_graphs, backend._recorder = True, RunAgain(backend)
    driver = Driver(backend, frees=True)
    requests = [driver.add(row, random_tokens(60, seed=row)) for row in range(2)]
    driver.step([(request, 44) for request in requests])
    model = tiny_model("gemma2", num_hidden_layers=NUM_LAYERS["gemma2"])
    for counts in ([3, 2], [1, 4], [4, 3], [1, 1], [1, 1], [1, 1]):
        plan = driver.plan(list(zip(requests, counts, strict=True)))
        last = (plan.seq_starts[1:] - 1).astype(np.int32)
        found = backend.logits(dataclasses.replace(plan, logit_rows=last))
        for request, logits in zip(requests, found, strict=True):
            driver._give_back(request)
            truth = model.logits(request.token_ids[: request.num_computed])[-1]
            np.testing.assert_allclose(logits, truth, **FLOAT32)
    assert len(backend._graphs.captured) == 2 and backend._recorder.num_replays == 4


@pytest.mark.parametrize("family", FAMILIES)
def test_lives_at_random_are_those_of_layers_that_keep_everything(family, device):
    rng = random.Random(family)
    requests = random_requests(rng)[:6]
    truth = Rig(build(family, device, keeps_all=True), num_blocks=120, budget=512, caching=False)
    truth.run(requests, rng)
    num_hits = num_preemptions = 0
    for pages, budget, caching in ((11, 32, True), (60, 512, True)):
        backend = build(family, device)
        num_blocks = pages * len(backend.cache_layout.groups)
        rig = Rig(backend, num_blocks=num_blocks, budget=budget, caching=caching)
        rig.run(requests, rng)
        stats = rig.check_as_in(truth, is_exact=False)
        num_hits += stats.prefix_hits
        num_preemptions += stats.preemptions
    assert num_hits > 0 and num_preemptions > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real one")
def test_an_engine_says_what_it_says_on_the_cpu(tmp_path, pretended):
    """One step ahead, in graphs; blocks that left a window go to others while steps are under
    way."""
    folder = pretended_engines.write(tmp_path, "gemma3")
    truth = pretended_engines.said(pretended_engines.build(folder, device="cpu", num_threads=1))
    engine = pretended_engines.build(folder, device="cuda", kernels="triton")
    backend = engine.executor._backend
    assert backend.device == pretended and backend.cache_layout.windows.count(24) > 0
    pretended_engines.check(pretended_engines.said(engine), truth)
    assert backend._graphs.captured
    engine.close()


# ── arrays ──


def test_each_group_has_slots_and_tables_of_its_own(device):
    step = make_step([(40, 1), (3, 1)])
    tables = np.concatenate([step.block_tables, step.block_tables + 100])
    row = step.rows[0]
    tables[1, row, 0] = -1  # it left the window
    step = dataclasses.replace(
        step, block_tables=tables, slots=np.concatenate([step.slots, step.slots + 1600])
    )
    buffer = StepBuffer(LIMITS, device, num_groups=2)
    sizes = StepSizes.of_decode(4)
    filled = buffer.fill(step, make_sampling(2), cut_walks(step.seq_lens, 0), sizes)
    assert len(filled.changes.places) == 4 + 3
    buffer.send(filled)
    first, second = buffer.step(sizes, is_decode=True, max_seq_len=64, host=None).by_group()
    for group, view in enumerate((first, second)):
        assert view.slots.tolist() == [*step.slots[group].tolist(), -1, -1]
        start = int(view.table_starts[0])
        blocks = view.tables[start : start + 3].tolist()
        assert blocks[group:] == tables[group, row, group:3].tolist()
        assert view.seq_lens.tolist() == [41, 4, 0, 0]


def test_blocks_that_left_a_window_are_not_sent(device):
    tables = DeviceTables(4, 8, device, num_groups=2)
    step = dataclasses.replace(
        make_step([(40, 1)]), rows=np.array([2], np.int32),
        block_tables=np.arange(64, dtype=np.int32).reshape(2, 4, 8) + 1,
    )  # fmt: skip
    changes = tables.find_changes(step)
    assert changes.places.tolist() == [16, 17, 18, 48, 49, 50]
    assert changes.blocks.tolist() == [17, 18, 19, 49, 50, 51]
    tables.sent(changes)
    step.block_tables[1, 2, :2] = -1
    assert len(tables.find_changes(step).places) == 0
