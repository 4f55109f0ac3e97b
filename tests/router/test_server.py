"""The router as a process sees it: ready when it knows its engines, gone when its work is done."""

from __future__ import annotations

import asyncio
import json
import ssl
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest

from octavo_router.app import App
from octavo_router.config.load import load_config
from octavo_router.errors import ConfigInvalid
from octavo_router.http.sockets import open_listener
from octavo_router.server import Server
from tests.fakes.http_client import RawClient, chat
from tests.fakes.router_rig import on_loop
from tests.fakes.upstream import Peer, Received, ScriptedUpstream, event, fixed

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from octavo_router.config.settings import RouterConfig

MODELS = {"object": "list", "data": [{"id": "m", "object": "model", "owned_by": "x"}]}


async def plain_server(peer: Peer, request: Received) -> None:
    """A server of another make: models, no stream of load, no metrics."""
    path = request.line.split(b" ")[1]
    if path == b"/v1/models":
        await peer.answer(json.dumps(MODELS).encode())
    elif path == b"/v1/chat/completions":
        await fixed(peer, request)
    else:
        await peer.answer(b"{}", status="404 Not Found")


def configuration(*ports: int, text: str = "", **flags: str) -> RouterConfig:
    upstreams = ",".join(f"http://127.0.0.1:{port}" for port in ports)
    given = {name.replace("_", "-"): value for name, value in flags.items()}
    if ports:
        given["upstreams"] = upstreams
    return load_config(text=text, flags={"access-log": "none", **given})


@asynccontextmanager
async def running(
    config: RouterConfig, *, load: Callable[[], RouterConfig] | None = None
) -> AsyncIterator[tuple[App, Server]]:
    async with App(config, load=load) as app:
        server = Server(app, listener=open_listener("127.0.0.1", 0))
        await server.start()
        try:
            yield app, server
        finally:
            await server.stop()


async def until_ready(app: App) -> None:
    while app.own.not_ready:  # noqa: ASYNC110  # a fact without an event
        await asyncio.sleep(0.002)


@on_loop
async def test_it_is_ready_when_it_has_heard_from_its_engines_and_routes_to_them():
    async with (
        ScriptedUpstream(plain_server) as upstream,
        running(configuration(upstream.port)) as (app, server),
        await RawClient.open(server.port) as client,
    ):
        assert (await client.get("/health")).status == 200
        await until_ready(app)
        assert (await client.get("/ready")).status == 200
        assert [card["id"] for card in (await client.get("/v1/models")).json["data"]] == ["m"]
        assert (await client.get("/v1/models/m")).json["id"] == "m"
        assert (await client.get("/v1/models/n")).code == "model_not_found"
        anthropic = "anthropic-version: 2023-06-01\r\n"
        page = (await client.get("/v1/models", more=anthropic)).json
        assert (page["first_id"], page["last_id"], page["has_more"]) == ("m", "m", False)
        (card,) = page["data"]
        assert (card["type"], card["id"], card["display_name"]) == ("model", "m", "m")
        assert (await client.get("/v1/models/m", more=anthropic)).json == card
        assert (await client.ask(chat())).status == 200
        metrics = (await client.get("/metrics")).body.decode()
        assert 'octavo_router_requests_total{code="200"' in metrics
        state = (await client.get("/octavo/v1/state")).json
        assert [endpoint["state"] for endpoint in state["endpoints"]] == ["ready"]


@on_loop
async def test_keys_are_asked_for_where_there_are_any():
    text = "flow: {keys: [{tenant: a, key: secret}]}"
    async with (
        ScriptedUpstream(plain_server) as upstream,
        running(configuration(upstream.port, text=text)) as (app, server),
        await RawClient.open(server.port) as client,
    ):
        await until_ready(app)
        assert (await client.get("/health")).status == 200
        assert (await client.get("/v1/models")).code == "missing_api_key"
        assert (await client.ask(chat())).status == 401
        wrong = await client.ask(chat(), more="authorization: Bearer wrong\r\n")
        assert (wrong.status, wrong.code) == (401, "invalid_api_key")
        assert wrong.header("www-authenticate") == "Bearer"
        for header in ("authorization: Bearer secret", "x-api-key: secret"):
            assert (await client.ask(chat(), more=f"{header}\r\n")).status == 200
        requested = [r for r in upstream.requests if r.line.startswith(b"POST")]
        assert len(requested) == 2
        assert {r.header("authorization") or r.header("x-api-key") for r in requested} == {None}


@on_loop
async def test_it_drains_readiness_first_then_what_is_under_way_then_itself():
    go_on = asyncio.Event()

    async def slow(peer: Peer, request: Received) -> None:
        if not request.line.startswith(b"POST"):
            return await plain_server(peer, request)
        await peer.begin_stream()
        await peer.chunk(event("hel"))
        await go_on.wait()
        await peer.chunk(event("lo") + b"data: [DONE]\n\n")
        return await peer.end_stream()

    text = "server: {accept_while_draining_s: 0.2, drain_timeout_s: 10}"
    async with (
        ScriptedUpstream(slow) as upstream,
        running(configuration(upstream.port, text=text)) as (app, server),
        await RawClient.open(server.port) as client,
        await RawClient.open(server.port) as idle,
    ):
        port = server.port
        await until_ready(app)
        assert (await idle.get("/ready")).status == 200
        await client.post(chat(stream=True))
        await client.head()
        assert await client.chunk() == event("hel")

        draining = asyncio.create_task(server.drain())
        await asyncio.sleep(0)
        async with await RawClient.open(server.port) as late:  # still accepted for a while
            answer = await late.get("/ready")
            assert (answer.status, answer.json) == (503, {"status": "draining"})
            assert answer.header("connection") == "close"
        assert await idle.ended() == b""
        assert not draining.done()
        go_on.set()
        assert await client.chunk() == event("lo") + b"data: [DONE]\n\n"
        assert await client.chunk() == b""
        assert await client.ended() == b""
        await draining
        with pytest.raises(ConnectionRefusedError):
            await RawClient.open(port)


