"""/metrics parses with Prometheus' own parser, and its counters equal the sums of what happened."""

from __future__ import annotations

import json

import pytest
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as parse_openmetrics,
)
from prometheus_client.parser import text_string_to_metric_families

from octavo_engine import metrics
from octavo_engine.core.data_parallel.joint_stats import join_stats
from octavo_engine.errors import ContextLengthExceeded, DeadlineExceeded, GenerationFailed
from octavo_engine.metrics import BucketHistogram, EngineMetrics, MetricsSnapshot, MonotonicStats
from octavo_engine.protocol import metric_names as names
from octavo_engine.server.settings import ServerSettings
from octavo_engine.state.outputs import EngineStats, TierStats
from tests.fakes.engine import FakeEngine
from tests.fakes.server import running


def read(text: str, parse=text_string_to_metric_families) -> dict[str, float]:
    """Samples by name and the labels that tell them apart."""
    result = {}
    for family in parse(text):
        for sample in family.samples:
            extra = {k: v for k, v in sample.labels.items() if k not in ("engine", "model_name")}
            result[sample.name + (json.dumps(extra, sort_keys=True) if extra else "")] = (
                sample.value
            )
    return result


def test_counters_equal_the_sums_of_events():
    with running() as server, server.client() as client:
        answers = [
            client.post(
                "/v1/completions", json={"prompt": "abc", "n": n, "max_tokens": n + 3}
            ).json()
            for n in (1, 2, 3)
        ]
        client.post("/v1/completions", json={})
        samples = read(client.get("/metrics").text)

    prompt = sum(answer["usage"]["prompt_tokens"] for answer in answers)
    generated = sum(answer["usage"]["completion_tokens"] for answer in answers)
    assert samples["octavo_prompt_tokens_total"] == prompt
    assert samples["octavo_generation_tokens_total"] == generated
    assert samples["octavo_request_generation_tokens_sum"] == generated
    assert samples["octavo_request_generation_tokens_count"] == 6
    assert samples["octavo_request_params_n_sum"] == 6
    finished = [value for name, value in samples.items() if "octavo_request_success_total" in name]
    assert sum(finished) == 6
    assert samples["octavo_time_to_first_token_seconds_count"] == 3
    assert samples["octavo_e2e_request_latency_seconds_count"] == 6
    route = '{"route": "/v1/completions", "status": "%d"}'
    assert samples["octavo_http_requests_total" + route % 200] == 3
    assert samples["octavo_http_requests_total" + route % 400] == 1


@pytest.mark.parametrize(
    ("error", "reason"),
    [(GenerationFailed("NaN"), "error"), (DeadlineExceeded("late"), "deadline")],
)
def test_failures_are_counted_by_their_reason(error, reason):
    with running(FakeEngine(error=error)) as server, server.client() as client:
        client.post("/v1/completions", json={"prompt": "abc", "n": 2})
        samples = read(client.get("/metrics").text)

    finished = {
        name: n for name, n in samples.items() if "octavo_request_success_total" in name and n
    }
    assert finished == {f'octavo_request_success_total{{"finished_reason": "{reason}"}}': 2}


def test_what_could_never_be_served_counts_as_no_failure():
    error = ContextLengthExceeded("too long")
    with running(FakeEngine(error=error)) as server, server.client() as client:
        client.post("/v1/completions", json={"prompt": "abc"})
        samples = read(client.get("/metrics").text)

    assert not any(n for name, n in samples.items() if "request_success_total" in name)


def test_every_gap_between_streamed_outputs_is_observed():
    with running() as server, server.client() as client:
        client.post(
            "/v1/completions",
            json={"prompt": "a", "max_tokens": 9, "stream": True, "ignore_eos": True},
        )
        samples = read(client.get("/metrics").text)

    assert samples["octavo_inter_token_latency_seconds_count"] == 8


