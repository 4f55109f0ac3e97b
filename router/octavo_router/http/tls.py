"""TLS on both sides: contexts from files, and fresh certificates without a restart."""

from __future__ import annotations

import os
import ssl
from typing import TYPE_CHECKING

from octavo_router.errors import ConfigInvalid

if TYPE_CHECKING:
    from collections.abc import Iterable


def server_context(cert: str, key: str, client_ca: str = "") -> ssl.SSLContext:
    """For clients. `client_ca`: only those with a certificate of this authority may connect."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    load_certificate(context, cert, key)
    if client_ca:
        context.verify_mode = ssl.CERT_REQUIRED
        _load_authorities(context, client_ca, "server.tls_client_ca")
    return context


def client_context(ca: str = "", cert: str = "", key: str = "") -> ssl.SSLContext:
    """For engines. `ca`: their authority, else the system's; `cert`: shown to those who ask."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # checks certificates and names
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    if ca:
        _load_authorities(context, ca, "discovery.tls_ca")
    else:
        context.load_default_certs()
    if cert:
        load_certificate(context, cert, key)
    return context


def load_certificate(context: ssl.SSLContext, cert: str, key: str) -> None:
    """Also replaces the one that a context has: connections made from now on show the new one."""
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


class FileWatch:
    """Whether any of some files was written anew since it was asked last."""

    def __init__(self, paths: Iterable[str]) -> None:
        self._paths = [path for path in paths if path]
        self._seen = self._look()

    def has_changed(self) -> bool:
        seen = self._look()
        changed, self._seen = seen != self._seen, seen
        return changed

    def _look(self) -> list[tuple[int, int]]:
        return [_stamp(path) for path in self._paths]


def _stamp(path: str) -> tuple[int, int]:
    try:
        stat = os.stat(path)
    except OSError:  # between removal and renaming
        return 0, 0
    return stat.st_mtime_ns, stat.st_ino
