"""Authentication: keys from every source, admin keys, and key files that change at run time."""

from __future__ import annotations

import asyncio
import hashlib
import os
from typing import TYPE_CHECKING

import pytest

from octavo_engine.errors import ConfigError
from octavo_engine.server.admin import reload
from octavo_engine.server.admin.reload import KeyFiles
from octavo_engine.server.http.auth import Guard, KeyRing, parse_keys
from octavo_engine.server.routes import ROUTES
from octavo_engine.server.settings import ServerSettings
from tests.fakes.server import running

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.slow

# Every path that answers without a key. A new one must be put here on purpose.
PUBLIC = {
    "/health", "/healthz", "/livez", "/ready", "/readyz", "/ping", "/version", "/metrics", "/load",
    "/", "/openapi.json", "/docs", "/redoc",
    "/console/chat.css", "/console/chat.js", "/console/markdown.js",  # hold nothing of the server
}  # fmt: skip
# Every path that wants an admin key where there are any.
ADMIN = {
    "/octavo/v1/drain", "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/abort_requests",
    "/sleep", "/wake_up", "/reset_prefix_cache", "/reset_mm_cache", "/reset_encoder_cache",
    "/server_info", "/collective_rpc", "/start_profile", "/stop_profile", "/pause", "/resume",
    "/init_weight_transfer_engine", "/start_weight_update", "/update_weights",
    "/finish_weight_update", "/release_kv_cache_memory",
}  # fmt: skip
MODELS, DRAIN = "/v1/models", "/octavo/v1/drain"


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_every_route_has_the_access_it_is_meant_to_have():
    assert {row.path for row in ROUTES if row.access == "public"} == PUBLIC
    assert {row.path for row in ROUTES if row.access == "admin"} == ADMIN
    assert {row.access for row in ROUTES} == {"public", "key", "admin"}


STRANGERS: list[dict[str, str]] = [
    {}, bearer("k3"), {"authorization": "k1"}, {"authorization": "Bearer"}, {"x-api-key": "k3"},
    {"authorization": "Basic k1"}, {"authorization": "Basic k1", "x-api-key": "k1"},
]  # fmt: skip


def test_every_route_refuses_strangers_but_the_public_ones(tmp_path):
    settings = ServerSettings(
        api_keys=("k1", "k2"), admin_api_keys=("boss",), dev_mode=True, tokenizer_info=True,
        files_dir=str(tmp_path),
    )  # fmt: skip
    with running(settings=settings) as server, server.client() as client:
        for row in ROUTES:
            path = row.path.replace("{model:path}", "fake").replace("{", "").replace("}", "")
            if row.access == "public":
                assert client.request(row.method, path).status_code == 200, path
                continue
            for headers in STRANGERS if row.path == MODELS else STRANGERS[:2]:
                answer = client.request(row.method, path, headers=headers)
                assert answer.status_code == 401, (path, headers)
                if row.error is None:
                    assert answer.json()["error"]["code"] == "invalid_api_key"
                else:  # in the form of these paths
                    assert answer.json()["error"]["type"] == "authentication_error"
                assert answer.headers["www-authenticate"] == "Bearer"
            if row.access == "admin":
                answer = client.request(row.method, path, headers=bearer("k1"))
                assert answer.status_code == 403, path
                assert answer.json()["error"]["code"] == "admin_key_required"
        for headers in (bearer("k1"), bearer("k2"), {"x-api-key": "k2"}, bearer("boss"),
                        {"authorization": "bearer  k1"}):  # fmt: skip
            assert client.get(MODELS, headers=headers).status_code == 200
        assert client.post(DRAIN, headers=bearer("boss")).status_code == 202


def variants(path: str) -> Iterator[str]:
    """Other spellings of a path that some parser might take for it."""
    first = path[1:2]
    yield from (f"/{path}", f"{path}/", f"{path}//", f"/.{path}", f"/health/..{path}", f"{path};x",
                f"{path}%00", f"{path}%20", f"/%{ord(first):02x}{path[2:]}", path.upper(),
                f"http://other{path}", f"{path}?health", f"/health%2f..{path}", f"/health?{path}",
                f"\\{path[1:]}", path.replace("/", "%2f"), f"*{path}")  # fmt: skip


def test_no_spelling_of_a_path_or_method_gets_past_the_keys():
    with running(settings=ServerSettings(api_keys=("k",))) as server:
        for path in ("/v1/models", "/v1/completions", DRAIN, "/tokenize"):
            for target in variants(path):
                for method in ("GET", "POST", "HEAD", "OPTIONS", "PUT", "get"):
                    data = f"{method} {target} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
                    status = int(server.raw(data.encode()).split()[1])
                    is_public = target.partition("?")[0] in PUBLIC and method in ("GET", "HEAD")
                    assert (status == 200) == is_public, (method, target, status)
        assert not server.service.admission.is_draining


def test_without_admin_keys_the_others_administrate():
    with running(settings=ServerSettings(api_keys=("k1",))) as server, server.client() as client:
        assert client.post(DRAIN).status_code == 401
        assert client.post(DRAIN, headers=bearer("k1")).status_code == 202


