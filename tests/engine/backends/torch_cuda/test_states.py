"""Models with recurrent states on a device, from whole models to engines: graphs, hits, drafts.

Red when: a graph changes the state of a row that only pads it; a snapshot is copied after the step
that begins with it; capturing, or warming up, moves a state on; slots are not counted as memory.
"""

from __future__ import annotations

import dataclasses
import functools
import random
from typing import Any

import numpy as np
import pytest
import torch

from octavo_engine.backends.backend import BackendLimits
from octavo_engine.backends.torch.device_step import StepSizes
from octavo_engine.backends.torch.memory import mixer_columns
from octavo_engine.core import build as core_build
from octavo_engine.core import kv_tiers
from octavo_engine.core.process.heartbeat import Heartbeat
from octavo_engine.kv.states import StateSnapshots
from octavo_engine.models.config import ModelConfig
from octavo_engine.scheduling.speculation import Speculation
from octavo_engine.state.request import EngineRequest
from octavo_engine.state.sampling_params import SamplingParams
from tests.engine.backends.driver import Driver, random_tokens, run_alone
from tests.engine.backends.tolerance import BF16_AGAINST_FLOAT32, FLOAT32, error
from tests.engine.backends.torch_cuda import test_pretended as pretended_engines
from tests.engine.backends.torch_cuda.recorders import RunAgain
from tests.engine.backends.torch_cuda.steps import alone_and_together
from tests.engine.backends.torch_cuda.test_cuda_backend import build
from tests.engine.core.test_states import Rig
from tests.engine.models.recurrent import RECURRENT
from tests.engine.models.tiny import ON_DEVICES, tiny_model
from tests.fakes.guessing import AnswerGuesser
from tests.fakes.random_life import random_requests

pytestmark = pytest.mark.slow

needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real one")


# The interpreter is slow: one family of each kind of state, and few tokens.
@pytest.mark.parametrize(
    "name", ["lfm2-biased", "jamba-plain", "mamba2-limited", "zamba2", "granite4", "qwen3.5"]
)
def test_triton_kernels_give_whole_models(name, device):
    token_ids = random_tokens(35, seed=1)
    logits = run_alone(build(name, device, kernels="triton"), token_ids, chunks=[30, 1, 1])
    np.testing.assert_allclose(logits, tiny_model(name).logits(token_ids), **FLOAT32)


