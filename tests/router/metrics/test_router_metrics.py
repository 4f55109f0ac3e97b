"""What is counted and how it is exposed: parsed back by the library that Prometheus publishes."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from prometheus_client.parser import text_string_to_metric_families

from octavo_engine.protocol import metric_names as names
from octavo_router.config.settings import RouterConfig, RoutingConfig
from octavo_router.flow.admission import AdmissionDemand
from octavo_router.gauges import (
    make_connection_gauges,
    make_gauges,
    make_shadow_gauges,
    make_side_counters,
)
from octavo_router.metrics import RequestRecord, RouterMetrics
from octavo_router.metrics.router_metrics import BUNDLE
from octavo_router.observer import MetricsObserver
from octavo_router.residency.index import PyResidencyIndex
from octavo_router.routing.outcome import AttemptResult, Outcome
from octavo_router.routing.request import RouteRequest
from octavo_router.routing.side_keeper import SideKeeper
from tests.fakes.clock import ManualClock
from tests.fakes.endpoints import World

if TYPE_CHECKING:
    from collections.abc import Mapping

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]

DONE = RequestRecord(
    request_id="r", route="/v1/chat/completions", model="m", is_known_model=True, pool="p",
    revision="r1", tenant="t", endpoint="10.0.0.1:8000", policy="prefix-load", status=200,
    outcome="ok", is_stream=True, duration_s=2.0, queue_s=0.5, pick_s=0.00002, ttft_s=1.0,
    last_token_s=1.9, request_bytes=100, response_bytes=5000, prompt_tokens=300, output_tokens=10,
    cached_tokens=256, predicted_tokens=250, attempts=1,
)  # fmt: skip


def scrape(metrics: RouterMetrics) -> Samples:
    text, content_type = metrics.render()
    assert content_type.startswith("text/plain")
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples[name, tuple(sorted(labels.items()))]


def only(samples: Samples, name: str) -> Mapping[tuple[tuple[str, str], ...], float]:
    return {labels: value for (each, labels), value in samples.items() if each == name}


def test_a_request_is_counted_once_everywhere():
    metrics = RouterMetrics(version="1.2")
    metrics.finish(replace(DONE))
    samples = scrape(metrics)
    labels = {
        "model": "m",
        "route": "/v1/chat/completions",
        "code": "200",
        "stream": "true",
        "outcome": "ok",
    }
    assert value(samples, names.ROUTER_REQUESTS + "_total", **labels) == 1
    assert value(samples, names.ROUTER_TOKENS + "_total", model="m", kind="prompt") == 300
    assert value(samples, names.ROUTER_TOKENS + "_total", model="m", kind="output") == 10
    assert value(samples, names.ROUTER_TOKENS + "_total", model="m", kind="cached") == 256
    for name, total in (
        (names.ROUTER_REQUEST_DURATION_SECONDS, 2.0),
        (names.ROUTER_TIME_TO_FIRST_TOKEN_SECONDS, 1.0),
        (names.ROUTER_TIME_PER_OUTPUT_TOKEN_SECONDS, 0.1),
        (names.ROUTER_QUEUE_DURATION_SECONDS, 0.5),
        (names.ROUTER_PREFIX_PREDICTION_ERROR_TOKENS, 6.0),
        (names.ROUTER_REQUEST_SIZE_BYTES, 100.0),
        (names.ROUTER_RESPONSE_SIZE_BYTES, 5000.0),
    ):
        assert value(samples, name + "_count", pool="p") == 1
        assert abs(value(samples, name + "_sum", pool="p") - total) < 1e-9
    error = names.ROUTER_PREFIX_PREDICTION_ERROR_TOKENS + "_bucket"
    assert value(samples, error, pool="p", le="0.0") == 0
    assert value(samples, error, pool="p", le="16.0") == 1
    assert value(samples, names.ROUTER_TENANT_TOKENS + "_total", tenant="t", kind="prompt") == 300
    assert value(samples, names.ROUTER_INFO + "_info", version="1.2") == 1


def test_however_many_are_counted_together_none_is_lost_or_counted_twice():
    metrics = RouterMetrics()
    for number in range(1, 3 * BUNDLE + 8):
        metrics.finish(replace(DONE, is_stream=number % 3 == 0, duration_s=float(number % 7)))
        if number % 50 == 0 or number < 4:
            assert sum(metrics.requests.values()) == number
            assert metrics.pool("p").duration.count == number
            assert metrics.tenants["t"].prompt_tokens == 300 * number
            assert metrics.tokens["m", "output"] == 10 * number
    total = 3 * BUNDLE + 7
    pool = metrics.pool("p")
    assert pool.duration.sum == sum(number % 7 for number in range(1, total + 1))
    assert pool.ttft.count == pool.tpot.count == pool.prediction_error.count == total
    assert pool.revisions["r1"].requests == pool.revisions["r1"].ttft.count == total
    assert pool.predicted_tokens == 250 * total


def test_the_last_request_is_when_it_ended_not_when_it_was_counted():
    clock = ManualClock()
    metrics = RouterMetrics(now=clock)
    clock.advance(5.0)
    ended_at = clock()
    metrics.finish(replace(DONE))
    metrics.finish(replace(DONE, ended_at=ended_at - 3.0, revision="r2"))
    clock.advance(100.0)
    assert metrics.pool("p").last_request_at == ended_at


def test_unknown_models_and_many_tenants_make_no_series():
    metrics = RouterMetrics(max_label_values=3)
    for number in range(100):
        record = replace(DONE, model=f"guess-{number}", is_known_model=False, tenant=f"t{number}")
        metrics.finish(record)
    samples = scrape(metrics)
    requests = only(samples, names.ROUTER_REQUESTS + "_total")
    assert [dict(labels)["model"] for labels in requests] == ["unknown"]
    tenants = only(samples, names.ROUTER_TENANT_REQUESTS + "_total")
    assert {dict(labels)["tenant"]: count for labels, count in tenants.items()} == {
        "t0": 1, "t1": 1, "t2": 1, "other": 97,
    }  # fmt: skip


def test_refusals_count_by_reason_and_speak_against_no_revision():
    metrics = RouterMetrics()
    refused = replace(
        DONE, status=503, code="queue_full", outcome="refused", attempts=0, ttft_s=None,
        prompt_tokens=0, output_tokens=0, cached_tokens=None,
    )  # fmt: skip
    metrics.finish(refused)
    metrics.finish(replace(refused, status=0, code="", outcome="client_gone"))
    samples = scrape(metrics)
    assert only(samples, names.ROUTER_REJECTIONS + "_total") == {
        (("pool", "p"), ("reason", "queue_full")): 1
    }
    assert value(samples, names.ROUTER_CLIENT_DISCONNECTS + "_total", pool="p") == 1
    assert value(samples, names.ROUTER_TENANT_REJECTIONS + "_total", tenant="t") == 1
    assert metrics.pool("p").revisions == {}
    assert metrics.pool("p").refused == 1  # for lack of room


def test_a_revisions_errors_and_latencies_are_kept_for_canary_analysis():
    metrics = RouterMetrics()
    metrics.finish(replace(DONE))
    metrics.finish(replace(DONE, status=502, outcome="broken", ttft_s=None))
    revision = metrics.pool("p").revisions["r1"]
    assert (revision.requests, revision.errors) == (2, 1)
    assert (revision.ttft.count, revision.itl_count) == (1, 9)
    assert abs(revision.itl_s_sum - 0.9) < 1e-9


def test_retries_and_resumes_are_told_apart():
    metrics = RouterMetrics()
    metrics.finish(replace(DONE, attempts=2))
    metrics.finish(replace(DONE, attempts=4, resumes=2))
    metrics.finish(replace(DONE, attempts=3, resumes=1, status=502, outcome="broken"))
    samples = scrape(metrics)
    assert value(samples, names.ROUTER_RETRIES + "_total", pool="p") == 3
    assert value(samples, names.ROUTER_RETRIES_EXHAUSTED + "_total", pool="p") == 1
    assert value(samples, names.ROUTER_RESUMES + "_total", pool="p", outcome="ok") == 2
    assert value(samples, names.ROUTER_RESUMES + "_total", pool="p", outcome="broken") == 1


def test_shadows_are_compared():
    config = RouterConfig(routing=RoutingConfig(shadows=("random",), sample_every=1))
    world = World(2, config=config)
    metrics = RouterMetrics()
    metrics.add_source(make_shadow_gauges(lambda: world.dispatcher.shadows))
    for _ in range(20):
        request = RouteRequest(model="model", pool="pool", prompt_tokens=100)
        assert world.dispatcher.place(request) is not None
    picks = only(scrape(metrics), names.ROUTER_SHADOW_PICKS + "_total")
    by_verdict = {dict(labels)["verdict"]: count for labels, count in picks.items()}
    assert set(by_verdict) == {"same", "better", "worse"}
    assert 0 < by_verdict["same"] < 20


def test_the_dispatcher_is_observed_and_a_removed_endpoint_leaves_no_series():
    world = World(2)
    metrics = RouterMetrics(now=world.clock)
    world.dispatcher.observer = MetricsObserver(metrics)
    request = RouteRequest(model="model", pool="pool", prompt_tokens=10)
    lease = world.dispatcher.place(request)
    assert lease is not None
    id_ = lease.endpoint.id
    assert metrics.pool("pool").running == 1
    assert metrics.pool("pool").last_request_at == world.clock()
    lease.finish(Outcome(AttemptResult.OK))
    lease.finish(Outcome(AttemptResult.BROKEN))
    assert metrics.pool("pool").running == 0
    samples = scrape(metrics)
    assert only(samples, names.ROUTER_UPSTREAM_ATTEMPTS + "_total") == {
        (("outcome", "ok"), ("pool", "pool")): 1
    }
    labels = (("endpoint", id_), ("outcome", "ok"), ("pool", "pool"))
    assert only(samples, names.ROUTER_UPSTREAM_REQUESTS + "_total") == {labels: 1}
    metrics.forget_endpoint(id_)
    late = world.dispatcher.place(request)
    assert late is not None
    metrics.forget_endpoint(late.endpoint.id)
    world.registry.replace("test", [])
    late.finish(Outcome(AttemptResult.OK))
    assert only(scrape(metrics), names.ROUTER_UPSTREAM_REQUESTS + "_total") == {}


def test_gauges_show_what_is_known_and_nothing_else():
    world = World(2)
    metrics = RouterMetrics(now=world.clock)
    first, second = world.endpoints
    world.tell(first, running=3, waiting=2, queued_tokens=50, kv_usage=0.5)
    first.in_flight = 4
    world.clock.advance(2.0)
    world.registry.report(second, "down", "gone")
    index = PyResidencyIndex()
    for endpoint in world.endpoints:
        endpoint.slot = index.add_slot()
    index.apply(first.slot, bytes(12), b"")
    metrics.add_source(
        make_gauges(world.registry, index, lambda pool: AdmissionDemand(1, 2, 30), now=world.clock)
    )
    samples = scrape(metrics)
    at = {"pool": "pool", "endpoint": first.id}
    assert value(samples, names.ROUTER_ENDPOINT_RUNNING, **at) == 3
    assert value(samples, names.ROUTER_ENDPOINT_KV_USAGE_PERC, **at) == 0.5
    assert value(samples, names.ROUTER_ENDPOINT_IN_FLIGHT, **at) == 4
    assert value(samples, names.ROUTER_ENDPOINT_SIGNAL_AGE_SECONDS, **at) == 2.0
    assert value(samples, names.ROUTER_INDEX_KEYS, **at) == 1
    assert len(only(samples, names.ROUTER_ENDPOINT_RUNNING)) == 1  # the other never told
    assert value(samples, names.ROUTER_ENDPOINTS, pool="pool", state="ready") == 1
    assert value(samples, names.ROUTER_ENDPOINTS, pool="pool", state="down") == 1
    assert value(samples, names.ROUTER_REQUESTS_HELD, pool="pool") == 1
    assert value(samples, names.ROUTER_QUEUE_SIZE, pool="pool") == 2
    assert value(samples, names.ROUTER_QUEUE_TOKENS, pool="pool") == 30
    assert value(samples, names.ROUTER_INDEX_MEMORY_BYTES) == index.memory_bytes


def test_every_name_of_the_protocol_is_emitted():
    """A dashboard may rely on any of them."""
    world = World(1)
    metrics = RouterMetrics(now=ManualClock())
    world.tell(world.endpoints[0], running=1)
    gauges = make_gauges(
        world.registry, ResidencyIndexOf(), lambda pool: AdmissionDemand(0, 0, 0), now=world.clock
    )
    metrics.add_source(gauges)
    metrics.add_source(make_connection_gauges(lambda: 1, lambda: 2))
    metrics.add_source(make_shadow_gauges(lambda: None))
    metrics.add_source(make_side_counters(SideKeeper(world.registry)))
    emitted = {family.name for family in metrics.collect()}
    wanted = {
        getattr(names, name)
        for name in dir(names)
        if name.startswith("ROUTER_") and name not in ("ROUTER_PREFIX", "ROUTER_PORT")
    }
    assert emitted == wanted


class ResidencyIndexOf:
    """Sizes only."""

    memory_bytes = 0

    def num_keys(self, slot: int) -> int:
        return 0