def test_vllm_s_names_come_beside_ours_with_equal_values_unless_switched_off():
    with running() as server, server.client() as client:
        client.post("/v1/completions", json={"prompt": "abc"})
        samples = read(client.get("/metrics").text)

    assert samples["vllm:prompt_tokens_total"] == samples["octavo_prompt_tokens_total"] == 3
    assert samples["vllm:kv_cache_usage_perc"] == 0.0
    geometry = '{"block_size": "16", "cache_dtype": "auto", "num_gpu_blocks": "100"}'
    assert f"vllm:cache_config_info{geometry}" in samples
    ours = {name for name in samples if name.startswith("octavo_")}
    assert {name.replace("octavo_", "vllm:", 1) for name in ours} <= set(samples)
    assert "vllm:" not in read_without_vllm()


def read_without_vllm() -> str:
    with running(settings=ServerSettings(vllm_metrics=False)) as server, server.client() as client:
        text: str = client.get("/metrics").text
        return text


def test_openmetrics_is_spoken_too():
    with running() as server, server.client() as client:
        answer = client.get("/metrics", headers={"accept": "application/openmetrics-text"})

    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    assert read(answer.text, parse_openmetrics)["octavo_steps_total"] == 0


@pytest.mark.parametrize(
    "accept",
    [
        "application/openmetrics-text",
        # As Prometheus 2 asks, and Prometheus 3.
        "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5",
        "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,text/plain;q=0.4",
        "text/plain;version=1.0.0",
    ],
)
def test_names_are_the_same_however_they_are_asked_for(accept: str) -> None:
    metrics = EngineMetrics(
        "m", lambda: MetricsSnapshot(EngineStats(), "ready", 0), vllm_names=True
    )
    plain, _ = metrics.render()
    text, kind = metrics.render(accept)
    parse = parse_openmetrics if "openmetrics" in kind else text_string_to_metric_families
    found = set(read(text.decode(), parse))
    assert "vllm:num_requests_running" in found
    assert found == set(read(plain.decode()))


def test_every_name_of_the_engines_catalogue_is_emitted():
    stats = EngineStats(tiers=TierStats(), expert_rank_tokens=[0], expert_layer_tokens=[[0]])
    exposition, _ = EngineMetrics("m", lambda: MetricsSnapshot(stats=stats)).render()
    families = {family.name for family in text_string_to_metric_families(exposition.decode())}

    catalogue = {
        value
        for key, value in vars(names).items()
        if key.isupper() and "PREFIX" not in key and not key.startswith("ROUTER")
    }
    catalogue |= {names.PREFIX_CACHE_HITS, names.PREFIX_CACHE_QUERIES}
    assert families == catalogue


def test_counters_go_on_when_the_core_starts_again_from_zero():
    totals = MonotonicStats()
    for tokens in (5, 9, 2, 4):
        totals.update(EngineStats(generation_tokens=tokens))

    assert totals["generation_tokens"] == 9 + 4


def test_guesses_are_told_by_their_place_and_go_on_over_a_restart():
    stats = EngineStats()
    engine_metrics = EngineMetrics("m", lambda: MetricsSnapshot(stats=stats), vllm_names=True)
    engine_metrics.render()
    for drafts, accepted in ((3, [2, 1]), (7, [6, 4, 1]), (1, [1])):
        stats = EngineStats(
            spec_drafts=drafts, spec_draft_tokens=4 * drafts, spec_accepted_tokens=sum(accepted),
            spec_accepted_per_pos=accepted,
        )  # fmt: skip
        samples = read(engine_metrics.render()[0].decode())
    for prefix in ("octavo_", "vllm:"):
        name = prefix + "spec_decode_num_"
        assert samples[name + "drafts_total"] == 7 + 1
        assert samples[name + "draft_tokens_total"] == 4 * 8
        assert samples[name + "accepted_tokens_total"] == 11 + 1
        per_pos = [
            samples[f'{name}accepted_tokens_per_pos_total{{"position": "{place}"}}']
            for place in range(3)
        ]
        assert per_pos == [6 + 1, 4, 1]


def test_a_value_on_a_bound_falls_into_its_bucket():
    histogram = BucketHistogram((1, 2))
    for value in (0.5, 1, 1.5, 2, 3):
        histogram.observe(value)

    assert histogram.cumulative() == [("1.0", 2.0), ("2.0", 4.0), ("+Inf", 5.0)]
    assert (histogram.count, histogram.sum) == (5, 8.0)


