"""TLS on both sides: contexts from files, and fresh certificates without a restart."""

from __future__ import annotations

import logging
import ssl
from contextlib import contextmanager
from typing import TYPE_CHECKING

from octavo_common import tls
from octavo_common.file_watch import FileWatch
from octavo_router.errors import ConfigInvalid

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

logger = logging.getLogger("octavo.router")


def server_context(cert: str, key: str, client_ca: str = "") -> ssl.SSLContext:
    """For clients. `client_ca`: only those with a certificate of this authority may connect.
    Raises ConfigInvalid."""
    context = tls.server_context()
    with _refused("tls"):
        tls.load_certificate(context, cert, key)
    if client_ca:
        context.verify_mode = ssl.CERT_REQUIRED
        with _refused("server.tls_client_ca"):
            tls.load_authority(context, client_ca)
    return context


def client_context(
    ca: str = "", cert: str = "", key: str = "", *, field: str = "discovery.tls_ca"
) -> ssl.SSLContext:
    """For engines and the API server. `ca`: their authority, else the system's; `cert`: shown if
    they ask. Raises ConfigInvalid."""
    with _refused(field):
        context = tls.client_context(ca)
    if cert:
        with _refused("tls"):
            tls.load_certificate(context, cert, key)
    return context


@contextmanager
def _refused(field: str) -> Iterator[None]:
    try:
        yield
    except tls.TlsFileError as error:
        raise ConfigInvalid(field, str(error)) from None


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
