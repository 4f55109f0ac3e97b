"""Engines that change sides, against fixed sides: real schedulers and the real router in virtual
time, at four corners of what clients may want. The constants of `sides` were chosen with this load;
docs/prefill-decode.md has figures of others.

Red when: the mode that is chosen keeps fewer promises than the better fixed one; engines change
sides back and forth; a request is lost while they do.
"""

from random import Random

import pytest

from octavo.study.engine_models import engine_models
from octavo.study.simulation import RoutingStudy, Setup
from octavo.study.synthetic import random_prompts
from octavo.study.workload import Workload
from octavo_engine.protocol.sides import SideLimits, SideTargets
from tests.fakes.flipped import FlippingOperator

pytestmark = pytest.mark.slow

MODEL = engine_models()["gpu-8b"]
NUM_ENGINES, NUM_REQUESTS = 4, 400
NUM_BEFORE = NUM_REQUESTS // 4  # that end before the load is known and engines have changed
NUM_BEFORE_FLIPS = 250  # the same, where the operator moves them
SLACK = 0.02  # of the others
CORNERS = [SideTargets(first, each) for first in (0.25, 4.0) for each in (0.0115, 0.1)]


def run(num_prefill, targets=None, mover=None):
    arrivals = tuple(random_prompts(NUM_REQUESTS, Random(1)))
    workload = Workload("random", arrivals).at_load(1.0, MODEL, NUM_ENGINES)
    setup = Setup(
        model=MODEL,
        num_engines=NUM_ENGINES,
        num_prefill=num_prefill,
        targets=targets,
        mover=mover,
    )
    return RoutingStudy(workload, setup).run("prefill-decode")


def kept(figures, targets, num_before=NUM_BEFORE):
    """The share of promises kept, once sides have settled."""
    felt = figures.felt[num_before:]
    met = sum(first <= targets[0] and each <= targets[1] for first, each in felt)
    return met / len(felt)


@pytest.fixture(scope="module")
def fixed():
    """All engines do both, and a pair of sides that suits this load."""
    return [run(0), run(2)]


@pytest.mark.parametrize("targets", CORNERS, ids=str)
def test_the_chosen_mode_keeps_as_many_promises_as_the_better_fixed_one(fixed, targets):
    chosen = run(0, targets)
    assert kept(chosen, targets) >= max(kept(figures, targets) for figures in fixed) - SLACK
    assert chosen.num_side_changes <= 3
    assert chosen.num_requests == NUM_REQUESTS and chosen.num_refused == 0


@pytest.mark.parametrize("targets", CORNERS, ids=str)
def test_pods_that_the_operator_flips_keep_as_many_as_the_better_fixed_sides(fixed, targets):
    """What it knows comes by the router's state page, and what it decides comes back later. It
    measures for five seconds first, and what engines have then goes on where it is."""
    operator = FlippingOperator(targets)
    chosen = run(0, mover=operator)
    of_fixed = (kept(figures, targets, NUM_BEFORE_FLIPS) for figures in fixed)
    assert kept(chosen, targets, NUM_BEFORE_FLIPS) >= max(of_fixed) - SLACK
    assert len(operator.reasons) <= 3
    assert chosen.num_requests == NUM_REQUESTS and chosen.num_refused == 0


def test_flips_keep_within_the_limits_of_each_side():
    operator = FlippingOperator(SideTargets(4.0, 0.0115), SideLimits(prompts=1, answers=3))
    run(0, mover=operator)
    assert operator.num_moved == 1  # at once, and no other one can follow
    assert "the fewest are 1" in operator.reasons[0]


def test_sides_pay_where_each_token_counts_and_cost_where_the_first_does(fixed):
    together, apart = fixed
    assert apart.within(4.0, 0.0115) > together.within(4.0, 0.0115) + 0.1
    assert together.within(0.15, 0.1) > apart.within(0.15, 0.1) + 0.05


def test_engines_that_begin_on_the_wrong_side_change_it():
    targets = SideTargets(0.25, 0.1)
    assert run(1, targets).within(*targets) > run(1).within(*targets) + 0.3
