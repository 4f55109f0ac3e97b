"""TLS contexts for HTTP/1.1 on both sides, and what is loaded into them from files.

NOTE: load only into a context that nobody uses yet. OpenSSL takes the certificate before it sees
that the key is another's, so a load that fails leaves the context unfit for any handshake. Fresh
files make a fresh context, and the old one serves until that is whole.
"""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class TlsFileError(Exception):
    """A file that cannot be loaded. As text: `cannot load PATH: REASON`."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"cannot load {path}: {reason}")
        self.path = path
        self.reason = reason


def server_context() -> ssl.SSLContext:
    """For clients; it has no certificate yet, and asks them for none."""
    return _limited(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))


def client_context(authority: str = "") -> ssl.SSLContext:
    """Checks certificates, against this authority or the system's, and names. Raises
    TlsFileError."""
    context = _limited(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
    if authority:
        load_authority(context, authority)
    else:
        context.load_default_certs()
    return context


def load_certificate(
    context: ssl.SSLContext,
    certificate: str,
    key: str = "",
    *,
    password: str | Callable[[], str] | None = None,
) -> None:
    """`key`: "" where it is in the certificate's file. Raises TlsFileError, or what `password`
    raises."""
    try:
        context.load_cert_chain(certificate, key or None, password=password)
    except OSError as error:  # ssl.SSLError is one
        raise TlsFileError(certificate, _reason(error)) from None


def load_authority(context: ssl.SSLContext, path: str) -> None:
    """Whose certificates the other side may show. Raises TlsFileError."""
    try:
        context.load_verify_locations(path)
    except OSError as error:
        raise TlsFileError(path, _reason(error)) from None


def _limited(context: ssl.SSLContext) -> ssl.SSLContext:
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    return context


def _reason(error: OSError) -> str:
    return error.strerror or str(error)
