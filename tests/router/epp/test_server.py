"""The picker's port: health, TLS, and how it opens and closes."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys

import grpc
import pytest

from octavo_router.app import App
from octavo_router.config.load import load_config
from octavo_router.epp.build import make_server
from octavo_router.epp.server import PROCESS, SERVICE
from octavo_router.errors import ConfigInvalid
from tests.fakes.envoy import Gateway, picking
from tests.fakes.router_rig import on_loop
from tests.fakes.upstream import ScriptedUpstream

CHECK, WATCH = "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"
SERVING, NOT_SERVING, SERVICE_UNKNOWN = b"\x08\x01", b"\x08\x02", b"\x08\x03"
BODY = json.dumps({"model": "model", "messages": [{"role": "user", "content": "hi"}]}).encode()


def named(service):
    name = service.encode()
    return b"\x0a" + bytes([len(name)]) + name if name else b""


@on_loop
async def test_liveness_holds_while_readiness_waits_for_data():
    async with picking(1) as rig:
        check = rig.channel.unary_unary(CHECK)
        for ready, expected in ((False, NOT_SERVING), (True, SERVING)):
            rig.is_ready = ready
            assert await check(named("liveness")) == SERVING
            for service in ("", "readiness", SERVICE):
                assert await check(named(service)) == expected
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await check(named("other"))
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await check(b"\x0a\x50")
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@on_loop
async def test_who_watches_hears_of_changes(monkeypatch):
    monkeypatch.setattr("octavo_router.epp.health._LOOK_S", 0.005)
    async with picking(1) as rig:
        rig.is_ready = False
        call = rig.channel.unary_stream(WATCH)(named("readiness"))
        assert await call.read() == NOT_SERVING
        rig.is_ready = True
        assert await call.read() == SERVING
        unknown = rig.channel.unary_stream(WATCH)(named("other"))
        assert await unknown.read() == SERVICE_UNKNOWN


@on_loop
async def test_methods_that_are_not_there_are_unimplemented():
    async with picking(1) as rig:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await rig.channel.unary_unary(f"/{SERVICE}/Other")(b"")
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


@on_loop
async def test_streams_under_way_may_finish_when_it_ends():
    async with picking(1) as rig:
        gateway = rig.open()
        await gateway.post(BODY)
        stopping = asyncio.create_task(rig.server.stop(10.0))
        late = rig.open()
        with pytest.raises((grpc.aio.AioRpcError, AssertionError, asyncio.InvalidStateError)):
            await late.post(BODY)
            await late.body()
        assert await gateway.body() == BODY
        await gateway.response([b"{}"])
        await gateway.leave()
        await stopping
        assert ("pod-0", "ok") in rig.leases.results


def self_signed(folder):
    cert, key = folder / "cert.pem", folder / "key.pem"
    subprocess.run(
        [
            "openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1",
            "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1",
            "-keyout", str(key), "-out", str(cert),
        ],
        check=True,
        capture_output=True,
    )  # fmt: skip
    return cert, key


def test_it_speaks_tls_with_a_certificate(tmp_path):
    cert, key = self_signed(tmp_path)

    @on_loop
    async def run():
        async with picking(1, tls_cert=str(cert), tls_key=str(key)) as rig:
            credentials = grpc.ssl_channel_credentials(cert.read_bytes())
            where = f"localhost:{rig.server.port}"
            async with (
                grpc.aio.secure_channel(where, credentials) as channel,
                Gateway(channel.stream_stream(PROCESS)()) as gateway,
            ):
                await gateway.post(BODY)
                assert await gateway.body() == BODY

    run()


def test_a_new_certificate_is_taken_without_a_restart(tmp_path):
    cert, key = self_signed(tmp_path)
    old = cert.read_bytes()

    @on_loop
    async def run():
        async with picking(1, tls_cert=str(cert), tls_key=str(key)) as rig:

            async def check(trusted):
                credentials = grpc.ssl_channel_credentials(trusted)
                options = [("grpc.use_local_subchannel_pool", 1)]
                async with grpc.aio.secure_channel(
                    f"localhost:{rig.server.port}", credentials, options
                ) as channel:
                    return await channel.unary_unary(CHECK)(b"", timeout=60.0)

            assert await check(old) == SERVING
            await asyncio.to_thread(key.write_text, "")  # half of the change
            assert await check(old) == SERVING
            await asyncio.to_thread(self_signed, tmp_path)
            assert await check(await asyncio.to_thread(cert.read_bytes)) == SERVING
            with pytest.raises(grpc.aio.AioRpcError):
                await check(old)

    run()


def test_a_client_authority_lets_only_its_own_in(tmp_path):
    cert, key = self_signed(tmp_path)

    @on_loop
    async def run():
        async with picking(1, tls_cert=str(cert), tls_key=str(key), tls_client_ca=str(cert)) as rig:
            where = f"localhost:{rig.server.port}"
            anonymous = grpc.ssl_channel_credentials(cert.read_bytes())
            async with grpc.aio.secure_channel(where, anonymous) as channel:
                with pytest.raises(grpc.aio.AioRpcError):
                    await channel.unary_unary(CHECK)(b"", timeout=5.0)
            known = grpc.ssl_channel_credentials(
                cert.read_bytes(), key.read_bytes(), cert.read_bytes()
            )
            async with grpc.aio.secure_channel(where, known) as channel:
                assert await channel.unary_unary(CHECK)(b"", timeout=60.0) == SERVING

    run()


@on_loop
async def test_a_certificate_that_cannot_be_read_is_named(tmp_path):
    missing = str(tmp_path / "none.pem")
    with pytest.raises(ConfigInvalid, match=r"epp\.tls_key: cannot read .*none\.pem"):
        async with picking(1, tls_cert=missing, tls_key=missing):
            pass
    empty = tmp_path / "empty.pem"
    empty.write_text("")
    with pytest.raises(ConfigInvalid, match="is no PEM file"):
        async with picking(1, tls_cert=str(empty), tls_key=str(empty)):
            pass


@on_loop
async def test_a_port_that_is_taken_is_named():
    async with picking(1) as rig:
        text = f"epp: {{enabled: true, port: {rig.server.port}}}\nserver: {{host: 127.0.0.1}}"
        config = load_config(text=text, flags={"upstreams": "http://127.0.0.1:1"})
        with pytest.raises(ConfigInvalid, match=r"epp\.port: cannot listen on 127\.0\.0\.1"):
            async with App(config):
                pass


def test_half_a_certificate_is_refused():
    with pytest.raises(ConfigInvalid, match=r"epp\.tls_key: certificate and key belong together"):
        load_config(flags={"epp-tls-cert": "x.pem"})


def test_without_grpc_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "grpc", None)
    monkeypatch.setattr("octavo_router.epp.build.find_spec", lambda name: None)
    with pytest.raises(ConfigInvalid, match=r"pip install grpcio"):
        make_server(None)  # type: ignore[arg-type]  # it does not get that far


async def plain_server(peer, request):
    if request.line.split(b" ")[1] == b"/v1/models":
        await peer.answer(b'{"object": "list", "data": [{"id": "model", "object": "model"}]}')
    else:
        await peer.answer(b"{}", status="404 Not Found")


@on_loop
async def test_the_router_serves_it_beside_its_own_port():
    async with ScriptedUpstream(plain_server) as upstream:
        config = load_config(
            text="server: {host: 127.0.0.1, access_log: none, drain_timeout_s: 0.1}\n"
            "epp: {enabled: true, port: 0}",
            flags={"upstreams": f"http://127.0.0.1:{upstream.port}"},
        )
        async with App(config) as app:
            assert app.picker is not None
            channel = grpc.aio.insecure_channel(f"127.0.0.1:{app.picker.port}")
            check = channel.unary_unary(CHECK)
            assert await check(named("liveness")) == SERVING
            while await check(b"") != SERVING:  # noqa: ASYNC110  # as a probe does
                await asyncio.sleep(0.01)
            (endpoint,) = app.registry.endpoints.values()
            async with Gateway(channel.stream_stream(PROCESS)()) as gateway:
                answer = await gateway.post(BODY)
                assert answer.destinations == [f"127.0.0.1:{upstream.port}"]
                assert endpoint.in_flight == 1
            app.begin_draining()
            assert await check(b"") == NOT_SERVING
            assert endpoint.in_flight == 0
            assert b'route="/v1/chat/completions"' in app.metrics.render()[0]
            await channel.close()
