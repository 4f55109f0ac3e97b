"""Engines that take only routers: by an authority, by the names in their certificates."""

from __future__ import annotations

import shutil
import ssl
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from octavo_engine.errors import ConfigError
from octavo_engine.server.http.errors import HttpError
from octavo_engine.server.http.tls import ClientNames
from octavo_engine.server.routes import ROUTES
from octavo_engine.server.settings import ServerSettings
from tests.fakes.certificates import HERE, make_authority
from tests.fakes.server import running

if TYPE_CHECKING:
    from pathlib import Path

MODELS = "/v1/models"
NAMED = f"DNS:{{name}}.svc,{HERE}"
ROUTER = "router.svc"


@pytest.fixture(scope="module")
def authorities(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two, with certificates of the same names."""
    folder: Path = tmp_path_factory.mktemp("tls")
    for each in ("ours", "theirs"):
        make_authority(folder / each, ("router", "engine"), NAMED)
    return folder


def guarded(folder: Path, **more: Any) -> ServerSettings:
    return ServerSettings(
        ssl_certfile=str(folder / "engine.pem"), ssl_keyfile=str(folder / "engine.key"),
        ssl_ca_certs=str(folder / "ca.pem"), **more,
    )  # fmt: skip


def showing(trusted: Path, certificate: Path | None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(trusted / "ca.pem"))
    if certificate is not None:
        context.load_cert_chain(certificate, certificate.with_suffix(".key"))
    return context


def test_without_a_certificate_only_public_routes_answer(authorities: Path, tmp_path: Path):
    """The kubelet's probes and Prometheus have none, and no other route may answer them."""
    ours = authorities / "ours"
    settings = guarded(
        ours, ssl_cert_reqs="protected", dev_mode=True, files_dir=str(tmp_path), tokenizer_info=True
    )
    with (
        running(settings=settings) as server,
        server.client(verify=showing(ours, None)) as client,
    ):
        for row in ROUTES:
            path = row.path.replace("{model:path}", "fake").replace("{", "").replace("}", "")
            answer = client.request(row.method, path)
            if row.access == "public":
                assert answer.status_code == 200, path
                continue
            assert answer.status_code == 403, path
            if row.error is None:
                assert answer.json()["error"]["code"] == "client_certificate_required", path
        assert not server.service.admission.is_draining


@pytest.mark.parametrize("mode", ["auto", "protected"])
def test_only_the_names_given_open_routes_and_a_key_is_no_substitute(authorities: Path, mode: str):
    """An engine's own certificate is of the same authority, and opens nothing at another one."""
    ours = authorities / "ours"
    settings = guarded(
        ours, ssl_cert_reqs=mode, ssl_client_names=(ROUTER.upper(),), api_keys=("k",)
    )
    key = {"authorization": "Bearer k"}
    with running(settings=settings) as server:
        with server.client(verify=showing(ours, ours / "router.pem")) as client:
            assert client.get(MODELS, headers=key).status_code == 200
            assert client.get(MODELS).status_code == 401  # nor is a certificate one for a key
        with server.client(verify=showing(ours, ours / "engine.pem")) as client:
            answer = client.get(MODELS, headers=key)
            assert answer.status_code == 403
            assert "engine.svc" in answer.json()["error"]["message"]
            assert client.get("/health").status_code == 200


def test_a_certificate_of_another_authority_ends_the_handshake(authorities: Path):
    ours, theirs = authorities / "ours", authorities / "theirs"
    settings = guarded(ours, ssl_cert_reqs="protected", ssl_client_names=(ROUTER,))
    with (
        running(settings=settings) as server,
        server.client(verify=showing(ours, theirs / "router.pem")) as client,
        pytest.raises(httpx.TransportError),
    ):
        client.get("/health")


def test_another_authority_of_clients_is_taken_while_it_serves(authorities: Path, tmp_path: Path):
    ours, theirs = authorities / "ours", authorities / "theirs"
    trusted = tmp_path / "clients.pem"
    shutil.copy(ours / "ca.pem", trusted)
    settings = ServerSettings(
        ssl_certfile=str(ours / "engine.pem"), ssl_keyfile=str(ours / "engine.key"),
        ssl_ca_certs=str(trusted), ssl_cert_reqs="protected", ssl_client_names=(ROUTER,),
    )  # fmt: skip
    old, new = (showing(ours, folder / "router.pem") for folder in (ours, theirs))

    def opens(context: ssl.SSLContext) -> bool:
        try:
            with server.client(verify=context) as client:
                return client.get(MODELS).status_code == 200
        except httpx.TransportError:
            return False

    with running(settings=settings) as server:
        assert (opens(old), opens(new)) == (True, False)
        trusted.write_text("not a certificate")  # half written: what was before stays
        server.look_at_files()
        assert (opens(old), opens(new)) == (True, False)
        trusted.write_text((ours / "ca.pem").read_text() + (theirs / "ca.pem").read_text())
        server.look_at_files()
        assert (opens(old), opens(new)) == (True, True)
        shutil.copy(theirs / "ca.pem", trusted)
        server.look_at_files()
        assert (opens(old), opens(new)) == (False, True)


NAMES: tuple[tuple[dict[str, Any] | None, bool], ...] = (
    ({"subjectAltName": (("DNS", "a.svc"), ("DNS", "Router.svc"))}, True),
    ({"subjectAltName": (("URI", "spiffe://cluster/router"),)}, True),
    ({"subjectAltName": (("DNS", "router.svc.evil.example"),)}, False),
    ({"subjectAltName": (("DNS", "*.svc"),)}, False),
    ({"subjectAltName": (("email", "router.svc"), ("IP Address", "router.svc"))}, False),
    ({"subject": ((("commonName", "router.svc"),),)}, False),
    ({}, False),
    (None, False),
)


@pytest.mark.parametrize(("certificate", "is_welcome"), NAMES)
def test_names_are_whole_and_stand_in_the_alternative_names(
    certificate: dict[str, Any] | None, is_welcome: bool
):
    names = ClientNames((ROUTER, " spiffe://cluster/Router "))
    if is_welcome:
        names.check(certificate)
        return
    with pytest.raises(HttpError) as refused:
        names.check(certificate)
    assert (refused.value.status, refused.value.code) == (403, "client_certificate_required")


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"ssl_cert_reqs": "protected"}, "needs --ssl-ca-certs"),
        ({"ssl_client_names": ("a",)}, "--ssl-client-names needs --ssl-ca-certs"),
        ({"ssl_ca_certs": "c", "ssl_cert_reqs": "optional", "ssl_client_names": ("a",)},
         "required or protected"),
        ({"ssl_ca_certs": "c", "ssl_client_names": ("a", " ")}, "must not have an empty name"),
    ],
)  # fmt: skip
def test_settings_that_would_let_others_in_are_refused(fields: dict[str, Any], problem: str):
    with pytest.raises(ConfigError, match=problem):
        ServerSettings(ssl_certfile="c", **fields)


def test_without_names_and_authorities_nothing_is_looked_at():
    ClientNames.of(ServerSettings()).check(None)
