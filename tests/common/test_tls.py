"""Contexts shake hands with whom they should, and files that cannot be loaded are named."""

from __future__ import annotations

import shutil
import ssl
from typing import TYPE_CHECKING

import pytest

from octavo_common import tls
from tests.fakes.certificates import make_authority

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two authorities with all that is theirs."""
    ours, theirs = (tmp_path_factory.mktemp(name) for name in ("ours", "theirs"))
    for folder in (ours, theirs):
        make_authority(folder)
    return ours, theirs


def shake_hands(
    server: ssl.SSLContext, client: ssl.SSLContext, name: str = "localhost"
) -> ssl.SSLObject:
    """In memory; the client's end. Raises ssl.SSLError for either side's refusal."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    here = client.wrap_bio(to_client, to_server, server_hostname=name)
    there = server.wrap_bio(to_server, to_client, server_side=True)
    for _ in range(4):
        for end in (here, there):
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
    there.write(b"x")
    assert here.read(1) == b"x"
    return here


def server_of(folder: Path, *, client_ca: Path | None = None) -> ssl.SSLContext:
    context = tls.server_context()
    tls.load_certificate(context, str(folder / "server.pem"), str(folder / "server.key"))
    if client_ca is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        tls.load_authority(context, str(client_ca))
    return context


def test_a_certificate_of_the_authority_is_believed_and_no_other(folders):
    ours, theirs = folders
    client = tls.client_context(str(ours / "ca.pem"))
    shaken = shake_hands(server_of(ours), client)
    assert shaken.selected_alpn_protocol() == "http/1.1"
    assert shaken.version() in ("TLSv1.2", "TLSv1.3")
    with pytest.raises(ssl.SSLCertVerificationError):
        shake_hands(server_of(theirs), client)
    with pytest.raises(ssl.SSLCertVerificationError):
        shake_hands(server_of(ours), client, name="other.example")
    with pytest.raises(ssl.SSLCertVerificationError):
        shake_hands(server_of(ours), tls.client_context())  # the system's authorities


def test_a_client_without_a_certificate_is_refused_where_one_is_required(folders):
    ours, _ = folders
    server = server_of(ours, client_ca=ours / "ca.pem")
    client = tls.client_context(str(ours / "ca.pem"))
    with pytest.raises(ssl.SSLError):
        shake_hands(server, client)
    tls.load_certificate(client, str(ours / "client.pem"), str(ours / "client.key"))
    shake_hands(server, client)


def test_older_protocols_are_not_spoken(folders):
    ours, _ = folders
    for context in (server_of(ours), tls.client_context(str(ours / "ca.pem"))):
        assert context.minimum_version == ssl.TLSVersion.TLSv1_2


def test_a_key_may_stand_in_the_file_of_its_certificate(folders, tmp_path):
    ours, _ = folders
    both = tmp_path / "both.pem"
    both.write_bytes((ours / "server.pem").read_bytes() + (ours / "server.key").read_bytes())
    context = tls.server_context()
    tls.load_certificate(context, str(both))
    shake_hands(context, tls.client_context(str(ours / "ca.pem")))


def test_what_cannot_be_loaded_is_named_with_the_reason(folders, tmp_path):
    ours, theirs = folders
    absent, empty = str(tmp_path / "absent"), tmp_path / "empty"
    empty.write_text("")
    with pytest.raises(tls.TlsFileError) as caught:
        tls.client_context(absent)
    assert str(caught.value) == f"cannot load {absent}: No such file or directory"
    assert (caught.value.path, caught.value.reason) == (absent, "No such file or directory")
    with pytest.raises(tls.TlsFileError):
        tls.client_context(str(empty))
    shutil.copy(theirs / "server.key", tmp_path / "key")  # of another certificate
    with pytest.raises(tls.TlsFileError, match="KEY_VALUES_MISMATCH"):
        tls.load_certificate(tls.server_context(), str(ours / "server.pem"), str(tmp_path / "key"))
