"""Many adapters on few slots, tried in the simulator: the router's own placement and policies."""

from __future__ import annotations

from dataclasses import replace

import pytest

from octavo.cli import main
from octavo.study.adapters import AdapterSetup, with_adapters
from octavo.study.engine_models import engine_models
from octavo.study.simulation import RoutingStudy, Setup
from octavo.study.synthetic import synthetic

pytestmark = pytest.mark.slow

SETUP = Setup(model=engine_models()["gpu-8b"], num_engines=4)
ADAPTERS = AdapterSetup(num_adapters=200, slots=8)


def workload(num_requests: int = 1000):
    return synthetic("random", num_requests).at_load(1.0, SETUP.model, SETUP.num_engines)


def test_adapters_beyond_the_slots_cost_a_tenth_of_the_throughput_at_most():
    base = RoutingStudy(workload(), SETUP).run("prefix-load")
    setup = replace(SETUP, adapters=ADAPTERS)
    requests = with_adapters(workload(), ADAPTERS, zipf=1.0, seed=0)
    adapters = RoutingStudy(requests, setup).run("prefix-load")
    assert adapters.num_requests == base.num_requests == 1000
    assert adapters.output_tokens_per_s >= 0.9 * base.output_tokens_per_s
    assert 32 <= adapters.num_adapter_loads <= 450  # it fills its slots, and does not thrash


def test_no_adapter_is_loaded_twice_where_all_have_room():
    few = AdapterSetup(num_adapters=32, slots=8)
    requests = with_adapters(workload(), few, zipf=0.0, seed=0)
    figures = RoutingStudy(requests, replace(SETUP, adapters=few)).run("prefix-load")
    assert figures.num_adapter_loads == 32


def test_a_trace_of_adapters_is_zipf():
    names = [
        one.adapter for one in with_adapters(workload(4000), ADAPTERS, zipf=1.0, seed=3).arrivals
    ]
    harmonic = sum(1 / rank for rank in range(1, 201))
    assert names.count("adapter-0") / 4000 == pytest.approx(1 / harmonic, rel=0.15)
    assert names.count("adapter-9") / 4000 == pytest.approx(0.1 / harmonic, rel=0.5)


def test_the_command_reports_loads(capsys: pytest.CaptureFixture[str]):
    argv = ["bench", "router", "--workload", "random", "--num-requests", "60", "--engines", "2"]
    assert main([*argv, "--policies", "prefix-load", "--adapters", "20"]) == 0
    out = capsys.readouterr().out
    assert "random, 20 adapters" in out
    assert "loads" in out
