"""Listeners: TLS with and without client certificates, Unix sockets, CORS, ids, heads."""

from __future__ import annotations

import json
import shutil
import socket
import ssl

import httpx
import pytest

from octavo_engine.errors import ConfigError
from octavo_engine.server.http.listen import open_unix_socket
from octavo_engine.server.http.tls import TlsFiles
from octavo_engine.server.limits import RequestLimits
from octavo_engine.server.settings import ServerSettings
from tests.fakes.certificates import make_authority
from tests.fakes.engine import FakeEngine
from tests.fakes.server import running

COMPLETIONS = "/v1/completions"


@pytest.fixture(scope="module")
def authorities(tmp_path_factory):
    """Two that do not know each other, in the folders `ours` and `theirs`."""
    folder = tmp_path_factory.mktemp("tls")
    for name in ("ours", "theirs"):
        make_authority(folder / name)
    return folder


def trusting(folder, *, shows=None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(folder / "ca.pem"))
    if shows is not None:
        context.load_cert_chain(shows / "client.pem", shows / "client.key")
    return context


def tls(folder, **more) -> ServerSettings:
    return ServerSettings(
        ssl_certfile=str(folder / "server.pem"), ssl_keyfile=str(folder / "server.key"), **more
    )


def test_requests_and_streams_go_over_tls(authorities):
    ours = authorities / "ours"
    with running(settings=tls(ours)) as server:
        with server.client(verify=trusting(ours)) as client:
            answer = client.post(COMPLETIONS, json={"prompt": "a", "stream": True})
            assert answer.text.endswith("data: [DONE]\n\n")
        with (
            server.client(verify=trusting(authorities / "theirs")) as stranger,
            pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"),
        ):
            stranger.get("/health")


def test_clients_must_show_a_certificate_of_the_authority(authorities):
    ours, theirs = authorities / "ours", authorities / "theirs"
    with running(settings=tls(ours, ssl_ca_certs=str(ours / "ca.pem"))) as server:
        with server.client(verify=trusting(ours, shows=ours)) as client:
            assert client.get("/health").status_code == 200
        for shows in (None, theirs):
            with (
                server.client(verify=trusting(ours, shows=shows)) as client,
                pytest.raises(httpx.TransportError),
            ):
                client.get("/health")


def test_new_certificates_and_authorities_are_taken_while_it_serves(authorities, tmp_path):
    ours, theirs = authorities / "ours", authorities / "theirs"
    for name in ("server.pem", "server.key", "ca.pem"):
        shutil.copy(ours / name, tmp_path / name)
    with (
        running(settings=tls(tmp_path, ssl_ca_certs=str(tmp_path / "ca.pem"))) as server,
        server.client(verify=trusting(ours, shows=ours)) as old,
    ):
        assert old.get("/health").status_code == 200
        shutil.copy(theirs / "server.pem", tmp_path / "server.pem")  # half of it: not taken
        server.look_at_files()
        with server.client(verify=trusting(ours, shows=ours)) as client:
            assert client.get("/health").status_code == 200
        for name in ("server.key", "ca.pem"):
            shutil.copy(theirs / name, tmp_path / name)
        server.look_at_files()
        with server.client(verify=trusting(theirs, shows=theirs)) as client:
            assert client.get("/health").status_code == 200
        with (
            server.client(verify=trusting(theirs, shows=ours)) as client,
            pytest.raises(httpx.TransportError),
        ):
            client.get("/health")
        assert old.get("/health").status_code == 200  # its connection stays as it was


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"ssl_keyfile": "k"}, "need --ssl-certfile"),
        ({"ssl_certfile": "c", "ssl_cert_reqs": "2"}, "needs --ssl-ca-certs"),
        ({"root_path": "llm"}, "--root-path must look like /this"),
        ({"allowed_origins": ("*",), "allow_credentials": True}, "name the origins"),
        ({"request_timeout_s": 0.0}, "--request-timeout must be positive"),
        ({"admin_api_keys": ("",)}, "--admin-api-key must not be empty"),
    ],
)
def test_settings_that_cannot_work_are_refused(fields, problem):
    with pytest.raises(ConfigError, match=problem):
        ServerSettings(**fields)


@pytest.mark.parametrize("certificate", ["absent.pem", "client.key"])
def test_a_certificate_that_cannot_be_loaded_ends_the_start(authorities, certificate):
    ours = authorities / "ours"
    with pytest.raises(ConfigError, match="--ssl-certfile: cannot load"):
        TlsFiles(ServerSettings(ssl_certfile=str(ours / certificate)))
    with pytest.raises(ConfigError, match="--ssl-ca-certs: cannot load"):
        TlsFiles(tls(ours, ssl_ca_certs=str(ours / "absent")))


def test_a_unix_socket_serves_and_a_dead_one_is_replaced(tmp_path):
    path = str(tmp_path / "octavo.sock")
    for _ in range(2):  # the first run leaves its socket behind
        with (
            running(settings=ServerSettings(uds=path)),
            httpx.Client(transport=httpx.HTTPTransport(uds=path), timeout=20) as client,
        ):
            answer = client.post("http://octavo/v1/completions", json={"prompt": "a"})
            assert answer.status_code == 200
            with pytest.raises(ConfigError, match="another server listens there"):
                open_unix_socket(path)
            # It has been asked, and has seen the asker off, before it is told to end.
            assert client.get("http://octavo/health").status_code == 200
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="not a socket"):
        open_unix_socket(str(tmp_path / "file"))


# ── browsers ──

ASKS = {
    "origin": "https://app.example", "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type",
}  # fmt: skip


