"""Made-up workloads: what they share, how they are paced, and that a seed settles them."""

import pytest

from octavo.study.engine_models import engine_models
from octavo.study.synthetic import SYNTHETIC, synthetic
from octavo.study.workload import Arrival, Texts, Workload
from octavo_engine.errors import ConfigError


@pytest.mark.parametrize("name", SYNTHETIC)
def test_a_seed_settles_a_workload(name):
    workload = synthetic(name, 150, seed=4)

    assert len(workload.arrivals) == 150
    assert workload == synthetic(name, 150, seed=4)
    assert workload != synthetic(name, 150, seed=5)


def test_a_turn_quotes_all_that_was_said_before_it():
    arrivals = synthetic("multi-turn", 100).arrivals
    later = [(a, arrivals[a.after]) for a in arrivals if a.after is not None]

    assert len(later) > 60
    for arrival, before in later:
        assert arrival.prompt[:-1] == (*before.prompt, before.answer)
        assert arrival.session == before.session


def test_system_prompts_are_shared_and_random_prompts_are_not():
    systems = {arrival.prompt[0] for arrival in synthetic("shared-system", 2000).arrivals}
    assert len(systems) == 150
    prompts = {arrival.prompt for arrival in synthetic("random", 1000).arrivals}
    assert len(prompts) == 1000


def test_nine_in_ten_prompts_begin_with_the_hot_prefix():
    arrivals = synthetic("hot-prefix", 1000).arrivals
    hot = max(arrivals, key=lambda a: len(a.prompt)).prompt[0]
    assert 870 < sum(arrival.prompt[0] == hot for arrival in arrivals) < 930


def test_bursts_come_at_one_moment():
    arrivals = synthetic("bursts", 128).arrivals
    assert len({arrival.delay_s for arrival in arrivals}) == 2


def test_load_is_work_over_time_and_sets_the_pace():
    model = engine_models()["gpu-8b"]
    texts = Texts()
    arrivals = [Arrival((texts.new(1000),), texts.new(100), at) for at in (0.0, 5.0, 10.0)]
    workload = Workload("three", tuple(arrivals))
    work_s = 3 * (1000 * 0.04 + 100 * (0.1 + 6 / 16)) / 1e3

    assert workload.load(model, 2) == pytest.approx(work_s / 20)
    faster = workload.at_load(0.5, model, 2)
    assert faster.load(model, 2) == pytest.approx(0.5)
    assert faster.span_s == pytest.approx(work_s)


def test_people_do_not_think_faster_under_load():
    workload = synthetic("multi-turn", 50)
    faster = workload.faster(10.0)

    pairs = zip(workload.arrivals, faster.arrivals, strict=True)
    for slow, fast in pairs:
        factor = 10.0 if slow.after is None else 1.0
        assert fast.delay_s == pytest.approx(slow.delay_s / factor)


def test_token_ids_are_bounded():
    texts = Texts()
    texts.new(2**32 - 2)
    with pytest.raises(ConfigError, match="more than 2\\*\\*32 different tokens"):
        texts.new(10)
