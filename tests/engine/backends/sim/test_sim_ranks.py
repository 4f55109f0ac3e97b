"""Simulated ranks and stages: what a step takes, and that answers do not depend on them."""

from __future__ import annotations

from typing import Any

import pytest

from octavo_engine.backends.sim.backend import SimBackend
from octavo_engine.backends.sim.clock import VirtualClock
from octavo_engine.backends.sim.ranks import rank_seconds, stage_seconds
from octavo_engine.backends.sim.stages import SimStages
from octavo_engine.config import EngineConfig, SchedulerConfig, SimConfig
from octavo_engine.core.build import build_engine
from octavo_engine.errors import ConfigError, WorkerLost
from tests.fakes.requests import make_request

STEP_S = 0.008  # of one process, whatever is in it


def config_of(sim: dict[str, Any] | None = None, **sizes: Any) -> EngineConfig:
    costs = {"step_base_ms": 1e3 * STEP_S, "decode_token_ms": 0.0, "prefill_token_ms": 0.0}
    return EngineConfig(
        device="sim", model="sim", max_model_len=256, sim=SimConfig(**costs | (sim or {})),
        scheduler=SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=512),
        **sizes,
    )  # fmt: skip


def answers_of(config: EngineConfig, count: int) -> tuple[dict[str, list[int]], float]:
    """The tokens of so many requests, and the seconds that they took."""
    clock = VirtualClock()
    kind = SimStages if config.pipeline_parallel_size > 1 else SimBackend
    engine, _ = build_engine(config, backend=kind(config, clock), now=clock.now)
    began_at = clock.now()
    for number in range(count):
        engine.add(
            make_request(20, request_id=str(number), seed=number, max_tokens=40, ignore_eos=True)
        )
    answers: dict[str, list[int]] = {}
    while engine.has_work:
        for output in engine.step().outputs:
            answers.setdefault(output.request_id, []).extend(output.token_ids)
    engine.close()
    return answers, clock.now() - began_at


def test_ranks_share_a_step_and_the_slowest_one_decides() -> None:
    sim = {"rank_skew": 0.5, "exchange_ms": 1.0}
    assert rank_seconds(config_of(sim), 1.0) == 1.0, "one process waits for nobody"
    assert rank_seconds(config_of(sim, tensor_parallel_size=4), 1.0) == pytest.approx(0.376)
    slowed = config_of(sim | {"time_scale": 2.0}, tensor_parallel_size=4)
    assert rank_seconds(slowed, 1.0) == pytest.approx(0.377)


def test_the_first_stage_has_most_to_do() -> None:
    assert stage_seconds(config_of(), 1.0) == [1.0]
    assert stage_seconds(config_of(pipeline_parallel_size=4), 1.0) == [0.25] * 4
    uneven = stage_seconds(config_of({"rank_skew": 0.6}, pipeline_parallel_size=4), 1.0)
    assert uneven == pytest.approx([0.4, 0.2, 0.2, 0.2])


@pytest.mark.parametrize("sizes", [{"tensor_parallel_size": 4}, {"pipeline_parallel_size": 4}])
def test_answers_are_those_of_one_process(sizes: dict[str, Any]) -> None:
    assert answers_of(config_of(**sizes), 9)[0] == answers_of(config_of(), 9)[0]


def test_ranks_are_as_many_times_as_quick_as_the_model_has_it() -> None:
    _, alone_s = answers_of(config_of(), 8)
    _, even_s = answers_of(config_of(tensor_parallel_size=4), 8)
    _, uneven_s = answers_of(config_of({"rank_skew": 1.0}, tensor_parallel_size=4), 8)
    assert alone_s / even_s == pytest.approx(4.0)
    assert alone_s / uneven_s == pytest.approx(2.0)


def test_stages_gain_by_steps_under_way_and_a_single_stream_gains_nothing() -> None:
    config = config_of(pipeline_parallel_size=4)
    one = answers_of(config_of(), 1)[1]
    assert answers_of(config, 1)[1] == pytest.approx(one)
    alone_s, staged_s = (answers_of(each, 16)[1] for each in (config_of(), config))
    assert 0.95 < alone_s / staged_s < 1.2, "a step has a quarter of the sequences"
    slow = config_of({"exchange_ms": 1e3 * STEP_S / 4}, pipeline_parallel_size=4)
    assert answers_of(slow, 1)[1] == pytest.approx(2 * one)


@pytest.mark.parametrize("sizes", [{"tensor_parallel_size": 64}, {"pipeline_parallel_size": 64}])
@pytest.mark.parametrize(
    ("sim", "how", "waits_s"),
    [
        ({"rank_ends_at_step": 20}, "was ended by SIGKILL", 0.0),
        ({"rank_hangs_at_step": 20}, "hangs: the others waited for it for 10 s", 10.0),
        ({"rank_hangs_at_step": 20, "time_scale": 0.5}, "hangs: the others", 5.0),
    ],
)
def test_a_rank_is_lost_in_its_step_and_named(
    sizes: dict[str, Any], sim: dict[str, Any], how: str, waits_s: float
) -> None:
    clock = VirtualClock()
    config = config_of(sim, **sizes)
    kind = SimStages if config.pipeline_parallel_size > 1 else SimBackend
    engine, _ = build_engine(config, backend=kind(config, clock), now=clock.now)
    engine.add(make_request(20, max_tokens=40, ignore_eos=True))
    reported = 0
    with pytest.raises(WorkerLost, match=rf"^rank [1-9]\d? of 64 {how}"):
        while engine.has_work:
            reported += sum(len(output.token_ids) for output in engine.step().outputs)
    assert 0 < reported <= 19  # a prompt may be several steps of stages
    assert waits_s <= clock.now() < waits_s + 1.0
    engine.close()


@pytest.mark.parametrize(
    ("sim", "sizes", "message"),
    [
        ({"rank_ends_at_step": 1}, {}, "--sim-rank-ends-at-step needs several ranks"),
        ({"rank_hangs_at_step": 1}, {}, "--sim-rank-hangs-at-step needs several ranks"),
        ({"rank_ends_at_step": -1}, {"tensor_parallel_size": 2}, "at-step must be at least 0"),
        ({"rank_skew": -0.1}, {"tensor_parallel_size": 2}, "rank-skew must be from 0 to 1"),
        ({"rank_skew": 3.5}, {"pipeline_parallel_size": 4}, "rank-skew must be from 0 to 3"),
        ({"rank_skew": float("nan")}, {"tensor_parallel_size": 2}, "rank-skew must be from 0"),
        ({"exchange_ms": -1.0}, {"tensor_parallel_size": 2}, "exchange-ms must be at least 0"),
        ({"exchange_ms": float("inf")}, {}, "exchange-ms must be at least 0"),
    ],
)
def test_what_cannot_be_simulated_is_refused(
    sim: dict[str, Any], sizes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        config_of(sim, **sizes)
