"""TLS towards clients: a context from files, and fresh files without a restart."""

from __future__ import annotations

import logging
import ssl
from typing import TYPE_CHECKING, Any

from octavo_common import tls
from octavo_engine.errors import ConfigError

if TYPE_CHECKING:
    from octavo_engine.server.settings import ServerSettings

logger = logging.getLogger("octavo.server")

_MODES = {
    "none": ssl.CERT_NONE, "optional": ssl.CERT_OPTIONAL, "required": ssl.CERT_REQUIRED,
    "0": ssl.CERT_NONE, "1": ssl.CERT_OPTIONAL, "2": ssl.CERT_REQUIRED,
}  # fmt: skip


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
        mode = settings.ssl_cert_reqs
        if mode == "auto":
            mode = "required" if settings.ssl_ca_certs else "none"
        context.verify_mode = _MODES[mode]
        if settings.ssl_ca_certs:
            try:
                tls.load_authority(context, settings.ssl_ca_certs)
            except tls.TlsFileError as error:
                raise ConfigError(f"--ssl-ca-certs: {error}") from None
        return context


def _no_password() -> str:
    """Instead of asking at a terminal that may not be there."""
    raise ConfigError("the key of --ssl-keyfile is encrypted; give --ssl-keyfile-password")
