"""Every part is connected: what one of them learns reaches those who are to know it."""

from __future__ import annotations

import asyncio
import json
import time
from typing import TYPE_CHECKING

import pytest

from octavo_common.clock_watch import ClockWatch
from octavo_router import app as router_app
from octavo_router.discovery.source import PoolRoute
from octavo_router.errors import ConfigInvalid
from octavo_router.metrics import router_metrics
from tests.fakes.facts import until
from tests.fakes.http_client import RawClient, chat
from tests.fakes.router_rig import on_loop
from tests.fakes.upstream import Peer, Received, ScriptedUpstream, closed_port, event
from tests.router.test_server import configuration, plain_server, running, until_ready

if TYPE_CHECKING:
    from octavo_router.app import App
    from octavo_router.config.settings import RouterConfig
    from octavo_router.metrics.record import RequestRecord

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


class Lines:
    """An access log that keeps its records."""

    takes_all = True

    def __init__(self, app: App) -> None:
        self.all: list[RequestRecord] = []
        app.proxy._access_log = self

    def write(self, record: RequestRecord) -> None:
        self.all.append(record)


async def metric(client: RawClient, name: str) -> dict[str, float]:
    """Samples of this name, by what stands in their braces."""
    text = (await client.get("/metrics")).body.decode()
    found = {}
    for line in text.splitlines():
        if line.startswith((f"{name} ", f"{name}{{")):
            labels, _, value = line.removeprefix(name).rpartition(" ")
            found[labels.strip("{}")] = float(value)
    return found


@on_loop
async def test_spans_reach_the_collector_and_the_engine_hangs_below_them():
    trace_service = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")

    async def collector(peer: Peer, request: Received) -> None:
        await peer.answer(b"")

    async with ScriptedUpstream(collector) as otlp, ScriptedUpstream(plain_server) as upstream:
        text = f"tracing: {{endpoint: 'http://127.0.0.1:{otlp.port}'}}"
        async with (
            running(configuration(upstream.port, text=text)) as (app, server),
            await RawClient.open(server.port) as client,
        ):
            await until_ready(app)
            more = f"traceparent: 00-{TRACE}-{SPAN}-01\r\n"
            assert (await client.ask(chat("secret words"), more=more)).status == 200
            [requested] = [one for one in upstream.requests if one.line.startswith(b"POST")]
        [export] = otlp.requests
    assert b"secret words" not in export.body
    reported = trace_service.ExportTraceServiceRequest.FromString(export.body)
    [resource] = reported.resource_spans
    names = {pair.key: pair.value.string_value for pair in resource.resource.attributes}
    assert names["service.name"] == "octavo-router" and names["service.version"]
    spans = {span.name: span for scope in resource.scope_spans for span in scope.spans}
    attempt = f"attempt 1 127.0.0.1:{upstream.port}"
    assert set(spans) == {"POST /v1/chat/completions", "route", attempt}
    assert {span.trace_id.hex() for span in spans.values()} == {TRACE}
    assert spans["POST /v1/chat/completions"].parent_span_id.hex() == SPAN
    assert requested.header("traceparent") == f"00-{TRACE}-{spans[attempt].span_id.hex()}-01"


@on_loop
async def test_debug_shows_decisions_only_where_it_is_switched_on():
    async with ScriptedUpstream(plain_server) as upstream:
        for text, status in (("", 404), ("server: {debug_endpoints: true}", 200)):
            config = configuration(upstream.port, text=f"{text}\nrouting: {{sample_every: 1}}")
            async with (
                running(config) as (app, server),
                await RawClient.open(server.port) as client,
            ):
                await until_ready(app)
                await client.ask(chat())
                answer = await client.get("/debug/decisions")
                assert answer.status == status
        assert [one["endpoint"] for one in answer.json["decisions"]] == [
            f"http://127.0.0.1:{upstream.port}"
        ]