@pytest.mark.parametrize("kernels", ["plain", pytest.param("triton", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", ["lfm2", "mamba", "mamba2", "falcon-h1", "qwen3.5"])
def test_bf16_is_as_near_as_bf16_can_be(name, kernels, device):
    token_ids = random_tokens(100, seed=2)
    backend = build(name, device, dtype=torch.bfloat16, kernels=kernels)
    logits = run_alone(backend, token_ids, chunks=[70, 1])
    # Gates and steps are rounded, too, and their errors go on from token to token.
    assert error(logits, tiny_model(name).logits(token_ids)) < 2 * BF16_AGAINST_FLOAT32


@pytest.mark.usefixtures("row_by_row")
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("lfm2", torch.float32),
        ("mamba2", torch.float32),
        ("qwen3.5", torch.float32),
        pytest.param("mamba2", torch.bfloat16, marks=pytest.mark.gpu),
        pytest.param("qwen3.5", torch.bfloat16, marks=pytest.mark.gpu),
    ],
)
def test_batch_invariant_bits_depend_on_nothing_but_the_tokens(name, dtype, device):
    backend = build(name, device, dtype=dtype, kernels="triton", batch_invariant=True)
    alone, requests, driver = alone_and_together(backend)
    hit = driver.add(2, requests[0].token_ids, prefix=requests[0])
    assert hit.num_computed == 16
    driver.step([(hit, 3)])
    for request, truth in zip(requests, alone, strict=True):
        assert np.array_equal(np.array(request.logits), truth)
    assert np.array_equal(np.array(hit.logits), alone[0][16:])


@pytest.mark.parametrize("name", ["lfm2", "mamba2", "qwen3.5"])
def test_padded_steps_equal_each_sequence_alone(name, device):
    """Everything of replayed steps but the graph itself: small mixed steps, then single tokens."""
    backend = build(name, device, kernels="triton")
    backend._use_graphs, backend._recorder = True, RunAgain(backend)
    driver = Driver(backend)
    requests = [driver.add(row, random_tokens(26, seed=row)) for row in range(3)]

    def step(work):
        plan = driver.plan(work)
        last = (plan.seq_starts[1:] - 1).astype(np.int32)
        found = backend.logits(dataclasses.replace(plan, logit_rows=last))
        for (request, _), logits in zip(work, found, strict=True):
            truth = tiny_model(name).logits(request.token_ids[: request.num_computed])[-1]
            np.testing.assert_allclose(logits, truth, **FLOAT32)

    for counts in ([9, 2, 1], [1, 3, 6], [5, 1, 2]):
        step(list(zip(requests, counts, strict=True)))
    for shift in range(3):  # rows are not places in the bucket
        order = requests[shift % 3 :] + requests[: shift % 3]
        step([(request, 1) for request in order])
    captured = backend._graphs.captured
    assert 4 in captured and any(isinstance(sizes, StepSizes) for sizes in captured)
    assert backend._recorder.num_replays == 4


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["mamba2", "qwen3.5"])
def test_captured_steps_give_the_numbers_of_launched_ones(name, device):
    results = []
    for use_graphs in (False, True):
        backend = build(name, device, dtype=torch.bfloat16, kernels="triton", use_graphs=use_graphs)
        driver = Driver(backend)
        requests = [driver.add(row, random_tokens(60, seed=row)) for row in range(3)]
        driver.step([(request, 40) for request in requests])
        for _ in range(20):
            driver.step([(request, 1) for request in requests])
        results.append(np.array([request.logits for request in requests]))
        backend.close()
    assert np.isfinite(results[0]).all()
    np.testing.assert_allclose(results[1], results[0], rtol=2e-2, atol=2e-2)


def test_a_warm_up_and_a_sleep_leave_a_backend_as_it_was(device):
    backend = build("mamba2", device, kernels="triton")
    limits = BackendLimits(
        max_tokens=20, max_seqs=2, max_logit_rows=4, max_model_len=64, num_state_slots=5
    )
    backend.prepare(limits, 8)
    memory = backend._context.states._data
    assert memory.numel() * 4 == 5 * backend.cache_layout.state_bytes
    memory.fill_(3.0)
    backend.warm_up(Heartbeat())
    assert (memory == 3.0).all()
    backend.release_kv()
    backend.restore_kv()
    assert (backend._context.states._data == 0.0).all()
    backend.close()


def test_what_a_mixer_holds_is_counted_in_a_step():
    shape = ModelConfig.from_hf(tiny_model("mamba2").config)
    assert shape.recurrent is not None
    # Into the convolution [gate | x, B, C | dt], out of it, out of the scan, the gate and the norm.
    held = 128 + 224 + 8 + 224 + 3 * 128
    assert mixer_columns(shape.recurrent, shape.hidden_size) >= held
    for name in RECURRENT:
        shape = ModelConfig.from_hf(tiny_model(name).config)
        assert shape.recurrent is not None
        assert mixer_columns(shape.recurrent, shape.hidden_size) > 4 * shape.hidden_size


# ── engines ──


class DeviceRig(Rig):
    """As on the CPU: slots and blocks that are free are poisoned after each step."""

    def build(self, name: str, dtype: Any) -> Any:
        return build(name, dtype)


@pytest.mark.parametrize("name", [name for name in RECURRENT if name in ON_DEVICES])
def test_hits_and_preemptions_change_nothing(name, device):
    rng = random.Random(3)
    requests = random_requests(rng)[:6]
    truth = DeviceRig(name, device, num_blocks=120, budget=512, num_snapshots=0)
    truth.run(requests, rng)
    num_hits = num_preemptions = 0
    for num_blocks, budget, num_snapshots in ((20, 32, 12), (60, 512, 3)):
        rig = DeviceRig(
            name, device, num_blocks=num_blocks, budget=budget, num_snapshots=num_snapshots
        )
        rig.run(requests, rng)
        stats = rig.check_as_in(truth, is_exact=False)
        num_hits += stats.prefix_hits
        num_preemptions += stats.preemptions
    assert num_hits > 0 and num_preemptions > 0


