"""TLS towards engines: their certificates are checked, and ours is shown to those who ask."""

from __future__ import annotations

import asyncio
import ssl
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest

from octavo_router.errors import ConfigInvalid
from tests.fakes.hasty import LONG, Mistaken, listening
from tests.fakes.http_client import RawClient, chat, post_bytes
from tests.fakes.router_rig import on_loop
from tests.fakes.upstream import CHAT, ScriptedUpstream
from tests.router.test_server import configuration, plain_server, running, until_ready

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path


@asynccontextmanager
async def tls_engine(folder: Path, *, asks: bool = False) -> AsyncIterator[ScriptedUpstream]:
    """A plain server behind TLS; `asks` clients for a certificate of the authority."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "server.pem", folder / "server.key")
    if asks:
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(folder / "ca.pem")
    engine = ScriptedUpstream(plain_server)
    server = await asyncio.start_server(engine._serve, "127.0.0.1", 0, ssl=context)
    engine.port = server.sockets[0].getsockname()[1]
    try:
        yield engine
    finally:
        server.close()
        for task in tuple(engine._tasks):
            task.cancel()
        await asyncio.gather(*engine._tasks, return_exceptions=True)


def text_for(*engines: ScriptedUpstream, **files: Path) -> str:
    urls = ", ".join(
        f"{{url: 'https://127.0.0.1:{engine.port}', names: [m]}}" for engine in engines
    )
    lines = [f"  {name}: {path}" for name, path in files.items()]
    return "\n".join(["discovery:", f"  upstreams: [{urls}]", *lines])


def ours(folder: Path) -> dict[str, Path]:
    return {"tls_cert": folder / "client.pem", "tls_key": folder / "client.key"}


@pytest.mark.parametrize("asks", [False, True], ids=["tls", "mutual tls"])
@on_loop
async def test_requests_and_polls_go_over_tls(certificates: Path, asks: bool):
    async with tls_engine(certificates, asks=asks) as engine:
        shown = ours(certificates) if asks else {}
        text = text_for(engine, tls_ca=certificates / "ca.pem", **shown)
        async with (
            running(configuration(text=text)) as (app, server),
            await RawClient.open(server.port) as client,
        ):
            await until_ready(app)
            assert [one.state for one in app.registry.endpoints.values()] == ["ready"]
            assert (await client.ask(chat())).json == CHAT
            assert (await client.ask(chat(stream=True))).body.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("lacking", ["authority", "certificate"])
@on_loop
async def test_without_the_authority_or_our_certificate_nothing_is_sent(
    certificates: Path, lacking: str
):
    async with tls_engine(certificates, asks=lacking == "certificate") as engine:
        files = {} if lacking == "authority" else {"tls_ca": certificates / "ca.pem"}
        text = text_for(engine, **files) + "\nflow: {hold_timeout_s: 0.05}"
        async with (
            running(configuration(text=text)) as (_, server),
            await RawClient.open(server.port) as client,
        ):
            assert (await client.ask(chat())).status == 503
            assert engine.requests == []


@on_loop
async def test_an_engine_that_comes_later_is_not_spoken_to_in_clear(certificates: Path):
    """The router began without any https engine, so without a thought of TLS."""
    async with ScriptedUpstream(plain_server) as plain, tls_engine(certificates) as engine:
        later = configuration(text=text_for(engine) + "\nflow: {hold_timeout_s: 0.05}")
        async with (
            running(configuration(plain.port), load=lambda: later) as (app, server),
            await RawClient.open(server.port) as client,
        ):
            await until_ready(app)
            await app.reload()
            while [one.spec.address.tls for one in app.registry.endpoints.values()] != [True]:  # noqa: ASYNC110
                await asyncio.sleep(0.002)
            [endpoint] = app.registry.endpoints.values()
            app.registry.report(endpoint, "ready")
            assert (await client.ask(chat())).status == 503  # its authority is nobody we know
            assert engine.requests == []


@on_loop
async def test_what_waits_behind_the_encryption_spoils_a_connection_too(certificates: Path):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates / "server.pem", certificates / "server.key")
    async with listening(Mistaken(), context) as engine:
        url = f"https://127.0.0.1:{engine.port}"
        text = (
            f"discovery: {{upstreams: [{{url: '{url}', names: [m]}}], "
            f"tls_ca: {certificates}/ca.pem}}"
        )
        async with (
            running(configuration(text=text)) as (app, server),
            await RawClient.open(server.port) as client,
        ):
            await app._discovery.synced()
            [endpoint] = app.registry.endpoints.values()
            app.registry.report(endpoint, "ready")
            await client.send(post_bytes(chat("x" * LONG)))
            assert (await client.answer()).json == CHAT
            assert app.upstreams.of(endpoint).pool.num_open == 0


def test_a_certificate_that_cannot_be_read_is_named(tmp_path: Path):
    missing = tmp_path / "none.pem"

    async def start() -> None:
        text = f"discovery: {{tls_ca: {missing}, upstreams: [{{url: 'https://127.0.0.1:1'}}]}}"
        async with running(configuration(text=text)):
            pass

    with pytest.raises(ConfigInvalid, match=r"none\.pem"):
        asyncio.run(start())
