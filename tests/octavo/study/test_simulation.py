"""A whole run: every request is accounted for, and the figures are the same each time."""

import dataclasses

import pytest

from octavo.study.engine_models import engine_models
from octavo.study.simulation import RoutingStudy, Setup, compare
from octavo.study.synthetic import synthetic
from octavo.study.timeline import Timeline
from octavo.study.workload import Arrival, Texts, Workload
from octavo_router.errors import ConfigInvalid

pytestmark = pytest.mark.slow

MODEL = engine_models()["gpu-8b"].with_blocks(2000)
SETUP = Setup(model=MODEL, num_engines=3)


def test_events_happen_in_order_and_time_never_runs_back():
    timeline = Timeline()
    seen = []
    timeline.at(2.0, lambda: seen.append(("b", timeline.now)))
    timeline.at(1.0, lambda: timeline.at(0.5, lambda: seen.append(("late", timeline.now))))
    timeline.at(2.0, lambda: seen.append(("c", timeline.now)))
    timeline.run(is_over=lambda: False)
    assert seen == [("late", 1.0), ("b", 2.0), ("c", 2.0)]


@pytest.mark.parametrize("shape", ["ids", "text"])
def test_a_run_is_the_same_every_time_and_loses_nothing(shape):
    workload = synthetic("multi-turn", 40, seed=1).at_load(0.8, MODEL, 3)
    setup = dataclasses.replace(SETUP, shape=shape)
    figures = RoutingStudy(workload, setup).run("power-of-two")

    assert figures == RoutingStudy(workload, setup).run("power-of-two")
    assert (figures.num_requests, figures.num_refused) == (40, 0)
    assert figures.num_output_tokens == sum(len(a.answer) for a in workload.arrivals)
    cached = round(figures.hit_rate * figures.num_prompt_tokens)
    assert figures.num_preemptions == 0
    assert figures.num_prefilled_tokens == figures.num_prompt_tokens - cached
    assert figures.ttft_p50_s <= figures.ttft_p90_s <= figures.ttft_p99_s
    assert 0.0 < figures.utilisation <= 1.0


def test_the_router_foresees_what_engines_find():
    workload = synthetic("shared-system", 60, seed=2).at_load(0.5, MODEL, 3)
    for shape in ("ids", "text"):
        figures = RoutingStudy(workload, dataclasses.replace(SETUP, shape=shape)).run("prefix-load")
        assert figures.predicted_within_block >= 0.95, shape


def test_a_run_does_not_depend_on_those_before_it():
    workload = synthetic("multi-turn", 20, seed=3).at_load(0.8, MODEL, 3)
    study = RoutingStudy(workload, SETUP)
    together = [study.run(policy) for policy in ("random", "prefix-load")]

    assert together == [RoutingStudy(workload, SETUP).run(p) for p in ("random", "prefix-load")]
    assert list(compare(workload, SETUP, ["random", "prefix-load"], num_jobs=2)) == together


def test_a_turn_waits_for_the_answer_before_it():
    texts = Texts()
    prompt, answer = texts.new(160), texts.new(100)
    first = Arrival((prompt,), answer, 0.0)
    second = Arrival((prompt, answer, texts.new(60)), texts.new(1), 2.0, 0)
    figures = RoutingStudy(Workload("two", (first, second)), SETUP).run("prefix-load")

    first_s = 0.006 + 160 * 0.04e-3 + 99 * 0.0061
    second_s = 0.006 + 61 * 0.04e-3  # the answer's last token was never computed
    assert figures.makespan_s == pytest.approx(first_s + 2.0 + second_s)
    assert figures.hit_rate == pytest.approx(259 / 480)


def test_what_no_engine_can_hold_is_refused_with_all_that_follows():
    texts = Texts()
    huge = texts.new(40_000)
    arrivals = (
        Arrival((texts.new(100),), texts.new(5), 0.0),
        Arrival((huge,), texts.new(5), 0.1),
        Arrival((huge, texts.new(10)), texts.new(5), 1.0, 1),
        Arrival((texts.new(100),), texts.new(5), 0.2),
    )
    figures = RoutingStudy(Workload("huge", arrivals), SETUP).run("round-robin")
    assert (figures.num_requests, figures.num_refused) == (2, 2)


def test_full_engines_refuse_and_the_others_are_tried():
    crowded = dataclasses.replace(MODEL.scheduler, max_num_seqs=1, max_queue=1)
    setup = Setup(model=dataclasses.replace(MODEL, scheduler=crowded), num_engines=2)
    texts = Texts()
    arrivals = tuple(Arrival((texts.new(500),), texts.new(50), 0.01 * i) for i in range(6))
    figures = RoutingStudy(Workload("crowd", arrivals), setup).run("consistent-hash")
    assert (figures.num_requests, figures.num_refused) == (4, 2)


def test_an_unknown_policy_is_named():
    with pytest.raises(ConfigInvalid, match="no policy 'best'"):
        RoutingStudy(synthetic("random", 5), SETUP).run("best")