@on_loop
async def test_administrators_have_a_listener_of_their_own_where_it_is_asked_for():
    port = closed_port()
    text = f"server: {{debug_endpoints: true, admin_port: {port}}}\nrouting: {{sample_every: 1}}"
    async with (
        ScriptedUpstream(plain_server) as upstream,
        running(configuration(upstream.port, text=text)) as (app, server),
        await RawClient.open(server.port) as client,
        await RawClient.open(server.admin_port) as admin,
    ):
        await until_ready(app)
        assert server.admin_port == port
        for path in ("/metrics", "/debug/decisions"):
            assert (await client.get(path)).code == "route_not_found"
            assert (await admin.get(path)).status == 200
        for path in ("/health", "/ready", "/octavo/v1/state", "/version"):
            assert (await admin.get(path)).status == 200
        assert (await admin.ask(chat())).code == "route_not_found"
        async with await RawClient.open(server.admin_port) as page:
            answer = await page.get("/metrics", more="origin: https://evil.example\r\n")
            assert answer.status == 403
        assert (await client.ask(chat())).status == 200


@on_loop
async def test_an_admin_key_closes_what_looks_inside():
    text = "server: {debug_endpoints: true, admin_key: secret}\nrouting: {sample_every: 1}"
    async with (
        ScriptedUpstream(plain_server) as upstream,
        running(configuration(upstream.port, text=text)) as (app, server),
        await RawClient.open(server.port) as client,
    ):
        await until_ready(app)
        shown = "x-octavo-admin-key: secret\r\n"
        for path in ("/metrics", "/debug/decisions", "/octavo/v1/state"):
            assert (await client.get(path)).code == "admin_key_required"
            assert (await client.get(path, more=shown)).status == 200
            assert (await client.get(path, more="authorization: Bearer secret\r\n")).status == 200
        explain = "x-octavo-explain: 1\r\n"
        refused = await client.ask(chat(), more=explain)
        assert (refused.status, refused.code) == (403, "admin_key_required")
        reported = await client.ask(chat(), more=explain + shown)
        assert reported.header("x-octavo-explain")
        assert upstream.requests[-1].header("x-octavo-admin-key") is None
        assert (await client.ask(chat())).header("x-octavo-explain") is None


@on_loop
async def test_a_tenants_key_does_not_tell_what_others_have_asked():
    text = """
flow:
  keys: [{tenant: a, key: a}, {tenant: ours, key: ours, trusted: true}]
server: {debug_endpoints: true, admin_key: secret}
"""
    async with (
        ScriptedUpstream(plain_server) as upstream,
        running(configuration(upstream.port, text=text)) as (app, server),
        await RawClient.open(server.port) as client,
    ):
        await until_ready(app)
        for key, status in (("a", 403), ("ours", 200)):
            shown = f"authorization: Bearer {key}\r\n"
            for path in ("/metrics", "/debug/decisions", "/octavo/v1/state"):
                assert (await client.get(path, more=shown)).status == status
            explained = await client.ask(chat(), more=shown + "x-octavo-explain: 1\r\n")
            assert explained.status == status


@on_loop
async def test_what_happens_is_counted():
    async def two_words(peer: Peer, request: Received) -> None:
        if not request.line.startswith(b"POST"):
            return await plain_server(peer, request)
        await peer.begin_stream()
        for word in ("hel", "lo"):
            await peer.chunk(event(word))
            await go_on.acquire()
        usage = {
            "prompt_tokens": 9, "completion_tokens": 2, "total_tokens": 11,
            "prompt_tokens_details": {"cached_tokens": 4},
        }  # fmt: skip
        await peer.chunk(
            b"data: " + json.dumps({"choices": [], "usage": usage}).encode()
            + b"\n\ndata: [DONE]\n\n"
        )  # fmt: skip
        return await peer.end_stream()

    go_on = asyncio.Semaphore(0)
    text = "routing: {shadows: [round-robin], sample_every: 1}"
    async with (
        ScriptedUpstream(two_words) as upstream,
        running(configuration(upstream.port, text=text)) as (app, server),
        await RawClient.open(server.port) as client,
        await RawClient.open(server.port) as watcher,
    ):
        await until_ready(app)
        lines = Lines(app)
        await client.post(chat(stream=True))
        await client.head()
        for _ in range(2):
            await client.chunk()
            go_on.release()
        while await client.chunk():
            pass
        [record] = lines.all
        assert (record.client, record.outcome) == ("127.0.0.1", "ok")
        assert (record.prompt_tokens, record.output_tokens, record.cached_tokens) == (9, 2, 4)
        pool = 'pool="default"'
        itl = await metric(watcher, "octavo_router_inter_token_latency_seconds_count")
        assert itl == {pool: 2.0}
        assert await metric(watcher, "octavo_router_prefix_cached_tokens_total") == {pool: 4.0}
        assert await metric(watcher, "octavo_router_client_connections") == {"": 2.0}
        assert await metric(watcher, "octavo_router_upstream_connections") == {"": 1.0}
        [labels] = await metric(watcher, "octavo_router_info")
        assert labels == f'version="{app.metrics.version}"' and app.metrics.version
        shadows = await metric(watcher, "octavo_router_shadow_picks_total")
        assert sum(shadows.values()) == 1.0


