"""Reads a router's state over HTTP or HTTPS with a token, and classifies failures."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import aiohttp

from octavo_common.file_watch import FileWatch
from octavo_common.tls import TlsFileError, client_context
from octavo_operator.errors import SettingsInvalid
from octavo_operator.routers.poller import RouterUnreachable

if TYPE_CHECKING:
    import ssl

    from octavo_operator.settings import RouterSettings

logger = logging.getLogger(__name__)

TIMEOUT_S = 2.0


class RouterFetch:
    """`routers.Fetch` over one aiohttp session. `tls`: from `router_tls`."""

    def __init__(
        self, session: aiohttp.ClientSession, router: RouterSettings, tls: RouterTls | None
    ) -> None:
        self._session = session
        self._headers = {"authorization": f"Bearer {router.token}"} if router.token else {}
        self._tls = tls
        # Pods are addressed by IP; their certificate is that of the Service.
        self._name = f"{router.service}.{router.namespace}.svc" if tls else None

    async def __call__(self, url: str) -> bytes:
        """Raises RouterUnreachable, or TimeoutError."""
        asking = self._session.get(
            url,
            headers=self._headers,
            ssl=self._tls.context if self._tls is not None else True,
            server_hostname=self._name,
            allow_redirects=False,  # the token is for routers
        )
        try:
            async with asking as answer:
                if answer.status in (401, 403):
                    raise RouterUnreachable("unauthorized", f"{url} answered {answer.status}")
                if answer.status != 200:
                    raise RouterUnreachable("bad_answer", f"{url} answered {answer.status}")
                return await answer.read()
        except aiohttp.ClientSSLError as error:
            raise RouterUnreachable("tls", str(error)) from error
        except aiohttp.ClientError as error:
            raise RouterUnreachable("unreachable", str(error) or type(error).__name__) from error


class RouterTls:
    """By which authority routers' certificates are checked; another one once its file is."""

    def __init__(self, router: RouterSettings) -> None:
        """Raises SettingsInvalid where the authority cannot be read."""
        self._file = router.tls_ca
        self._watch = FileWatch([self._file], refusal=TlsFileError, on_refusal=_warn)
        try:
            self._context = client_context(self._file)
        except TlsFileError as error:
            raise SettingsInvalid(f"--router-tls-ca: {error}") from None

    @property
    def context(self) -> ssl.SSLContext:
        """For connections from now on."""
        if self._watch.take(self._load):
            logger.info("Took the new authority of routers' certificates")
        return self._context

    def _load(self) -> None:
        self._context = client_context(self._file)


def _warn(error: Exception) -> None:
    logger.warning("Kept the old authority of routers' certificates: %s", error)


def router_tls(router: RouterSettings) -> RouterTls | None:
    """None for plain HTTP. Raises SettingsInvalid."""
    return RouterTls(router) if router.scheme == "https" else None