@on_loop
async def test_what_does_not_end_in_time_is_told_so():
    async def endless(peer: Peer, request: Received) -> None:
        if not request.line.startswith(b"POST"):
            return await plain_server(peer, request)
        await peer.begin_stream()
        await peer.chunk(event("hel"))
        return await peer.left()

    text = "server: {accept_while_draining_s: 0, drain_timeout_s: 0.1}"
    async with (
        ScriptedUpstream(endless) as upstream,
        running(configuration(upstream.port, text=text)) as (app, server),
        await RawClient.open(server.port) as client,
    ):
        await until_ready(app)
        await client.post(chat(stream=True))
        await client.head()
        assert await client.chunk() == event("hel")
        await server.drain()
        assert b'"code": "server_shutdown"' in await client.chunk()
        assert await client.chunk() == b""


@on_loop
async def test_a_configuration_is_read_again_and_a_bad_one_changes_nothing():
    async with ScriptedUpstream(plain_server) as one, ScriptedUpstream(plain_server) as two:
        files = [configuration(two.port)]

        def load() -> RouterConfig:
            if not files:
                raise ConfigInvalid("routing.policy", "no such policy")
            return files.pop()

        async with (
            running(configuration(one.port), load=load) as (app, server),
            await RawClient.open(server.port) as client,
        ):
            await until_ready(app)
            assert await app.reload() == ["discovery.upstreams"]
            url = f"http://127.0.0.1:{two.port}"
            while [e.id for e in app.registry.routable("default")] != [url]:  # noqa: ASYNC110
                await asyncio.sleep(0.002)
            answer = await client.ask(chat())
            assert answer.header("x-served-by") == f"127.0.0.1:{two.port}"
            with pytest.raises(ConfigInvalid):
                await app.reload()
            assert (await client.ask(chat())).status == 200


@on_loop
async def test_clients_with_a_certificate_of_the_authority_come_in_over_tls(certificates: Path):
    text = f"""
server:
  tls_cert: {certificates}/server.pem
  tls_key: {certificates}/server.key
  tls_client_ca: {certificates}/ca.pem
"""
    async with (
        ScriptedUpstream(plain_server) as upstream,
        running(configuration(upstream.port, text=text)) as (app, server),
    ):
        await until_ready(app)
        context = ssl.create_default_context(cafile=f"{certificates}/ca.pem")
        context.load_cert_chain(f"{certificates}/client.pem", f"{certificates}/client.key")
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", server.port, ssl=context, server_hostname="localhost"
        )
        async with RawClient(reader, writer) as client:
            assert (await client.ask(chat())).status == 200
            assert (await client.ask(chat(stream=True))).body.endswith(b"data: [DONE]\n\n")
        server.renew_certificate(app.config.server)

        nobody = ssl.create_default_context(cafile=f"{certificates}/ca.pem")
        with pytest.raises((ssl.SSLError, ConnectionError, asyncio.IncompleteReadError)):
            reader, writer = await asyncio.open_connection(
                "127.0.0.1", server.port, ssl=nobody, server_hostname="localhost"
            )
            await reader.readexactly(1)


@on_loop
async def test_a_pages_name_does_not_lead_to_a_router_on_this_machine():
    async with (
        ScriptedUpstream(plain_server) as upstream,
        running(configuration(upstream.port, allowed_hosts="proxy.example")) as (app, server),
    ):
        await until_ready(app)
        hosts = {
            "evil.example": 403, f"evil.example:{server.port}": 403, "localhost.evil.example": 403,
            "localhost": 200, "127.0.0.1:1": 200, "[::1]": 200, "proxy.example:80": 200,
        }  # fmt: skip
        for host, status in hosts.items():
            async with await RawClient.open(server.port) as client:
                await client.send(f"GET /v1/models HTTP/1.1\r\nhost: {host}\r\n\r\n".encode())
                assert (await client.answer()).status == status
        async with await RawClient.open(server.port) as client:
            await client.send(b"GET /v1/models HTTP/1.0\r\n\r\n")
            assert (await client.answer()).status == 200
        async with await RawClient.open(server.port) as client:
            line = b"GET http://evil.example/v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n"
            await client.send(line)
            assert (await client.answer()).code == "host_not_allowed"


@on_loop
async def test_a_reload_leaves_nothing_behind():
    async with (
        ScriptedUpstream(plain_server) as upstream,
        running(configuration(upstream.port)) as (app, server),
    ):
        await until_ready(app)
        before = len(server._tasks)
        for _ in range(5):
            server._reload()
        await asyncio.sleep(0)
        while len(server._tasks) > before:  # noqa: ASYNC110  # facts have no events
            await asyncio.sleep(0.001)
