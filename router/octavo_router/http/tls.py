"""TLS on both sides: contexts from files, and fresh certificates without a restart."""

from __future__ import annotations

import logging
import ssl
from typing import TYPE_CHECKING

from octavo_common.file_watch import FileWatch
from octavo_router.errors import ConfigInvalid

if TYPE_CHECKING:
    from collections.abc import Iterable

logger = logging.getLogger("octavo.router")


def server_context(cert: str, key: str, client_ca: str = "") -> ssl.SSLContext:
    """For clients. `client_ca`: only those with a certificate of this authority may connect."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    _load_certificate(context, cert, key)
    if client_ca:
        context.verify_mode = ssl.CERT_REQUIRED
        _load_authorities(context, client_ca, "server.tls_client_ca")
    return context


def client_context(
    ca: str = "", cert: str = "", key: str = "", *, field: str = "discovery.tls_ca"
) -> ssl.SSLContext:
    """For whom we ask. `ca`: their authority, else the system's; `cert`: shown if they ask."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # checks certificates and names
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    if ca:
        _load_authorities(context, ca, field)
    else:
        context.load_default_certs()
    if cert:
        _load_certificate(context, cert, key)
    return context


# NOTE: only into a context that nobody uses yet. OpenSSL takes the certificate before it sees that
# the key is another's, so one that fails here leaves the context unfit for any handshake.
def _load_certificate(context: ssl.SSLContext, cert: str, key: str) -> None:
    try:
        context.load_cert_chain(cert, key or None)
    except (OSError, ssl.SSLError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigInvalid("tls", f"cannot load {cert}: {reason}") from None


def _load_authorities(context: ssl.SSLContext, path: str, field: str) -> None:
    try:
        context.load_verify_locations(path)
    except (OSError, ssl.SSLError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigInvalid(field, f"cannot load {path}: {reason}") from None


class ClientTls:
    """The context for whom the router asks: made when it is wanted first, and anew when its files
    are. `field`: the setting that names the authority."""

    def __init__(
        self, ca: str = "", cert: str = "", key: str = "", *, field: str = "discovery.tls_ca"
    ) -> None:
        self._files = (ca, cert, key)
        self._field = field
        self._watch = certificate_watch(self._files)
        self._context: ssl.SSLContext | None = None

    @property
    def context(self) -> ssl.SSLContext:
        """For connections from now on. Raises ConfigInvalid the first time."""
        if self._context is None:
            self._make()
        assert self._context is not None
        return self._context

    def look(self) -> bool:
        """Whether there is a new one."""
        return self._context is not None and self._watch.take(self._make)

    def _make(self) -> None:
        self._context = client_context(*self._files, field=self._field)


def certificate_watch(paths: Iterable[str]) -> FileWatch:
    """Of files that make contexts."""
    return FileWatch(paths, refusal=ConfigInvalid, on_refusal=_warn)


def _warn(error: Exception) -> None:
    logger.warning("Kept the old certificate: %s", error)
