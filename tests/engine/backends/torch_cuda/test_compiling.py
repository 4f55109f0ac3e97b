"""What is compiled when a model is loaded is all that steps need, and the rest is no hang."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest
import torch

from octavo_engine.backends.backend import BackendLimits
from octavo_engine.backends.torch.compiling import CompileHooks, step_of, warm_up_steps
from octavo_engine.core.process.heartbeat import Heartbeat
from octavo_engine.models.config import ModelConfig
from tests.engine.backends.driver import Driver, random_tokens
from tests.engine.backends.torch_cuda.opening import open_cuda
from tests.engine.backends.torch_cuda.recorders import RunAgain
from tests.engine.backends.torch_cuda.steps import make_sampling
from tests.engine.backends.torch_cuda.test_packed_models import Quantized
from tests.engine.backends.torch_cuda.variants import Variants
from tests.engine.models.tiny import tiny_model
from tests.fakes.clock import ManualClock

pytestmark = pytest.mark.slow

LIMITS = BackendLimits(max_tokens=72, max_seqs=20, max_logit_rows=24, max_model_len=2048)

needs_interpreter = pytest.mark.skipif(
    torch.cuda.is_available(), reason="launches are seen in the interpreter"
)


def warmed(family, device, variants, *, checkpoint=None, use_graphs=False, **options):
    """A backend after its warm-up, and a driver of it."""
    model = tiny_model(family)
    backend = open_cuda(
        ModelConfig.from_hf(model.config), checkpoint or model.checkpoint(), max_model_len=2048,
        dtype=torch.float32, device=device.type, kernels="triton", **options,
    )  # fmt: skip
    if use_graphs:
        backend._use_graphs, backend._recorder = True, RunAgain(backend)
    driver = Driver(backend, limits=LIMITS)
    assert backend._context is not None
    kv = backend._context.kv
    for data in (*kv._data.values(), *kv._scales.values()):
        data.zero_()  # as it is when a model was loaded
    backend.warm_up(Heartbeat())
    assert backend._hooks is not None
    backend._hooks.remove()
    assert variants.seen
    return driver


def drive(driver, counts):
    """Steps whose sequences have these numbers of tokens."""
    num_seqs = max(map(len, counts))
    requests = [driver.add(row, random_tokens(120, seed=row)) for row in range(num_seqs)]
    for each in counts:
        step = driver.plan([(requests[row], n) for row, n in enumerate(each)])
        step = dataclasses.replace(step, logit_rows=(step.seq_starts[1:] - 1).astype(np.int32))
        driver.backend.launch(step, make_sampling(len(each), temperature=0.7, top_p=0.9)).wait()


@needs_interpreter
@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {}),
        ("llama", {"use_graphs": True}),
        ("gemma2", {}),
        ("mixtral", {}),
        ("gpt-oss", {"use_graphs": True}),
        ("youtu", {"use_graphs": True}),
        ("youtu", {"batch_invariant": True}),
        ("mamba2", {"use_graphs": True}),
        ("qwen3.5", {}),
        ("jamba-plain", {"batch_invariant": True}),
        ("qwen2-window", {"batch_invariant": True}),
        ("qwen3", {"checkpoint": "int4"}),
        ("qwen3", {"checkpoint": "int8"}),
        ("llama", {"kv_cache_dtype": "fp8"}),
    ],
)
def test_traffic_compiles_nothing_that_the_warm_up_did_not(family, options, device, monkeypatch):
    variants = Variants(monkeypatch, runs=False)
    if "checkpoint" in options:
        options = options | {"checkpoint": Quantized(options["checkpoint"])}
    driver = warmed(family, device, variants, **options)
    known = variants.take()
    rng = random.Random(3)
    counts = [[2, 5, 1], [1] * 3, [1] * 3, [1], [17], [1] * 18, [1, 1, rng.randint(20, 48)]]
    drive(driver, counts)
    assert variants.take() <= known


def test_warm_up_steps_stay_within_the_limits():
    shapes = list(warm_up_steps(LIMITS, 40))
    assert [shape[0] for shape in shapes if shape.num_tokens == 1] == [1, 2, 17, 1]
    assert [shape[1] for shape in shapes if shape.num_tokens > 1] == [2, 17, 33, 40, 65, 2]
    for limits in (
        BackendLimits(max_tokens=1, max_seqs=1, max_logit_rows=1, max_model_len=8),
        BackendLimits(max_tokens=4096, max_seqs=512, max_logit_rows=600, max_model_len=30),
    ):
        for shape in warm_up_steps(limits, 40):
            assert shape.num_seqs <= limits.max_seqs
            assert shape.num_tokens <= limits.max_model_len
            assert shape.num_seqs * shape.num_tokens <= limits.max_tokens


def test_a_warm_up_step_writes_no_token():
    for shape in warm_up_steps(LIMITS):
        step = step_of(shape)
        assert (step.slots == -1).all()
        assert len(step.token_ids) == len(step.positions) == step.seq_starts[-1]


@needs_interpreter
def test_tritons_hooks_pause_the_clock_of_a_step():
    from triton import knobs

    clock, heard = ManualClock(), []
    heartbeat = Heartbeat(clock)
    before = knobs.runtime.jit_cache_hook = lambda **_: heard.append("another's")
    hooks = CompileHooks(heartbeat)
    try:
        heartbeat.begin()
        clock.advance(1.0)
        assert knobs.runtime.jit_cache_hook(key="k") is None  # True would skip the compilation
        clock.advance(45.0)
        assert not heartbeat.pulse().is_stalled(3.0)
        knobs.runtime.jit_post_compile_hook(key="k")
        clock.advance(1.0)
        assert heartbeat.pulse().step_age_s == pytest.approx(2.0)
        assert heard == ["another's"]
        hooks.remove()
        assert knobs.runtime.jit_cache_hook is before
    finally:
        knobs.runtime.jit_cache_hook = knobs.runtime.jit_post_compile_hook = None
