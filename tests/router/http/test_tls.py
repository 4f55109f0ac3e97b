"""Fresh certificates: taken whole or not at all, and asked for again until they are good."""

from __future__ import annotations

import os
import shutil
import ssl
from typing import TYPE_CHECKING

import pytest

from octavo_router.discovery.kubernetes.account import at_url
from octavo_router.http.tls import ClientTls, certificate_watch
from tests.fakes.certificates import make_authority
from tests.fakes.http_client import RawClient, chat
from tests.fakes.router_rig import on_loop
from tests.fakes.upstream import ScriptedUpstream
from tests.router.test_server import configuration, plain_server, running, until_ready

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """Two authorities with all that is theirs."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        make_authority(tmp_path / name)
    return tmp_path / "a", tmp_path / "b"


def put(file: Path, into: Path) -> None:
    """As editors and volumes do it."""
    whole = into.with_name(into.name + ".new")
    shutil.copy(file, whole)
    os.replace(whole, into)


async def ask_over_tls(port: int, authority: Path) -> int:
    import asyncio

    context = ssl.create_default_context(cafile=str(authority / "ca.pem"))
    reader, writer = await asyncio.open_connection(
        "127.0.0.1", port, ssl=context, server_hostname="localhost"
    )
    async with RawClient(reader, writer) as client:
        return (await client.ask(chat())).status


@on_loop
async def test_a_half_written_pair_leaves_the_old_one_and_is_taken_when_it_is_whole(
    folders: tuple[Path, Path], tmp_path: Path
):
    a, b = folders
    cert, key = tmp_path / "tls.pem", tmp_path / "tls.key"
    put(a / "server.pem", cert)
    put(a / "server.key", key)
    text = f"server: {{tls_cert: {cert}, tls_key: {key}}}"
    async with (
        ScriptedUpstream(plain_server) as upstream,
        running(configuration(upstream.port, text=text)) as (app, server),
    ):
        await until_ready(app)
        config = app.config.server
        watch = certificate_watch((config.tls_cert, config.tls_key))

        def look() -> bool:
            return watch.take(lambda: server.renew_certificate(config))

        assert not look()
        put(b / "server.pem", cert)  # the key of it is not there yet
        for _ in range(2):
            assert not look()
            assert await ask_over_tls(server.port, a) == 200
        put(b / "server.key", key)
        assert look()
        assert await ask_over_tls(server.port, b) == 200
        with pytest.raises(ssl.SSLError):
            await ask_over_tls(server.port, a)
        assert not look()


def test_what_is_shown_to_engines_and_their_authority_are_read_again(
    folders: tuple[Path, Path], tmp_path: Path
):
    a, b = folders
    files = [tmp_path / name for name in ("ca.pem", "client.pem", "client.key")]
    for file in files:
        put(a / file.name, file)
    tls = ClientTls(*map(str, files))
    first = tls.context
    assert not tls.look()
    assert tls.context is first
    put(b / "client.pem", files[1])
    assert not tls.look()
    assert tls.context is first
    put(b / "client.key", files[2])
    put(b / "ca.pem", files[0])
    assert tls.look()
    assert tls.context is not first


def test_the_authority_of_the_api_server_is_read_again(folders: tuple[Path, Path], tmp_path: Path):
    a, b = folders
    put(a / "ca.pem", tmp_path / "ca.crt")
    account = at_url("https://10.0.0.1:6443", ca_file=str(tmp_path / "ca.crt"))
    first = account.target
    assert account.target == first
    put(b / "ca.pem", tmp_path / "ca.crt")
    assert account.target.tls is not first.tls
    (tmp_path / "ca.crt").write_text("half of it")
    assert account.target.tls is not first.tls  # what was good is not given up
