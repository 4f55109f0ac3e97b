"""Reads a router's state over HTTP or HTTPS with a token, and classifies failures."""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING

import aiohttp

from octavo_operator.errors import SettingsInvalid
from octavo_operator.routers.poller import RouterUnreachable

if TYPE_CHECKING:
    from octavo_operator.settings import RouterSettings

TIMEOUT_S = 2.0


class RouterFetch:
    """`routers.Fetch` over one aiohttp session. `tls`: from `router_tls`."""

    def __init__(
        self, session: aiohttp.ClientSession, router: RouterSettings, tls: ssl.SSLContext | None
    ) -> None:
        self._session = session
        self._headers = {"authorization": f"Bearer {router.token}"} if router.token else {}
        self._tls = tls or True
        # Pods are addressed by IP; their certificate is that of the Service.
        self._name = f"{router.service}.{router.namespace}.svc" if tls else None

    async def __call__(self, url: str) -> bytes:
        """Raises RouterUnreachable, or TimeoutError."""
        asking = self._session.get(
            url,
            headers=self._headers,
            ssl=self._tls,
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


def router_tls(router: RouterSettings) -> ssl.SSLContext | None:
    """Raises SettingsInvalid where the authority cannot be read."""
    if router.scheme != "https":
        return None
    try:
        return ssl.create_default_context(cafile=router.tls_ca or None)
    except ssl.SSLError:
        raise SettingsInvalid(f"--router-tls-ca: {router.tls_ca} holds no certificate") from None
    except OSError as error:
        raise SettingsInvalid(f"--router-tls-ca: {router.tls_ca}: {error.strerror}") from None
