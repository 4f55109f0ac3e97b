"""Engine pods that serve HTTPS: found by Kubernetes, checked by the name of their Service."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import ssl
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest

from octavo_engine.protocol.kubernetes import TLS_NAME_ANNOTATION
from octavo_router.discovery.kubernetes.specs import find
from octavo_router.endpoints.endpoint import Address
from tests.fakes.certificates import make_authority
from tests.fakes.http_client import RawClient, chat
from tests.fakes.kube_watch import KubeWatch, pod, service
from tests.fakes.process import serving
from tests.fakes.router_rig import on_loop
from tests.router.test_server import configuration, running

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from octavo_router.app import App
    from tests.fakes.process import ServeProcess

NAME = "smollm2.default.svc"
KEY = "of the engines"
ROUTER = "octavo-router"  # its certificate has the name `*.octavo-router.svc`


@pytest.fixture(scope="module")
def authorities(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two, with certificates for our namespace and for another one."""
    folder: Path = tmp_path_factory.mktemp("authorities")
    for each in ("one", "two"):
        make_authority(folder / each, ("default", "elsewhere", ROUTER), "DNS:*.{name}.svc")
    both = [(folder / each / "ca.pem").read_text() for each in ("one", "two")]
    (folder / "both.pem").write_text("".join(both))
    return folder


def engine_pod(**more: Any) -> dict[str, Any]:
    body = pod("a", ip="127.0.0.1", **more)
    body["metadata"]["annotations"] = {TLS_NAME_ANNOTATION: NAME}
    return body


def use(folder: Path, authority: Path, name: str) -> tuple[Path, Path]:
    """Certificate and key, as a volume has them and renews them."""
    folder.mkdir(exist_ok=True)
    files = folder / "tls.crt", folder / "tls.key"
    for source, target in zip((f"{name}.pem", f"{name}.key"), files, strict=True):
        shutil.copy(authority / source, folder / "new")
        os.replace(folder / "new", target)
    return files


def serve(certificate: Path, key: Path, *more: str) -> Any:
    return serving(
        "m", "--served-model-name", "m", "--ssl-certfile", str(certificate),
        "--ssl-keyfile", str(key), *more, env={"OCTAVO_API_KEY": KEY, "OCTAVO_POD_UID": "uid-a"},
    )  # fmt: skip


@asynccontextmanager
async def router(
    engine: ServeProcess, authority: Path, shows: tuple[Path, Path] | None = None
) -> AsyncIterator[tuple[App, RawClient]]:
    port = urlsplit(engine.url).port
    async with KubeWatch() as api:
        api.put(
            "services", service("smollm2", {"names": ["m"], "port": port}, deployment="smollm2")
        )
        api.put("pods", engine_pod())
        text = (
            f"discovery: {{kubernetes: {{enabled: true, api: '{api.url}', namespaces: [default]}}, "
            f"tls_ca: {authority}, engine_key: {KEY}"
            f"{', tls_cert: {}, tls_key: {}'.format(*shows) if shows else ''}}}\n"
            "flow: {hold_timeout_s: 0.2}"
        )
        async with (
            running(configuration(text=text)) as (app, server),
            await RawClient.open(server.port) as client,
        ):
            while not app.registry.endpoints:  # noqa: ASYNC110
                await asyncio.sleep(0.002)
            yield app, client


async def until_ready(app: App) -> None:
    while [one.state for one in app.registry.endpoints.values()] != ["ready"]:  # noqa: ASYNC110
        await asyncio.sleep(0.002)


async def shake_hands(engine: ServeProcess, authority: Path) -> None:
    url = urlsplit(engine.url)
    context = ssl.create_default_context(cafile=str(authority))
    _, writer = await asyncio.open_connection(
        url.hostname, url.port, ssl=context, server_hostname=NAME
    )
    writer.close()


@pytest.mark.slow
def test_requests_and_reports_go_over_tls_to_the_name_of_the_service(
    authorities: Path, tmp_path: Path
):
    files = use(tmp_path, authorities / "one", "default")

    @on_loop
    async def story() -> None:
        async with router(engine, authorities / "one" / "ca.pem") as (app, client):
            await until_ready(app)
            assert (await client.ask(chat(max_tokens=2))).status == 200
            stream = await client.ask(chat(stream=True, max_tokens=2))
            assert stream.body.endswith(b"data: [DONE]\n\n")

    with serve(*files) as engine:
        assert engine.url.startswith("https://")
        story()


@pytest.mark.slow
@pytest.mark.parametrize(("authority", "name"), [("one", "elsewhere"), ("two", "default")])
def test_a_certificate_of_another_name_or_authority_is_sent_nothing(
    authorities: Path, tmp_path: Path, authority: str, name: str
):
    files = use(tmp_path, authorities / authority, name)

    @on_loop
    async def story() -> None:
        async with router(engine, authorities / "one" / "ca.pem") as (app, client):
            assert (await client.ask(chat(max_tokens=2))).status == 503
            [endpoint] = app.registry.endpoints.values()
            assert endpoint.state != "ready" and "certificate" in endpoint.reason.lower()

    with serve(*files) as engine:
        story()