@on_loop
async def test_each_request_has_one_line_however_it_ended():
    """Relayed, refused at once, not understood, not found: one each."""

    async def sometimes(peer: Peer, request: Received) -> None:
        if b"leave" in request.body:
            peer.reset()
        else:
            await plain_server(peer, request)

    async with (
        ScriptedUpstream(sometimes) as upstream,
        running(configuration(upstream.port)) as (app, server),
        await RawClient.open(server.port) as client,
    ):
        await until_ready(app)
        lines = Lines(app)
        requested = 0
        for body, path in (
            (chat(), "/v1/chat/completions"),
            (chat(stream=True), "/v1/chat/completions"),
            (chat("leave"), "/v1/chat/completions"),
            (chat(model="other"), "/v1/chat/completions"),
            (b"{", "/v1/chat/completions"),
            (chat(), "/v1/nothing"),
        ):
            answer = await client.ask(body, path)
            requested += 1
            while len(lines.all) < requested:  # noqa: ASYNC110  # a stream's comes with its last byte
                await asyncio.sleep(0)
            record = lines.all[-1]
            assert (record.status, record.client) == (answer.status, "127.0.0.1")
            assert record.request_id == answer.header("x-request-id")
        assert len(lines.all) == requested
        total = await metric(client, "octavo_router_requests_total")
        assert sum(total.values()) == requested
        assert len({record.request_id for record in lines.all}) == requested


@on_loop
async def test_how_long_requests_are_held_is_the_pools_own_affair():
    async with (
        ScriptedUpstream(plain_server) as upstream,
        running(configuration(upstream.port)) as (app, server),
        await RawClient.open(server.port) as client,
    ):
        await until_ready(app)
        app._take_pool_routes({"far": PoolRoute("far", names=("n",), hold_s=0.05)})
        answer = await client.ask(chat(model="n"))  # the setting for all others is 30 s
        assert (answer.status, answer.code) == (503, "no_endpoints")
        assert answer.header("retry-after")


@on_loop
async def test_a_request_waits_until_its_engine_was_heard_from():
    may_tell = asyncio.Event()

    async def slow_to_tell(peer: Peer, request: Received) -> None:
        await may_tell.wait()
        await plain_server(peer, request)

    async with (
        ScriptedUpstream(slow_to_tell) as upstream,
        running(configuration(upstream.port)) as (app, server),
        await RawClient.open(server.port) as client,
    ):
        while not app.registry.endpoints:  # noqa: ASYNC110  # a fact without an event
            await asyncio.sleep(0.002)
        await client.post(chat())
        while not app.gate.demand("default").held:  # noqa: ASYNC110
            await asyncio.sleep(0.002)
        may_tell.set()
        assert (await client.answer()).status == 200


@on_loop
async def test_what_pools_want_is_merged_one_by_one():
    async with (
        ScriptedUpstream(plain_server) as upstream,
        running(configuration(upstream.port)) as (app, _),
    ):
        app._take_pool_routes(
            {
                "a": PoolRoute("a", names=("shared", "m"), policy="least-load"),
                "b": PoolRoute("b", names=("shared",), policy="from-the-future"),
            }
        )
        policies = app.dispatcher.policies
        assert [policies.of(pool).name for pool in "ab"] == ["least-load", "prefix-load"]
        pools = {
            app.models.resolve("shared", request_id=f"r{number}", session="").pool
            for number in range(64)
        }
        assert pools == {"a", "b"}