def test_with_admin_keys_alone_everybody_works_and_nobody_else_administrates():
    settings = ServerSettings(admin_api_keys=("boss",))
    with running(settings=settings) as server, server.client() as client:
        assert client.get(MODELS).status_code == 200
        assert client.post(DRAIN).status_code == 401
        assert client.post(DRAIN, headers={"x-api-key": "boss"}).status_code == 202


def test_a_key_file_is_taken_while_requests_go_on(tmp_path):
    file = tmp_path / "keys"
    file.write_text("# our teams\nold\n\n  spaced  \n")
    with (
        running(settings=ServerSettings(api_key_file=str(file))) as server,
        server.client() as client,
    ):
        assert client.get(MODELS, headers=bearer("old")).status_code == 200
        assert client.get(MODELS, headers=bearer("spaced")).status_code == 200
        digest = hashlib.sha256(b"new").hexdigest()
        (tmp_path / "next").write_text(f"sha256:{digest}\n")
        (tmp_path / "next").rename(file)
        server.look_at_files()
        assert client.get(MODELS, headers=bearer("old")).status_code == 401
        assert client.get(MODELS, headers=bearer("new")).status_code == 200
        assert client.get(MODELS, headers=bearer(f"sha256:{digest}")).status_code == 401

        file.write_text("two words\n")  # cannot be taken: the old ones stay
        server.look_at_files()
        assert client.get(MODELS, headers=bearer("new")).status_code == 200

        file.unlink()  # gone: nobody gets in
        server.look_at_files()
        assert client.get(MODELS, headers=bearer("new")).status_code == 401


def test_an_empty_key_file_lets_nobody_in(tmp_path):
    file = tmp_path / "keys"
    file.write_text("# none yet\n")
    with (
        running(settings=ServerSettings(api_key_file=str(file))) as server,
        server.client() as client,
    ):
        assert client.get(MODELS).status_code == 401


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a\nb c\n", "line 2: a key is printable ASCII without spaces"),
        ("sha256:12\n", "line 1: sha256: needs 64 hexadecimal digits"),
        ("a\x01\n", "line 1: a key is printable ASCII"),
    ],
)
def test_a_bad_key_file_is_named_with_its_line(text, problem):
    with pytest.raises(ConfigError, match=problem):
        parse_keys(text, "keys.txt")


def test_a_missing_key_file_ends_the_start(tmp_path):
    with pytest.raises(ConfigError, match=r"--api-key-file .*: No such file"):
        KeyFiles(ServerSettings(api_key_file=str(tmp_path / "absent")))
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="byte 0 is not ASCII"):
        KeyFiles(ServerSettings(admin_api_key_file=str(tmp_path / "binary")))


def test_all_digests_are_compared_whatever_the_first_one_says(monkeypatch):
    compared = []

    def compare(a: bytes, b: bytes) -> bool:
        compared.append(b)
        return a == b

    monkeypatch.setattr("hmac.compare_digest", compare)
    ring = KeyRing(("a", "b", "c"))
    assert ring.holds("a")
    assert len(compared) == 3
    Guard(ring, KeyRing(("x",))).check("key", "Bearer a", "")
    assert len(compared) == 7  # the admin's too


def test_keys_may_hold_any_byte_a_header_can():
    guard = Guard(KeyRing(("clé",)), KeyRing())
    guard.check("key", "Bearer clé", "")
    with pytest.raises(Exception, match="valid API key"):
        guard.check("key", "Bearer cl\xff", "")


def test_a_refused_file_is_read_again_until_it_is_good(tmp_path, caplog):
    """Also where nothing shows that it was put right: here time, inode and size are the same."""
    file = tmp_path / "keys"
    file.write_text("old\n")
    key_files = KeyFiles(ServerSettings(api_key_file=str(file)))
    reloader = reload.Reloader([key_files])
    file.write_text("two words\n")
    stat = file.stat()
    for _ in range(2):
        reloader.look()
        assert key_files.guard.keys.holds("old")
    assert caplog.text.count("Kept what was before") == 1
    file.write_text("two-words\n")
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    reloader.look()
    assert key_files.guard.keys.holds("two-words")


def test_changed_files_are_seen_without_being_told(tmp_path, monkeypatch):
    monkeypatch.setattr(reload, "LOOK_INTERVAL_S", 0.01)
    file = tmp_path / "keys"
    file.write_text("old\n")
    key_files = KeyFiles(ServerSettings(api_key_file=str(file)))

    async def until_taken() -> None:
        taken = asyncio.Event()
        take = key_files.reload

        def take_and_tell() -> None:
            take()
            taken.set()

        monkeypatch.setattr(key_files, "reload", take_and_tell)
        task = asyncio.create_task(reload.Reloader([key_files]).run())
        file.write_text("newer\n")
        async with asyncio.timeout(60):
            await taken.wait()
        task.cancel()

    asyncio.run(until_taken())
    assert key_files.guard.keys.holds("newer")
    assert not key_files.guard.keys.holds("old")
