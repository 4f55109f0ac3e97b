"""The simulator: modelled time, seeded tokens, true scheduling; instant and repeatable when
wanted."""

from __future__ import annotations

import subprocess
import sys
import time

import numpy as np
import pytest

from octavo_engine.backends.backend import BackendLimits, BackendStep
from octavo_engine.backends.sim.backend import SimBackend
from octavo_engine.backends.sim.clock import RealClock, VirtualClock
from octavo_engine.backends.sim.text import SPELLED, sim_tokens
from octavo_engine.config import EngineConfig, SchedulerConfig, SimConfig
from octavo_engine.model_runner.runner import ModelRunner
from octavo_engine.sampling.batch import SAMPLING_ROW, Ragged, SamplingBatch
from octavo_engine.scheduling.scheduler import Scheduler
from tests.fakes.requests import make_prompt, make_request

LIMITS = BackendLimits(max_tokens=64, max_seqs=8, max_logit_rows=72, max_model_len=200)


def make_backend(clock: VirtualClock, **sim) -> SimBackend:
    backend = SimBackend(EngineConfig(device="sim", sim=SimConfig(**sim)), clock)
    backend.prepare(LIMITS, 100)
    return backend


def make_step(*counts: int) -> BackendStep:
    none = np.zeros(0, np.int32)
    starts = np.cumsum([0, *counts], dtype=np.int32)
    return BackendStep(
        token_ids=np.zeros(starts[-1], np.int32),
        positions=none,
        slots=none[None],
        seq_starts=starts,
        seq_lens=none,
        rows=none,
        block_tables=none,
        logit_rows=none,
        copies=none,
    )


def make_sampling(
    positions: list[int], *, targets: list[int] | None = None, temperature=1.0, **more
):
    table = np.zeros(1, SAMPLING_ROW)
    table["seed"] = 42
    table["temperature"] = temperature
    num_rows = len(positions)
    return SamplingBatch(
        table=table,
        rows=np.zeros(num_rows, np.int32),
        positions=np.array(positions, np.int32),
        targets=np.array(targets or [-1] * num_rows, np.int32),
        history=np.zeros((1, 200), np.int32),
        **more,
    )


@pytest.mark.parametrize(
    ("counts", "milliseconds"),
    [((), 2.0), ((1,), 3.0), ((1, 1, 1), 5.0), ((10,), 4.5), ((1, 1, 10), 6.5)],
)
def test_a_step_takes_what_its_tokens_cost(counts, milliseconds):
    clock = VirtualClock()
    backend = make_backend(clock, step_base_ms=2.0, decode_token_ms=1.0, prefill_token_ms=0.25)
    backend.execute(make_step(*counts), make_sampling([]))
    assert clock.now() == pytest.approx(milliseconds / 1e3)


def test_time_can_be_scaled():
    clock = VirtualClock()
    make_backend(clock, step_base_ms=10.0, time_scale=0.1).execute(make_step(), make_sampling([]))
    assert clock.now() == pytest.approx(1e-3)


def test_tokens_spell_words_and_depend_on_seed_and_position_only():
    text = bytes(sim_tokens(7, np.arange(6 * 500)).astype(np.uint8)).decode()
    known = set(SPELLED.decode().split())
    assert set(text.split()) <= known
    assert len(set(text.split())) == len(known) == 64
    assert bytes(sim_tokens(7, np.arange(60, 90)).astype(np.uint8)).decode() == text[60:90]
    assert bytes(sim_tokens(8, np.arange(60)).astype(np.uint8)).decode() != text[:60]


def test_extreme_seeds_are_seeds():
    for seed in (0, 2**63, 2**64 - 1):
        assert sim_tokens(np.array([seed], np.uint64), [5]).tolist()[0] in set(SPELLED)


def test_greedy_requests_say_the_same_whatever_their_seed():
    backend = make_backend(VirtualClock())
    sampled = backend.execute(make_step(2), make_sampling([10, 11], temperature=0.0))
    assert sampled.tokens.tolist() == sim_tokens(0, [10, 11]).tolist()


def test_sampling_honours_targets_allowed_ids_and_logprobs():
    backend = make_backend(VirtualClock())
    allowed = Ragged(np.array([0, 0, 0, 2], np.int32), np.array([300, 301], np.int32))
    sampled = backend.execute(
        make_step(3),
        make_sampling([10, 11, 12], targets=[-1, 99, -1], allowed=allowed, num_logprobs=2),
    )
    expected = sim_tokens(42, [10]).tolist()[0]
    assert sampled.tokens.tolist()[:2] == [expected, 99]
    assert sampled.tokens[2] in (300, 301)
    assert sampled.tokens.dtype == np.int32
    assert sampled.top_ids is not None
    assert sampled.top_ids[:2].tolist() == [[expected, expected + 1], [99, 100]]
    assert sampled.logprobs is not None
    assert np.exp(sampled.logprobs).tolist() == pytest.approx([0.5] * 3)
    assert sampled.top_logprobs is not None
    assert np.exp(sampled.top_logprobs).sum(axis=1).tolist() == pytest.approx([0.75] * 3)


def run(seed: int, **config) -> tuple[dict[str, bytes], float]:
    """The whole engine below the server, on virtual time."""
    clock = VirtualClock()
    settings = SchedulerConfig(
        **{"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 200, **config}
    )
    scheduler = Scheduler(settings, num_blocks=40, now=clock.now)
    runner = ModelRunner(make_backend(clock), scheduler_config=settings, limits=LIMITS)
    texts: dict[str, bytes] = {}
    for i in range(12):
        request = make_request(
            make_prompt(20 + i), request_id=f"r{i}", max_tokens=60, seed=seed + i
        )
        scheduler.add(request)
    while scheduler.has_work:
        batch = scheduler.schedule()
        scheduler.check_invariants()
        started_at = clock.now()
        result = runner.execute(batch)
        for output in scheduler.update(batch, result, clock.now() - started_at):
            texts[output.request_id] = texts.get(output.request_id, b"") + bytes(output.token_ids)
    return texts, clock.now()


def test_a_run_on_virtual_time_is_the_same_every_time():
    assert run(1) == run(1)
    assert run(1)[0] != run(2)[0]


def test_the_tokens_do_not_depend_on_how_they_were_scheduled():
    """Chunks, batches, cache hits and the order of admission change the time, not the text."""
    texts, seconds = run(1)
    others, longer = run(1, max_num_seqs=2, max_num_batched_tokens=7, enable_prefix_caching=False)
    assert others == texts
    assert longer > seconds
    expected = sim_tokens(1, np.arange(20, 80)).astype(np.uint8)
    assert texts["r0"] == expected.tobytes()


def test_simulated_time_costs_no_real_time():
    clock = VirtualClock()
    backend = make_backend(clock, step_base_ms=3_600_000.0)
    started_at = time.monotonic()
    backend.execute(make_step(1), make_sampling([1]))
    assert clock.now() > 3600.0
    assert time.monotonic() - started_at < 60.0


def test_the_real_clock_goes_forward_and_never_sleeps_backwards():
    clock = RealClock()
    before = clock.now()
    clock.sleep(-1.0)
    clock.sleep(0.001)
    assert clock.now() - before >= 0.001


def test_importing_it_is_cheap():
    """Dozens are started at once: no torch, no tokenizer, no extension."""
    code = (
        "import sys, octavo_engine.backends.sim.backend;"
        "heavy = {'torch', 'transformers', 'tokenizers', 'octavo_engine._native'};"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
