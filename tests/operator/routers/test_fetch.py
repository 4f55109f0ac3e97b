"""Routers are asked by address, with a token, over TLS where they serve it; failures have names."""

from __future__ import annotations

import argparse
import asyncio
import ssl
from typing import TYPE_CHECKING

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from octavo_operator.cli import add_options, read_settings, read_values
from octavo_operator.errors import SettingsInvalid
from octavo_operator.routers.fetch import RouterFetch, router_tls
from octavo_operator.routers.poller import RouterUnreachable
from octavo_operator.settings import RouterSettings
from tests.fakes.certificates import make_authority

if TYPE_CHECKING:
    from pathlib import Path

TOKEN = "hunter2"


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An authority, and a certificate of the routers' Service."""
    folder: Path = tmp_path_factory.mktemp("certificates")
    make_authority(folder, ("octavo-router.octavo-system.svc", "other.example"), "DNS:{name}")
    return folder


async def state(request: web.Request) -> web.Response:
    if request.headers.get("authorization") != f"Bearer {TOKEN}":
        raise web.HTTPUnauthorized
    if request.path != "/octavo/v1/state":
        raise web.HTTPFound("/octavo/v1/state")
    return web.Response(text="told")


def ask(
    router: RouterSettings, *, certificate: Path | None = None, path: str = "/octavo/v1/state"
) -> bytes:
    """Of a router that serves TLS where it has a certificate."""

    async def story() -> bytes:
        app = web.Application()
        app.router.add_get("/{any:.*}", state)
        tls = None
        if certificate is not None:
            tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            tls.load_cert_chain(certificate, certificate.with_suffix(".key"))
        server = TestServer(app, host="127.0.0.1")
        await server.start_server(ssl=tls)
        url = f"{router.scheme}://127.0.0.1:{server.port}{path}"
        try:
            async with aiohttp.ClientSession() as session:
                return await RouterFetch(session, router, router_tls(router))(url)
        finally:
            await server.close()

    return asyncio.run(story())


def trouble(
    router: RouterSettings, *, certificate: Path | None = None, path: str = "/octavo/v1/state"
):
    with pytest.raises(RouterUnreachable) as caught:
        ask(router, certificate=certificate, path=path)
    return caught.value.reason


def test_the_token_opens_it():
    assert ask(RouterSettings(token=TOKEN)) == b"told"
    assert trouble(RouterSettings()) == "unauthorized"
    assert trouble(RouterSettings(token="another")) == "unauthorized"
    assert trouble(RouterSettings(token=TOKEN), path="/elsewhere") == "bad_answer"  # not followed


def test_over_tls_the_certificate_must_be_that_of_the_service(certificates):
    ca = str(certificates / "ca.pem")
    right = certificates / "octavo-router.octavo-system.svc.pem"
    router = RouterSettings(token=TOKEN, scheme="https", tls_ca=ca)
    assert ask(router, certificate=right) == b"told"
    assert trouble(router, certificate=certificates / "other.example.pem") == "tls"
    assert trouble(RouterSettings(token=TOKEN, scheme="https"), certificate=right) == "tls"
    assert trouble(router) == "tls"  # it speaks plain HTTP
    assert trouble(RouterSettings(token=TOKEN), certificate=right) in ("unreachable", "bad_answer")


def test_an_authority_that_cannot_be_read_ends_the_start(tmp_path):
    missing = str(tmp_path / "ca.pem")
    with pytest.raises(SettingsInvalid, match=r"--router-tls-ca: .*ca\.pem: No such file"):
        router_tls(RouterSettings(scheme="https", tls_ca=missing))
    (tmp_path / "ca.pem").write_text("nothing")
    with pytest.raises(SettingsInvalid, match=r"--router-tls-ca: cannot load .*ca\.pem"):
        router_tls(RouterSettings(scheme="https", tls_ca=missing))


def test_an_authority_that_is_replaced_is_taken_without_a_restart(tmp_path, caplog):
    """And what is no authority leaves the old one, with one line in the log."""
    for name in ("old", "new"):
        make_authority(tmp_path / name, ("r",), "DNS:r")
    file = tmp_path / "ca.pem"

    def put(text: str) -> None:
        (tmp_path / "next").write_text(text)
        (tmp_path / "next").replace(file)

    put((tmp_path / "old" / "ca.pem").read_text())
    tls = router_tls(RouterSettings(scheme="https", tls_ca=str(file)))
    assert tls is not None
    old = tls.context
    assert tls.context is old
    put("nothing")
    assert tls.context is old and tls.context is old
    assert caplog.text.count("Kept the old authority") == 1
    put((tmp_path / "new" / "ca.pem").read_text())
    new = tls.context
    assert new is not old and tls.context is new
    assert new.get_ca_certs(binary_form=True) != old.get_ca_certs(binary_form=True)


def test_flags_and_variables_say_how(tmp_path):
    config = tmp_path / "config"
    config.write_text(
        "clusters: [{name: c, cluster: {server: 'http://127.0.0.1:1'}}]\n"
        "contexts: [{name: x, context: {cluster: c, user: u}}]\n"
        "users: [{name: u, user: {}}]\ncurrent-context: x\n"
    )
    parser = argparse.ArgumentParser()
    add_options(parser)
    args = parser.parse_args([f"--kubeconfig={config}", "--router-scheme=https"])
    values = read_values(args, {"OCTAVO_OPERATOR_ROUTER_TOKEN": f"{TOKEN}\n"})
    _, settings, _ = read_settings(values, {})
    assert (settings.router.scheme, settings.router.token) == ("https", TOKEN)
    assert settings.router.endpoint.startswith("https://")
    values["router-scheme"] = "ftp"
    with pytest.raises(SettingsInvalid, match="--router-scheme must be http or https; got ftp"):
        read_settings(values, {})