@pytest.mark.slow
def test_certificates_and_authority_are_renewed_without_a_restart(
    authorities: Path, tmp_path: Path
):
    files = use(tmp_path, authorities / "one", "default")
    trusted = tmp_path / "ca.pem"
    shutil.copy(authorities / "one" / "ca.pem", trusted)

    @on_loop
    async def story() -> None:
        async with router(engine, trusted) as (app, client):
            await until_ready(app)
            shutil.copy(authorities / "both.pem", tmp_path / "new")  # first whom to trust, too
            os.replace(tmp_path / "new", trusted)
            before = app._tls.context
            while app._tls.context is before:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            use(tmp_path, authorities / "two", "default")
            engine.signal(signal.SIGHUP)
            await ask_over_new_connections(app, client)
            await shake_hands(engine, authorities / "two" / "ca.pem")
            with pytest.raises(ssl.SSLCertVerificationError):
                await shake_hands(engine, authorities / "one" / "ca.pem")

    with serve(*files) as engine:
        story()


async def ask_over_new_connections(app: App, client: RawClient) -> None:
    [endpoint] = app.registry.endpoints.values()
    for _ in range(20):
        app.upstreams.of(endpoint).pool.idle_s = 0.0
        assert (await client.ask(chat(max_tokens=2))).status == 200
        await asyncio.sleep(0.05)


def taking_routers(authority: Path) -> tuple[str, ...]:
    """As the operator has engines do with the values for production."""
    return ("--ssl-ca-certs", str(authority), "--ssl-cert-reqs", "protected",
            "--ssl-client-names", f"*.{ROUTER}.svc")  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("shown", [ROUTER, "default", ""], ids=["ours", "an engine's", "none"])
def test_engines_that_take_only_routers_take_no_other_certificate(
    authorities: Path, tmp_path: Path, shown: str
):
    one = authorities / "one"
    files = use(tmp_path / "engine", one, "default")
    shows = use(tmp_path / "router", one, shown) if shown else None

    @on_loop
    async def story() -> None:
        async with router(engine, one / "ca.pem", shows) as (app, client):
            if shown == ROUTER:
                await until_ready(app)
                assert (await client.ask(chat(max_tokens=2))).status == 200
                return
            assert (await client.ask(chat(max_tokens=2))).status == 503
            [endpoint] = app.registry.endpoints.values()
            assert endpoint.state != "ready"
            assert "refuses the router's certificate" in endpoint.reason

    with serve(*files, *taking_routers(one / "ca.pem")) as engine:
        story()


@pytest.mark.slow
def test_certificates_of_routers_and_their_authority_are_renewed_without_a_restart(
    authorities: Path, tmp_path: Path
):
    files = use(tmp_path / "engine", authorities / "one", "default")
    shows = use(tmp_path / "router", authorities / "one", ROUTER)
    trusted = tmp_path / "clients.pem"
    shutil.copy(authorities / "both.pem", trusted)  # in time before the routers' are renewed

    @on_loop
    async def story() -> None:
        async with router(engine, authorities / "one" / "ca.pem", shows) as (app, client):
            await until_ready(app)
            before = app._tls.context
            use(tmp_path / "router", authorities / "two", ROUTER)
            while app._tls.context is before:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            shutil.copy(authorities / "two" / "ca.pem", tmp_path / "new")
            os.replace(tmp_path / "new", trusted)
            engine.signal(signal.SIGHUP)
            await ask_over_new_connections(app, client)
            context = ssl.create_default_context(cafile=str(authorities / "one" / "ca.pem"))
            context.load_cert_chain(authorities / "one" / f"{ROUTER}.pem",
                                    authorities / "one" / f"{ROUTER}.key")  # fmt: skip
            url = urlsplit(engine.url)
            reader, writer = await asyncio.open_connection(
                url.hostname, url.port, ssl=context, server_hostname=NAME
            )
            with suppress(OSError):  # the engine ends the handshake, which is over for us already
                writer.write(b"GET /health HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n")
                assert await reader.read() == b"", "the old certificate still opens engines"
            writer.close()

    with serve(*files, *taking_routers(trusted)) as engine:
        story()


def test_each_pod_says_for_itself_whether_it_speaks_tls():
    """During a rollout to TLS, and back, pods of both kinds serve."""
    import msgspec

    from octavo_router.discovery.kubernetes.objects import Pod
    from octavo_router.discovery.kubernetes.readiness_damping import Steadiness

    bodies = [engine_pod(), pod("b", ip="10.0.0.2")]
    pods = [msgspec.convert(body, Pod) for body in bodies]
    found = find([], pods, [], steadiness=Steadiness(), now=0.0)
    assert [spec.address for spec in found.specs] == [
        Address("127.0.0.1", 8000, tls=True, tls_name=NAME), Address("10.0.0.2", 8000),
    ]  # fmt: skip
    assert found.specs[0].address.url == "https://127.0.0.1:8000"