def test_browsers_of_other_sites_are_refused_by_default():
    with running() as server, server.client() as client:
        assert client.options(COMPLETIONS, headers=ASKS).status_code == 405
        answer = client.get("/v1/models", headers={"origin": "https://app.example"})
        assert "access-control-allow-origin" not in answer.headers


def test_named_origins_may_call():
    settings = ServerSettings(allowed_origins=("https://app.example",), api_keys=("k",))
    with running(settings=settings) as server, server.client() as client:
        requested = client.options(COMPLETIONS, headers=ASKS)  # without a key: browsers send none
        other = client.options(COMPLETIONS, headers=ASKS | {"origin": "https://evil.example"})
        method = client.options(
            COMPLETIONS, headers=ASKS | {"access-control-request-method": "PUT"}
        )
        refused = client.get("/v1/models", headers={"origin": "https://app.example"})

    assert requested.status_code == 200
    assert requested.headers["access-control-allow-origin"] == "https://app.example"
    assert "access-control-allow-credentials" not in requested.headers
    assert other.status_code == 400
    assert other.headers["content-type"] == "application/json"
    assert other.json()["error"]["param"] == "origin"
    assert "--allowed-origins" in other.json()["error"]["message"]
    assert method.json()["error"]["param"] == "access-control-request-method"
    assert refused.status_code == 401  # and the page may read why
    assert refused.headers["access-control-allow-origin"] == "https://app.example"
    assert refused.headers["access-control-expose-headers"] == "x-request-id, retry-after"


def test_a_root_path_is_taken_off_and_named_in_the_description():
    with running(settings=ServerSettings(root_path="/llm")) as server, server.client() as client:
        assert client.get("/v1/models").status_code == 200
        assert client.get("/openapi.json").json()["servers"] == [{"url": "/llm"}]


# ── heads ──


@pytest.mark.parametrize(
    ("given", "is_kept"),
    [("abc-1.2:3_X", True), ("x" * 128, True), ("x" * 129, False), ("a b", False), ("", False)],
)
def test_request_ids_go_in_and_out(given, is_kept):
    with running() as server, server.client() as client:
        headers = {"x-request-id": given}
        whole = client.post(COMPLETIONS, json={"prompt": "a"}, headers=headers)
        refused = client.post(COMPLETIONS, json={}, headers=headers)
    for answer in (whole, refused):
        assert (answer.headers["x-request-id"] == given) is is_kept
        assert answer.headers["x-request-id"]
    if is_kept:
        assert whole.json()["id"] == f"cmpl-{given}"


def head(server, *lines: str, target: str = "/health") -> tuple[int, dict]:
    data = "\r\n".join([f"GET {target} HTTP/1.1", *lines, "connection: close"]) + "\r\n\r\n"
    answer = server.raw(data.encode())
    body = answer.partition(b"\r\n\r\n")[2]
    return int(answer.split()[1]), json.loads(body)["error"] if body else {}


def test_heads_that_are_too_much_or_address_nobody_are_refused():
    limits = RequestLimits(max_headers=8, max_url_bytes=100, max_header_bytes=2000)
    with running(settings=ServerSettings(limits=limits)) as server:
        assert head(server, "host: x")[0] == 200
        assert head(server, "host: [::1]:80")[0] == 200
        many = [f"x-{i}: 1" for i in range(6)]
        assert head(server, "host: x", *many)[0] == 200
        status, error = head(server, "host: x", *many, "x-7: 1")
        assert (status, error["code"]) == (431, "headers_too_large")
        assert head(server, "host: x", "x-1: " + "y" * 2000)[1]["code"] == "headers_too_large"
        status, error = head(server, "host: x", target="/health?" + "a" * 92)
        assert status == 200
        status, error = head(server, "host: x", target="/health?" + "a" * 93)
        assert (status, error["code"]) == (414, "url_too_long")
        for hosts in ([], ["host: x", "host: x"], ["host: a b"], ["host: x/y"], ["host: u@x"]):
            status, error = head(server, *hosts)
            assert (status, error["code"]) == (400, "invalid_http"), hosts


def test_nothing_is_put_into_an_answer_that_has_begun():
    engine = FakeEngine(hold_after=2)
    with running(engine) as server:
        body = json.dumps({"prompt": "a", "stream": True, "ignore_eos": True}).encode()
        requested = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        requested += f"content-length: {len(body)}\r\n\r\n"
        with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
            connection.sendall(requested.encode() + body)
            server.wait_for(engine.holding)
            connection.sendall(b"nonsense\r\n\r\n")
            answer = b""
            while chunk := connection.recv(65536):
                answer += chunk
        server.wait_for(engine.aborts)
    assert answer.count(b"HTTP/1.1") == 1
    assert b"invalid_http" not in answer


# ── deadlines ──


def test_the_nearer_deadline_holds():
    engine = FakeEngine()
    with (
        running(engine, ServerSettings(request_timeout_s=30.0)) as server,
        server.client() as client,
    ):

        def deadline(**headers: str) -> float:
            answer = client.post(COMPLETIONS, json={"prompt": "a"}, headers=headers)
            assert answer.status_code == 200
            left_s = engine.deadlines[-1]
            assert left_s is not None
            return left_s

        assert 29 < deadline() <= 30
        assert 4 < deadline(**{"x-octavo-timeout-ms": "5000"}) <= 5
        assert 29 < deadline(**{"x-octavo-timeout-ms": "99999999"}) <= 30
        for wrong in ("0", "-1", "1.5", "soon", "9" * 13, "²"):
            answer = client.post(
                COMPLETIONS,
                json={"prompt": "a"},
                headers={b"x-octavo-timeout-ms": wrong.encode("latin-1")},
            )
            assert answer.status_code == 400, wrong
            error = answer.json()["error"]
            assert (error["code"], error["param"]) == ("invalid_header", "x-octavo-timeout-ms")
