"""The line of statistics: rates since the last look, and none where nothing happens."""

from __future__ import annotations

from octavo_engine.server.admin.statistics import StatisticsWindow
from octavo_engine.state.outputs import EngineStats


def test_rates_are_those_since_the_last_look():
    window = StatisticsWindow(100.0)
    stats = EngineStats(
        num_running=2, num_waiting=1, prompt_tokens=500, generation_tokens=100, kv_blocks_used=1,
        kv_blocks_total=8, prefix_queries=200, prefix_hits=50,
    )  # fmt: skip
    assert window.look(stats, 110.0) == {
        "running": 2, "waiting": 1, "prompt_tokens_per_s": 50.0, "output_tokens_per_s": 10.0,
        "kv_cache_used": "12.5%", "prefix_hits": "25.0%",
    }  # fmt: skip
    stats.generation_tokens = 300
    line = window.look(stats, 120.0)
    assert line is not None
    assert (line["prompt_tokens_per_s"], line["output_tokens_per_s"]) == (0.0, 20.0)
    assert line["prefix_hits"] == "0.0%"


def test_an_idle_engine_has_no_line():
    window = StatisticsWindow(0.0)
    assert window.look(EngineStats(), 10.0) is None
    done = EngineStats(prompt_tokens=5, generation_tokens=5)
    assert window.look(done, 20.0) is not None  # it came and went in between
    assert window.look(done, 30.0) is None
    assert window.look(EngineStats(num_waiting=1), 40.0) is not None


def test_counters_begin_anew_with_a_restarted_core():
    window = StatisticsWindow(0.0)
    window.look(EngineStats(generation_tokens=1000), 10.0)
    line = window.look(EngineStats(generation_tokens=10, num_running=1), 20.0)
    assert line is not None and line["output_tokens_per_s"] == 1.0
