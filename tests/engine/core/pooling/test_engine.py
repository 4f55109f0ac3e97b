"""The engine of models that pool: what a step holds, who waits how long, and what ends alone."""

from __future__ import annotations

import random

import numpy as np
import pytest

from octavo_engine.backends.sim.clock import VirtualClock
from octavo_engine.backends.sim.pooling import SimPoolingBackend, sim_pooling_config
from octavo_engine.config import EngineConfig, SimConfig
from octavo_engine.core.pooling.async_pooling import as_array
from octavo_engine.core.pooling.build import build_pooling_engine
from octavo_engine.core.pooling.engine import MAX_FAILED_STEPS, PoolingEngine, PoolingLimits
from octavo_engine.errors import (
    ConfigError,
    DeadlineExceeded,
    InvalidRequest,
    OctavoError,
    QueueFull,
)
from octavo_engine.state.pooling import PoolingParams, PoolingRequest
from octavo_engine.state.request import EngineRequest
from octavo_engine.state.sampling_params import SamplingParams

CONFIG = EngineConfig(device="sim", max_model_len=64, sim=SimConfig(task="embed"))


class Recording(SimPoolingBackend):
    """Notes the lengths of each step's texts; fails or yields NaN where it is told to."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__(CONFIG, sim_pooling_config(CONFIG), clock)
        self.steps: list[list[int]] = []
        self.nan_token = -1
        self.failures = 0

    def token_rows(self, step):
        self.steps.append(np.diff(step.starts).tolist())
        if self.failures:
            self.failures -= 1
            raise RuntimeError("the kernel broke")
        rows = super().token_rows(step).copy()
        rows[step.token_ids == self.nan_token] = np.nan
        return rows


class Rig:
    def __init__(self, **limits) -> None:
        self.clock = VirtualClock()
        self.backend = Recording(self.clock)
        sizes = {"max_model_len": 64, "max_tokens": 64, "max_texts": 8, "max_queue": 16}
        self.engine = PoolingEngine(
            self.backend, PoolingLimits(**{**sizes, **limits}), now=self.clock.now
        )

    def add(self, *lengths, first_id=0, **fields):
        requests = [
            PoolingRequest(request_id=str(first_id + i), token_ids=[65] * length, **fields)
            for i, length in enumerate(lengths)
        ]
        self.engine.add_pooling(requests)

    def run(self):
        """Outputs by id, in the order they came."""
        found = {}
        while self.engine.has_work:
            for output in self.engine.step().pooled:
                assert output.request_id not in found
                found[output.request_id] = output
            self.refused = self.engine.take_refused()
        return found


def test_a_step_takes_what_its_budget_holds():
    rig = Rig()
    rig.add(40, 30, 20, 10, 4)
    assert list(rig.run()) == ["0", "2", "4", "1", "3"]
    assert rig.backend.steps == [[40, 20, 4], [30, 10]]  # 20 and 4 fill what 40 leaves


def test_the_first_that_waits_is_in_the_next_step_whatever_comes_after():
    rig = Rig()
    rig.add(60)
    rig.add(64, first_id=1)
    for round_ in range(4):
        rig.add(4, 4, 4, first_id=10 + 3 * round_)
    done = list(rig.run())
    assert done.index("1") == 2  # behind the first step's two, before all other small ones
    assert rig.backend.steps[:2] == [[60, 4], [64]]


def test_a_step_has_no_more_texts_than_planned():
    rig = Rig(max_texts=3)
    rig.add(*[1] * 7)
    rig.run()
    assert rig.backend.steps == [[1, 1, 1], [1, 1, 1], [1]]


def test_every_text_is_answered_once_in_steps_within_the_budget():
    rng = random.Random(0)
    rig = Rig(max_queue=1000)
    lengths = [rng.randint(1, 64) for _ in range(300)]
    rig.add(*lengths)
    assert len(rig.run()) == 300
    assert all(sum(step) <= 64 and len(step) <= 8 for step in rig.backend.steps)
    assert sorted(length for step in rig.backend.steps for length in step) == sorted(lengths)
    assert sum(lengths) / 64 <= len(rig.backend.steps) <= 1.15 * sum(lengths) / 64
    stats = rig.engine.report([]).stats
    assert stats is not None
    assert (stats.prompt_tokens, stats.num_waiting, stats.queued_tokens) == (sum(lengths), 0, 0)


def test_a_late_text_is_refused_and_never_computed():
    rig = Rig()
    rig.add(10, deadline_at=5.0)
    rig.add(20, deadline_at=50.0, first_id=1)
    rig.clock.sleep(5.0)
    assert list(rig.run()) == ["1"]
    ((request_id, error),) = rig.refused
    assert request_id == "0" and isinstance(error, DeadlineExceeded)
    assert rig.backend.steps == [[20]]


def test_an_aborted_text_is_not_computed():
    rig = Rig()
    rig.add(10, 20)
    rig.engine.abort("0")
    rig.engine.abort("unknown")
    assert list(rig.run()) == ["1"] and rig.backend.steps == [[20]]


def test_a_full_queue_refuses_a_call_whole():
    rig = Rig(max_queue=3)
    rig.add(1, 1, 1, 1, 1)  # one call may bring more: it would never fit otherwise
    with pytest.raises(QueueFull) as caught:
        rig.add(1, first_id=10)
    assert caught.value.retry_after_s == 1
    assert len(rig.run()) == 5


def test_a_bad_text_leaves_nothing_of_its_call_behind():
    rig = Rig()
    good = PoolingRequest(request_id="good", token_ids=[1])
    for bad in (
        PoolingRequest(request_id="bad", token_ids=[]),
        PoolingRequest(request_id="bad", token_ids=[1] * 65),
        PoolingRequest(request_id="bad", token_ids=[512]),
        PoolingRequest(request_id="bad", token_ids=[-1]),
        PoolingRequest(request_id="bad", token_ids=[1, 2], type_ids=[0]),
        PoolingRequest(request_id="bad", token_ids=[1, 2], type_ids=[0, 2]),
        PoolingRequest(request_id="bad", token_ids=[1], params=PoolingParams(task="classify")),
    ):
        with pytest.raises(InvalidRequest):
            rig.engine.add_pooling([good, bad])
    assert not rig.engine.has_work


def test_numbers_that_are_none_end_their_own_text_only():
    rig = Rig()
    rig.backend.nan_token = 7
    texts = {"a": [65, 66], "b": [65, 7], "c": [66]}
    rig.engine.add_pooling([PoolingRequest(request_id=k, token_ids=v) for k, v in texts.items()])
    found = rig.run()
    assert len(rig.backend.steps) == 1
    assert found["b"].error == "the model's numbers for this text are not finite"
    for name in "ac":
        assert np.isfinite(as_array(found[name], is_per_token=False)).all()
    stats = rig.engine.report([]).stats
    assert stats is not None and stats.nan_failures == 1


def test_rows_of_tokens_and_of_texts_go_in_steps_of_their_own():
    rig = Rig()
    rig.add(4, 6)
    rig.add(3, 2, first_id=2, params=PoolingParams(task="token_embed"))
    rig.add(5, first_id=4)
    found = rig.run()
    assert rig.backend.steps == [[4, 6, 5], [3, 2]]
    assert as_array(found["2"], is_per_token=True).shape == (3, 64)
    assert as_array(found["4"], is_per_token=False).shape == (64,)


def test_a_step_that_fails_ends_its_texts_and_three_in_a_row_end_the_engine():
    rig = Rig()
    rig.backend.failures = 1
    rig.add(60, 60)
    found = rig.run()
    assert found["0"].error == "the engine failed to compute a step: RuntimeError"
    assert found["1"].error is None
    rig.backend.failures = MAX_FAILED_STEPS
    rig.add(*[60] * MAX_FAILED_STEPS, first_id=10)
    with pytest.raises(OctavoError, match="3 steps in a row failed, the last with RuntimeError"):
        rig.run()


def test_a_request_to_generate_is_refused():
    rig = Rig()
    request = EngineRequest(request_id="x", prompt_token_ids=[1], params=SamplingParams())
    with pytest.raises(InvalidRequest, match="cannot generate; it can embed, token_embed") as info:
        rig.engine.add(request)
    assert info.value.code == "wrong_task"


def test_a_step_in_progress_is_seen_and_its_time_foreseen():
    rig = Rig()
    seen = []
    compute = rig.backend.token_rows

    def token_rows(step):
        seen.append(rig.engine.heartbeat.pulse().expected_s)
        return compute(step)

    rig.backend.token_rows = token_rows  # type: ignore[method-assign]
    for length in (20, 40):
        rig.engine.heartbeat.begin()
        rig.add(length)
        rig.run()
        rig.engine.heartbeat.end()
    first_step_s = 0.002 + 20 * 0.0001  # the simulator's own model of time
    assert seen == [0.0, pytest.approx(2 * first_step_s)]


def test_warming_up_leaves_no_trace():
    rig = Rig()
    rig.engine.warm_up()
    stats = rig.engine.report([]).stats
    assert stats is not None and (stats.steps, stats.prompt_tokens) == (0, 0)
    assert rig.backend.steps == [[16]]


def test_the_simulator_has_no_integers_that_activations_could_meet():
    config = CONFIG.replace(activation_bits=8)
    with pytest.raises(ConfigError, match="--activation-bits 8 is computed by --device cpu only"):
        build_pooling_engine(config, sim_pooling_config(config), None)


@pytest.mark.parametrize(
    ("flag", "setting"),
    [
        ("--kv-cache-dtype", {"kv_cache_dtype": "int8"}),
        ("--speculative-config", {"speculative_config": '{"method": "ngram"}'}),
    ],
)
def test_what_only_generation_has_is_refused(flag, setting):
    config = CONFIG.replace(**setting)
    with pytest.raises(ConfigError, match=f"{flag} has no effect on a model for embeddings"):
        build_pooling_engine(config, sim_pooling_config(config), None)
