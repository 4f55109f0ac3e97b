"""The administrators' listener: what is there and nowhere else, who may call it, and its start.

Red when: a route of administration answers on the port of requests although there is a listener for
it; work, pages or strangers get in on that one; or it opens to other machines without a guard.
"""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING

import pytest

from octavo_engine.errors import ConfigError
from octavo_engine.protocol.endpoints import DRAIN_PATH as DRAIN
from octavo_engine.protocol.endpoints import STREAM_PATH
from octavo_engine.server.routes import is_for_administrators, served_routes
from octavo_engine.server.settings import ServerSettings
from tests.fakes.certificates import HERE, make_authority
from tests.fakes.server import running

if TYPE_CHECKING:
    from pathlib import Path

SETTINGS = ServerSettings(
    api_keys=("k",), admin_api_keys=("boss",), admin_port=1, dev_mode=True,
    allow_runtime_lora_updating=True,
)  # fmt: skip
BOSS = {"authorization": "Bearer boss"}
TENANT = {"authorization": "Bearer k"}
LOAD = "/v1/load_lora_adapter"


def test_each_route_is_on_one_listener_and_probes_are_on_both():
    with running(settings=SETTINGS) as server, server.client() as usual, server.admin() as admin:
        # Of the two that are left out one ends the server, and the other answers without an end.
        rows = [row for row in served_routes(SETTINGS) if row.path not in (DRAIN, STREAM_PATH)]
        for row in rows:
            path = row.path.replace("{model:path}", "fake").replace("{", "").replace("}", "")
            here = usual.request(row.method, path, headers=BOSS)
            there = admin.request(row.method, path, headers=BOSS)
            if is_for_administrators(row):
                assert here.status_code == 404, path
                assert "--admin-port" in here.json()["error"]["message"]
                assert there.status_code != 404, path
            else:
                assert here.status_code == 404 or there.status_code in (200, 404), path
                is_on_both = row.access == "public" and not row.needs
                assert (there.status_code == 200) == is_on_both, path


def test_what_changes_the_server_is_for_administrators_and_what_routers_call_is_not():
    theirs = {row.path for row in served_routes(SETTINGS) if is_for_administrators(row)}
    admin = {row.path for row in served_routes(SETTINGS) if row.access == "admin"}
    assert admin - theirs == {LOAD, "/v1/unload_lora_adapter"}
    assert {DRAIN, "/abort_requests", "/sleep", "/is_sleeping", "/server_info"} <= theirs


def test_a_drain_is_for_who_has_the_key_and_comes_by_that_listener():
    with running(settings=SETTINGS) as server, server.client() as usual, server.admin() as admin:
        assert usual.post(DRAIN, headers=BOSS).status_code == 404
        assert usual.post(DRAIN).status_code == 401  # strangers do not learn where it is
        assert admin.post(DRAIN).status_code == 401
        assert admin.post(DRAIN, headers=TENANT).status_code == 403
        page = admin.post(DRAIN, headers=BOSS | {"origin": "http://localhost:3000"})
        assert (page.status_code, page.json()["error"]["code"]) == (403, "page_refused")
        assert not server.service.admission.is_draining
        assert admin.post(DRAIN, headers=BOSS).status_code == 202
        assert server.service.admission.is_draining


def test_its_routes_are_not_in_the_description_of_the_other_one():
    with running(settings=SETTINGS) as server, server.client() as usual, server.admin() as admin:
        paths = usual.get("/openapi.json").json()["paths"]
        assert admin.get("/openapi.json", headers=BOSS).status_code == 404
    assert LOAD in paths
    assert not {DRAIN, "/abort_requests", "/sleep"} & paths.keys()


def test_without_a_port_for_it_all_is_where_it_was():
    settings = ServerSettings(admin_api_keys=("boss",))
    with running(settings=settings) as server, server.client() as usual:
        assert usual.post(DRAIN, headers=BOSS).status_code == 202


@pytest.mark.slow
def test_certificates_of_clients_count_there_as_well(tmp_path: Path) -> None:
    make_authority(tmp_path, ("router", "engine"), f"DNS:{{name}}.svc,{HERE}")
    settings = ServerSettings(
        admin_port=1, ssl_certfile=str(tmp_path / "engine.pem"),
        ssl_keyfile=str(tmp_path / "engine.key"), ssl_ca_certs=str(tmp_path / "ca.pem"),
        ssl_cert_reqs="protected", ssl_client_names=("router.svc",),
    )  # fmt: skip
    with running(settings=settings) as server:
        for name, status in ((None, 403), ("engine", 403), ("router", 202)):
            trust = ssl.create_default_context(cafile=str(tmp_path / "ca.pem"))
            if name:
                trust.load_cert_chain(tmp_path / f"{name}.pem", tmp_path / f"{name}.key")
            with server.admin(verify=trust) as client:
                assert client.get("/health").status_code == 200
                assert client.post(DRAIN).status_code == status, name


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.7", "engine.example"])
def test_it_opens_to_other_machines_only_behind_a_key_or_certificates(host):
    with pytest.raises(ConfigError, match="lets other machines stop this server"):
        ServerSettings(admin_port=9000, admin_host=host)
    ServerSettings(admin_port=9000, admin_host=host, api_keys=("k",))
    ServerSettings(admin_port=9000, admin_host=host, admin_api_key_file="keys.txt")
    ServerSettings(
        admin_port=9000, admin_host=host, ssl_certfile="a", ssl_keyfile="b", ssl_ca_certs="c"
    )
    with pytest.raises(ConfigError):  # nothing is checked of it
        ServerSettings(
            admin_port=9000, admin_host=host, ssl_certfile="a", ssl_keyfile="b", ssl_ca_certs="c",
            ssl_cert_reqs="optional",
        )  # fmt: skip


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_on_this_machine_it_needs_neither(host):
    assert ServerSettings(admin_port=9000, admin_host=host).admin_port == 9000


@pytest.mark.parametrize(("port", "why"), [(70_000, "between 0 and 65535"), (8000, "is --port")])
def test_ports_that_cannot_be(port, why):
    with pytest.raises(ConfigError, match=why):
        ServerSettings(admin_port=port)