def test_buckets_are_sorted_and_finer_than_ten_milliseconds():
    for bounds in (metrics.LATENCY_BUCKETS, metrics.REQUEST_BUCKETS, metrics.TOKEN_BUCKETS):
        assert list(bounds) == sorted(set(bounds))
    assert sum(bound < 0.01 for bound in metrics.LATENCY_BUCKETS) >= 5


@pytest.mark.parametrize(("last_step_at", "age"), [(60.0, 40.0), (0.0, 0.0), (100.5, 0.0)])
def test_the_age_of_the_last_step_is_that_of_its_end(last_step_at, age):
    """0 before there was any, and where the core's clock is read a little later."""
    snapshot = MetricsSnapshot(stats=EngineStats(last_step_at=last_step_at))
    metrics = EngineMetrics("m", lambda: snapshot, now=lambda: 100.0)
    assert read(metrics.render()[0].decode())[names.LAST_STEP_AGE_SECONDS] == age


def test_each_core_has_samples_of_its_own():
    def by_core(text: str, parse=text_string_to_metric_families) -> dict[tuple[str, str], float]:
        return {
            (sample.name, sample.labels["engine"]): sample.value
            for family in parse(text)
            for sample in family.samples
        }

    snapshot = MetricsSnapshot(stats=EngineStats(), state="loading")
    metrics = EngineMetrics("m", lambda: snapshot, vllm_names=True)
    assert {core for _, core in by_core(metrics.render()[0].decode())} == {"0"}
    one = EngineStats(num_running=2, prompt_tokens=10, kv_blocks_total=8, kv_blocks_used=4)
    two = EngineStats(num_running=1, prompt_tokens=5, tiers=TierStats(host_blocks=3))
    snapshot.stats = join_stats([one, two])
    metrics.render()
    snapshot.stats = join_stats([EngineStats(prompt_tokens=1), two])  # started again
    samples = by_core(metrics.render()[0].decode())
    assert samples["octavo_prompt_tokens_total", "0"] == 11
    assert samples["octavo_prompt_tokens_total", "1"] == 5
    assert samples["vllm:prompt_tokens_total", "1"] == 5
    assert samples["octavo_num_requests_running", "0"] == 0
    assert samples["octavo_num_requests_running", "1"] == 1
    assert ("octavo_num_http_requests_in_flight", "1") not in samples
    plain = EngineMetrics("m", lambda: snapshot)
    text, _ = plain.render("application/openmetrics-text; version=1.0.0")
    samples = by_core(text.decode(), parse_openmetrics)
    assert samples["octavo_prompt_tokens_total", "1"] == 5


def test_experts_of_several_ranks_are_counted_by_rank():
    """Also over a restart of the core; with one rank there is no such metric."""
    stats = EngineStats(expert_rank_tokens=[5, 7])
    metrics = EngineMetrics("m", lambda: MetricsSnapshot(stats=stats))
    metrics.render()
    stats.expert_rank_tokens = [2, 1]
    text = metrics.render()[0].decode()
    for rank, count in ((0, 7), (1, 8)):
        name = "octavo_expert_rank_tokens_total"
        assert f'{name}{{engine="0",model_name="m",rank="{rank}"}} {count}' in text
    plain = EngineMetrics("m", lambda: MetricsSnapshot(stats=EngineStats())).render()[0].decode()
    assert "expert_rank" not in plain


def test_each_expert_of_each_layer_is_counted_where_it_is_asked_for():
    """Also over steps without counts, and over a restart of the core."""
    stats = EngineStats(expert_layer_tokens=[[], [5, 0]])
    metrics = EngineMetrics("m", lambda: MetricsSnapshot(stats=stats))
    metrics.render()
    later = EngineStats()
    later.keep_expert_counts(stats)
    assert later.expert_layer_tokens == [[], [5, 0]]
    stats.expert_layer_tokens = [[], [2, 4]]
    text = metrics.render()[0].decode()
    labels = 'engine="0",expert="{}",layer="1",model_name="m"'
    for expert, count in ((0, 7), (1, 4)):
        assert f"octavo_expert_tokens_total{{{labels.format(expert)}}} {count}" in text
    plain = EngineMetrics("m", lambda: MetricsSnapshot(stats=EngineStats())).render()[0].decode()
    assert "expert_tokens" not in plain