@pytest.mark.parametrize("name", ["lfm2", "mamba2", "qwen3.5"])
def test_drafts_go_back_where_they_were_wrong(name, device):
    rng = random.Random(4)
    requests = random_requests(rng)[:6]
    truth = DeviceRig(name, device, num_blocks=120, budget=512, num_snapshots=0)
    truth.run(requests, rng)

    def guesser(sequence):
        tokens = truth.tokens[sequence.request_id]
        return AnswerGuesser(tokens, sequence.num_prompt_tokens, honesty=0.7, rng=rng)

    rig = DeviceRig(name, device, num_blocks=60, budget=64, num_snapshots=40)
    rig.scheduler._speculation = Speculation(guesser)
    rig.run(requests, rng)
    stats = rig.check_as_in(truth, is_exact=False)
    assert stats.spec_accepted_tokens > 10 < stats.spec_draft_tokens - stats.spec_accepted_tokens


@needs_no_gpu
@pytest.mark.parametrize(("family", "kernels"), [("mamba2", "triton"), ("qwen3.5", "plain")])
def test_an_engine_says_what_it_says_on_the_cpu(tmp_path, pretended, family, kernels, monkeypatch):
    """One step ahead with Triton's kernels; the last request finds what the first one left."""
    snapshots = functools.partial(StateSnapshots, stride=16)
    monkeypatch.setattr(core_build, "StateSnapshots", snapshots)
    folder = pretended_engines.write(tmp_path, family)
    found = []
    for options in ({"device": "cpu", "num_threads": 1}, {"device": "cuda", "kernels": kernels}):
        engine = pretended_engines.build(folder, **options)
        said = pretended_engines.said(engine)
        params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
        prompt = [*range(5, 25), 9, 9]
        engine.add(EngineRequest(request_id="hit", prompt_token_ids=prompt, params=params))
        tokens: list[int] = []
        while engine.has_work:
            tokens += [token for output in engine.step().outputs for token in output.token_ids]
        assert engine.scheduler.stats().prefix_hits > 0
        found.append((said, tokens))
        if options["device"] == "cuda":
            backend = engine.executor._backend
            assert backend.device == pretended
            assert bool(backend._graphs.captured) == (kernels == "triton")
        engine.close()
    assert found[0][1] == found[1][1]
    pretended_engines.check(found[1][0], found[0][0])


@needs_no_gpu
@pytest.mark.parametrize(("family", "kernels"), [("mamba2", "triton"), ("qwen3.5", "triton")])
def test_states_come_back_from_host_memory(tmp_path, pretended, family, kernels, monkeypatch):
    """Saved while the next step is under way; the slots are poisoned before they are loaded."""
    snapshots = functools.partial(StateSnapshots, stride=16)
    monkeypatch.setattr(core_build, "StateSnapshots", snapshots)
    monkeypatch.setattr(kv_tiers, "is_worth_loading", lambda **_: True)
    folder = pretended_engines.write(tmp_path, family)
    engine = pretended_engines.build(
        folder, device="cuda", kernels=kernels, kv_offloading_size=1 / 1024
    )
    said = []
    for turn in range(2):
        params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
        prompt = [*range(5, 45), 9, 9]
        engine.add(EngineRequest(request_id=f"{turn}", prompt_token_ids=prompt, params=params))
        tokens: list[int] = []
        while engine.has_work:
            tokens += [token for output in engine.step().outputs for token in output.token_ids]
        said.append(tokens)
        assert engine.reset_prefix_cache()
        backend, states = engine.executor._backend, engine.scheduler.kv.states
        backend.poison_states(list(range(backend._limits.num_state_slots)))
        assert states is not None and not states.cached
    assert said[0] == said[1]
    assert engine.scheduler.stats().prefix_hits == 32
    engine.close()
