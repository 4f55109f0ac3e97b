"""TLS towards clients: a context from files, and fresh files without a restart."""

from __future__ import annotations

import logging
import ssl
from typing import TYPE_CHECKING, Any, Self

from octavo_common import tls
from octavo_engine.errors import ConfigError
from octavo_engine.server.http.errors import HttpError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from octavo_engine.server.settings import ServerSettings

logger = logging.getLogger("octavo.server")

PEER = "octavo.peer_certificate"  # the extension under which a server offers what a client showed

_MODES = {
    "none": ssl.CERT_NONE, "optional": ssl.CERT_OPTIONAL, "required": ssl.CERT_REQUIRED,
    "protected": ssl.CERT_OPTIONAL,  # the handshake lets probes pass, and `ClientNames` looks
}  # fmt: skip
_KINDS = ("DNS", "URI")  # of names in a certificate: of Services, and of SPIFFE


class ClientNames:
    """Who may call routes that are not public, by the certificate that a connection showed.

    The handshake has checked it against the authorities. This decides by the names in it, because
    an authority signs more than its clients: engines' own certificates, for one.
    """

    def __init__(self, names: Iterable[str] = (), *, is_required: bool = False) -> None:
        self._names = frozenset(name.strip().lower() for name in names)
        self._is_required = is_required or bool(self._names)

    @classmethod
    def of(cls, settings: ServerSettings) -> Self:
        is_required = settings.client_certificates in ("required", "protected")
        return cls(settings.ssl_client_names, is_required=is_required)

    def check(self, certificate: Mapping[str, Any] | None) -> None:
        """As `ssl` reads it; None: there is none. Raises HttpError (403)."""
        if not self._is_required:
            return
        if certificate is None:
            raise HttpError(
                403,
                "This route needs a certificate of the client: connect with one of an authority in "
                "--ssl-ca-certs.",
                code="client_certificate_required",
            )
        shown = [value for kind, value in certificate.get("subjectAltName", ()) if kind in _KINDS]
        if self._names and self._names.isdisjoint(name.lower() for name in shown):
            raise HttpError(
                403,
                f"The client's certificate is for {', '.join(shown) or 'no DNS name or URI'}, and "
                "--ssl-client-names has other names.",
                code="client_certificate_required",
            )


class TlsFiles:
    """One context for the listener; what it shows and whom it believes can be replaced."""

    def __init__(self, settings: ServerSettings) -> None:
        self._settings = settings
        self.paths = [
            path
            for path in (settings.ssl_certfile, settings.ssl_keyfile, settings.ssl_ca_certs)
            if path
        ]
        self._current = self._load()
        self.context = self._load()
        # Called for every new connection, also for those whose client names no server.
        self.context.sni_callback = self._choose

    def reload(self) -> None:
        self._current = self._load()
        logger.info("Loaded the new certificate")

    def _choose(self, connection: Any, server_name: str | None, context: ssl.SSLContext) -> None:
        connection.context = self._current

    def _load(self) -> ssl.SSLContext:
        settings = self._settings
        context = tls.server_context()
        if settings.ssl_ciphers:
            try:
                context.set_ciphers(settings.ssl_ciphers)
            except ssl.SSLError:
                raise ConfigError(f"--ssl-ciphers {settings.ssl_ciphers}: no such cipher") from None
        certificate, key = settings.ssl_certfile, settings.ssl_keyfile
        password = settings.ssl_keyfile_password or _no_password
        try:
            tls.load_certificate(context, certificate, key, password=password)
        except tls.TlsFileError as error:
            files = f"{certificate} and {key}" if key else certificate
            raise ConfigError(f"--ssl-certfile: cannot load {files}: {error.reason}") from None
        context.verify_mode = _MODES[settings.client_certificates]
        if settings.ssl_ca_certs:
            try:
                tls.load_authority(context, settings.ssl_ca_certs)
            except tls.TlsFileError as error:
                raise ConfigError(f"--ssl-ca-certs: {error}") from None
        return context


def _no_password() -> str:
    """Instead of asking at a terminal that may not be there."""
    raise ConfigError("the key of --ssl-keyfile is encrypted; give --ssl-keyfile-password")