@on_loop
async def test_a_pool_that_refuses_nearly_all_is_spared_most():
    async def full(peer: Peer, request: Received) -> None:
        if request.line.startswith(b"POST"):
            await peer.answer(b"{}", status="503 Service Unavailable", more="retry-after: 0\r\n")
        else:
            await plain_server(peer, request)

    def num_requests() -> int:
        return sum(one.line.startswith(b"POST") for one in upstream.requests)

    async with (
        ScriptedUpstream(full) as upstream,
        running(configuration(upstream.port)) as (app, server),
        await RawClient.open(server.port) as client,
    ):
        await until_ready(app)
        for _ in range(40):
            assert (await client.ask(chat())).status == 503
        app.gate.tick()
        requested = num_requests()
        answers = [await client.ask(chat()) for _ in range(40)]
        assert {answer.status for answer in answers} == {503}
        assert all(answer.header("retry-after") for answer in answers)
        assert num_requests() - requested < 10


@on_loop
async def test_reading_a_bad_configuration_is_counted():
    def load() -> RouterConfig:
        raise ConfigInvalid("routing.policy", "no such policy")

    async with (
        ScriptedUpstream(plain_server) as upstream,
        running(configuration(upstream.port), load=load) as (app, server),
        await RawClient.open(server.port) as client,
    ):
        with pytest.raises(ConfigInvalid):
            await app.reload()
        reloads = await metric(client, "octavo_router_config_reloads_total")
        assert reloads == {'outcome="failed"': 1.0}


@pytest.mark.slow
@on_loop
async def test_a_hundred_reloads_under_load_lose_nothing():
    """Another order of upstreams, another policy, now and then a bad file."""
    async with ScriptedUpstream(plain_server) as one, ScriptedUpstream(plain_server) as two:
        turns = 0

        def load() -> RouterConfig:
            nonlocal turns
            turns += 1
            if turns % 10 == 0:
                raise ConfigInvalid("routing.policy", "no such policy")
            ports = [(one.port, two.port), (one.port,), (two.port, one.port)][turns % 3]
            policy = ("prefix-load", "least-load", "random")[turns % 3]
            return configuration(*ports, text=f"routing: {{policy: {policy}}}")

        async with running(configuration(one.port), load=load) as (app, server):
            await until_ready(app)
            is_over = False
            statuses: list[int] = []

            async def ask(stream: bool) -> None:
                async with await RawClient.open(server.port) as client:
                    while not is_over:
                        answer = await client.ask(chat(stream=stream))
                        statuses.append(answer.status)
                        assert not stream or answer.body.endswith(b"data: [DONE]\n\n")

            clients = [asyncio.create_task(ask(bool(number % 2))) for number in range(8)]
            failed = 0
            for _ in range(100):
                try:
                    await app.reload()
                except ConfigInvalid:
                    failed += 1
                seen = len(statuses)
                while len(statuses) < seen + 8:  # noqa: ASYNC110  # between any two of them
                    await asyncio.sleep(0.001)
            is_over = True
            await asyncio.gather(*clients)
            assert set(statuses) == {200} and len(statuses) > 800
            assert failed == 10
            assert app.metrics.process.config_reloads == {("ok",): 90, ("failed",): 10}


@on_loop
async def test_a_loop_that_stood_still_is_counted(monkeypatch):
    monkeypatch.setattr(router_metrics, "STALL_S", 0.05)
    async with (
        ScriptedUpstream(plain_server) as upstream,
        running(configuration(upstream.port)) as (app, _),
    ):
        await until(lambda: app.metrics.loop_lag.count >= 5)
        before = app.metrics.process.loop_stalls
        time.sleep(0.3)  # noqa: ASYNC251  # the mistake
        await until(lambda: app.metrics.process.loop_stalls > before)
        assert app.metrics.loop_lag.sum >= 0.1


@on_loop
async def test_a_clock_that_was_set_is_counted_and_logged(monkeypatch, caplog):
    """By a look each second; requests go on."""
    assert router_app._TICK_S <= 1.0
    monkeypatch.setattr(router_app, "_TICK_S", 0.01)
    offset_s = 0.0
    async with (
        ScriptedUpstream(plain_server) as upstream,
        running(configuration(upstream.port)) as (app, server),
        await RawClient.open(server.port) as client,
    ):
        await until_ready(app)
        assert await metric(client, "octavo_router_clock_jumps_total") == {"": 0.0}
        app.clock = ClockWatch(wall=lambda: time.time() + offset_s)
        app.clock.look()
        offset_s = -3600.0
        await until(lambda: app.metrics.process.clock_jumps == 1)
        assert "The clock was set" in [record.message for record in caplog.records]
        assert await metric(client, "octavo_router_clock_jumps_total") == {"": 1.0}
        assert (await client.ask(chat())).status == 200
