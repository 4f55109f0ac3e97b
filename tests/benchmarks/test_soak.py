"""The soak: how sure a slope is, and an operator that has something to do at a real API server."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import psutil
import pytest

from benchmarks.faults import operated as module
from benchmarks.faults.operated import DEPLOYMENTS, operated
from benchmarks.faults.soak import slope, slope_range
from octavo_operator.objects import kinds
from tests.apiserver import build
from tests.fakes.operator_story import is_settled

if TYPE_CHECKING:
    from pathlib import Path


def test_a_steady_slope_is_sure_and_one_that_a_part_makes_is_not():
    at_s = [10.0 * number for number in range(200)]
    low, high = slope_range(at_s, [2.0 * at for at in at_s])
    assert low == pytest.approx(2.0) and high == pytest.approx(2.0)
    steps = [0.0] * 110 + [500.0] * 90  # once, in the midst
    low, high = slope_range(at_s, steps)
    assert low <= slope(at_s, steps) <= high
    assert high > 0.0


def test_noise_around_nothing_has_nothing_in_its_range():
    rng = random.Random(2)
    at_s = [10.0 * number for number in range(400)]
    low, high = slope_range(at_s, [rng.gauss(100.0, 1.0) for _ in at_s])
    assert low < 0.0 < high or max(abs(low), abs(high)) < 1e-3


@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_an_operator_follows_changes_and_a_replaced_api_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    if reason := build.why_not():
        pytest.skip(reason)
    monkeypatch.setattr(module, "CHANGE_EVERY_S", 0.0)  # one with each turn
    with operated(tmp_path) as cluster:
        for _ in range(6):
            cluster.turn()
        assert cluster.settle() == 0
        cluster.replace_api_server()
        cluster.api.wait_until_ready()
        for _ in range(6):
            cluster.turn()
        assert cluster.changes >= 6
        assert cluster.settle() == 0
        assert all(is_settled(cluster.api.get(one)) for one in cluster.deployments)
        pods = cluster.api.list("v1", "Pod", cluster.namespace)
        assert len(pods) == 2 * DEPLOYMENTS, [kinds.name_of(pod) for pod in pods]
        operator = psutil.Process(cluster.operator.process.pid)
        assert operator.is_running()
    assert not operator.is_running()
