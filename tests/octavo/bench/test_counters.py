"""Figures of a server's own counters."""

from __future__ import annotations

import asyncio

import pytest

from octavo.bench.counters import figures, parse_counters, read_counters
from octavo.http_client import ServerAddress

OURS = """# TYPE octavo_cpu_seconds counter
octavo_cpu_seconds_total{model_name="m"} 12.5
# TYPE octavo_spec_decode_num_drafts counter
octavo_spec_decode_num_drafts_total{engine="0",model_name="m"} 10.0
octavo_spec_decode_num_drafts_total{engine="1",model_name="m"} 30.0
# TYPE octavo_spec_decode_num_draft_tokens counter
octavo_spec_decode_num_draft_tokens_total{model_name="m"} 100.0
# TYPE octavo_spec_decode_num_accepted_tokens counter
octavo_spec_decode_num_accepted_tokens_total{model_name="m"} 60.0
"""
THEIRS = """# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0"} 7.0
"""


def test_counters_of_all_cores_are_one_sum_under_our_names():
    assert parse_counters(OURS) == {
        "octavo_cpu_seconds": 12.5,
        "octavo_spec_decode_num_drafts": 40.0,
        "octavo_spec_decode_num_draft_tokens": 100.0,
        "octavo_spec_decode_num_accepted_tokens": 60.0,
    }
    assert parse_counters(THEIRS) == {"octavo_spec_decode_num_drafts": 7.0}
    # A server may have each under both names.
    assert parse_counters(OURS + THEIRS)["octavo_spec_decode_num_drafts"] == 40.0


@pytest.mark.parametrize("text", ["", "<html>no metrics</html>", "a{b=1} c", '{"error": 404}'])
def test_what_is_no_metrics_page_counts_nothing(text):
    assert parse_counters(text) == {}


def test_figures_are_of_the_time_between():
    before = parse_counters(OURS)
    after = {
        "octavo_cpu_seconds": 14.5,
        "octavo_spec_decode_num_drafts": 50.0,
        "octavo_spec_decode_num_draft_tokens": 140.0,
        "octavo_spec_decode_num_accepted_tokens": 80.0,
    }
    assert figures(before, after, 4000) == {
        "cpu_s_per_1000_tokens": 0.5, "draft_acceptance_rate": 0.5, "mean_acceptance_length": 3.0,
    }  # fmt: skip
    assert figures({}, {}, 4000) == {}
    assert figures(before, before, 4000) == {}  # nothing was drafted, and no time passed


def test_a_server_that_is_not_there_counts_nothing():
    address = ServerAddress.parse("http://127.0.0.1:9")
    assert asyncio.run(read_counters(address)) == {}
