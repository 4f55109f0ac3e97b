"""A simulated engine: exact step times, true prefix hits, and news that are merged and late."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from octavo.study.engine import SimulatedEngine
from octavo.study.engine_models import engine_models
from octavo.study.shapes import TokenIds
from octavo.study.timeline import Timeline
from octavo.study.workload import Arrival
from octavo_engine.errors import RequestError

if TYPE_CHECKING:
    from octavo_engine.protocol.stream import Delta
    from octavo_engine.state.outputs import SequenceOutput

MODEL = engine_models()["gpu-8b"].with_blocks(100)
DELAY_S = 0.01


class Bench:
    """One engine, and all that is heard of it."""

    def __init__(self, model=MODEL):
        self.timeline = Timeline()
        self.outputs: list[tuple[float, SequenceOutput]] = []
        self.news: list[tuple[float, Delta]] = []
        self.shape = TokenIds()
        self.engine = SimulatedEngine(
            model,
            self.timeline,
            on_outputs=lambda outputs: self.outputs.extend(
                (self.timeline.now, output) for output in outputs
            ),
            deliver=lambda delta: self.news.append((self.timeline.now, delta)),
            signal_delay_s=DELAY_S,
        )

    def submit(self, name, prompt, num_output):
        answer = range(10**6, 10**6 + num_output)
        prepared = self.shape.prepare(Arrival((prompt,), answer, 0.0))
        self.engine.submit(name, prepared.tokens, answer, prepared.labels())

    def run(self, until_s):
        self.timeline.at(until_s, lambda: None)
        self.timeline.run(is_over=lambda: self.timeline.now >= until_s)


def test_steps_take_exactly_what_the_model_says():
    bench = Bench()
    bench.submit("a", range(100), 3)
    bench.run(1.0)

    times = [at for at, _ in bench.outputs]
    prefill_s, decode_s = 0.006 + 100 * 0.04e-3, 0.006 + 0.1e-3
    assert times == pytest.approx([prefill_s, prefill_s + decode_s, prefill_s + 2 * decode_s])
    assert [output.token_ids for _, output in bench.outputs] == [[10**6], [10**6 + 1], [10**6 + 2]]
    assert bench.engine.busy_s == pytest.approx(times[-1])
    assert bench.engine.num_prefilled_tokens == 100
    bench.engine.scheduler.check_invariants()


def test_those_who_arrive_together_share_a_step_and_later_ones_find_the_prefix():
    bench = Bench()
    bench.submit("a", range(160), 1)
    bench.submit("b", range(1000, 1160), 1)
    bench.run(0.5)
    bench.submit("c", range(170), 1)
    bench.run(1.0)

    (first, _), (second, _), (third, output) = bench.outputs
    assert first == second == pytest.approx(0.006 + 320 * 0.04e-3)
    assert output.num_cached_tokens == 160
    assert third == pytest.approx(0.5 + 0.006 + 10 * 0.04e-3)
    assert bench.engine.num_prefilled_tokens == 330


def test_the_router_hears_of_blocks_and_load_a_little_later():
    bench = Bench()
    bench.submit("a", range(160), 50)
    bench.run(0.1)

    keys = bench.shape.keys((range(160),))
    reported = [(at, delta) for at, delta in bench.news if delta.stored]
    at, delta = reported[0]
    assert at == pytest.approx(0.006 + 160 * 0.04e-3 + DELAY_S, abs=0.006)
    assert [delta.stored[i : i + 8] for i in range(0, 120, 12)] == [
        keys[i : i + 8] for i in range(0, 80, 8)
    ]
    assert [delta.seq for _, delta in bench.news] == list(range(1, len(bench.news) + 1))
    assert any(delta.load and delta.load.running == 1 for _, delta in bench.news)


def test_an_idle_engine_gives_a_sign_of_life_every_second():
    bench = Bench()
    bench.run(3.5)

    assert [at for at, _ in bench.news] == pytest.approx([DELAY_S, 1.01, 2.01, 3.01])
    assert all(delta.load is not None for _, delta in bench.news)


def test_evicted_blocks_are_told():
    bench = Bench(MODEL.with_blocks(12))
    bench.submit("a", range(160), 1)
    bench.run(0.5)
    bench.submit("b", range(1000, 1160), 1)
    bench.run(1.0)

    evicted = b"".join(delta.evicted for _, delta in bench.news)
    keys = bench.shape.keys((range(160),))
    assert evicted
    gone = {evicted[i : i + 8] for i in range(0, len(evicted), 8)}
    assert gone <= {keys[i : i + 8] for i in range(0, len(keys), 8)}


def test_what_memory_could_never_hold_is_refused():
    bench = Bench()
    with pytest.raises(RequestError):
        bench.submit("a", range(1601), 1)
    assert not bench.engine.scheduler.has_work


def test_models_are_known_by_name():
    models = engine_models()
    assert list(models) == ["gpu-8b", "cpu-sim"]
    assert models["cpu-sim"].num_kv_tokens == 4096 * 16
    assert models["gpu-8b"].scheduler.max_model_len == 26_000 * 16
    assert models["gpu-8b"].with_blocks(10).scheduler.max_model_len == 160
