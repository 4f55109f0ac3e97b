"""Pictures that requests name by https: URLs, from hosts that the operator allows.

A host is resolved once a hop, all its addresses must be public, and the connection goes to one of
these addresses: a name that changes between check and connection changes nothing.
"""

from __future__ import annotations

import asyncio
import logging
import re
import socket
import ssl
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import quote, urljoin, urlsplit

from octavo_common.tls import client_context
from octavo_engine.core.media.addresses import is_public
from octavo_engine.core.media.response import BadResponse, PictureResponse
from octavo_engine.errors import InvalidRequest, QueueFull

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from octavo_engine.core.media.budget import ByteBudget
    from octavo_engine.models.vision_config import MediaKind

logger = logging.getLogger(__name__)

ANY_HOST = "*"
TIMEOUT_S = 10.0  # of one picture, redirects included
MAX_REDIRECTS = 3
MAX_AT_ONCE = 16
MAX_WAITING = 256
_REDIRECTS = (301, 302, 303, 307, 308)
_UNFIT = re.compile(r"[\x00-\x20\x7f\\]")
_INSTEAD = "send the file itself, as a data: URL"


class _Target(NamedTuple):
    """Where one hop goes."""

    host: str
    port: int
    path: str

    @property
    def authority(self) -> str:
        name = f"[{self.host}]" if ":" in self.host else self.host
        return name if self.port == 443 else f"{name}:{self.port}"


class PictureFetcher:
    """Of one server. `_is_allowed` and `_context` are for tests, which have no public address."""

    def __init__(
        self,
        hosts: Sequence[str],
        *,
        _is_allowed: Callable[[str], bool] = is_public,
        _context: ssl.SSLContext | None = None,
        _timeout_s: float = TIMEOUT_S,
    ) -> None:
        self._hosts = frozenset(host.lower().rstrip(".") for host in hosts)
        self._is_allowed = _is_allowed
        self._context = _context
        self._timeout_s = _timeout_s
        self._slots = asyncio.Semaphore(MAX_AT_ONCE)
        self._num_waiting = 0
        # A resolver that hangs must not take the threads of others.
        self._resolvers = ThreadPoolExecutor(4, "octavo-resolve")

    async def fetch(
        self, url: str, param: str, budget: ByteBudget, kind: MediaKind = "image"
    ) -> bytes:
        """The file. Raises RequestError that names `param`."""
        if self._num_waiting >= MAX_WAITING:
            raise QueueFull(f"{MAX_WAITING} files are waiting to be fetched", retry_after_s=1)
        self._num_waiting += 1
        try:
            async with self._slots, asyncio.timeout(self._timeout_s):
                return await self._follow(url, param, budget, kind)
        except TimeoutError:
            raise _failed(param, f"it takes longer than {self._timeout_s:g} s") from None
        except BadResponse as error:
            raise _failed(param, str(error)) from None
        except ssl.SSLError as error:
            logger.info("Pictures: %s: %s", param, error)
            is_untrusted = isinstance(error, ssl.SSLCertVerificationError)
            why = "has no certificate that this server trusts" if is_untrusted else "fails at TLS"
            raise _failed(param, f"its host {why}") from None
        except OSError as error:
            logger.info("Pictures: %s: %s", param, error)
            raise _failed(param, "its host does not answer") from None
        finally:
            self._num_waiting -= 1

    async def _follow(self, url: str, param: str, budget: ByteBudget, kind: MediaKind) -> bytes:
        for _ in range(MAX_REDIRECTS + 1):
            target = self._target(url, param)
            found = await self._request(target, param, budget, kind)
            if isinstance(found, bytes):
                return found
            try:
                url = urljoin(url, found)
            except ValueError:
                raise BadResponse("it redirects to nowhere") from None
        raise _failed(param, f"it redirects more than {MAX_REDIRECTS} times")

    async def _request(
        self, target: _Target, param: str, budget: ByteBudget, kind: MediaKind
    ) -> bytes | str:
        """The file, or where it redirects to."""
        reader, writer = await self._connect(target, await self._resolve(target, param))
        try:
            lines = (
                f"GET {target.path} HTTP/1.1", f"Host: {target.authority}", "User-Agent: octavo",
                f"Accept: {kind}/*", "Accept-Encoding: identity", "Connection: close",
            )  # fmt: skip
            writer.write("\r\n".join((*lines, "", "")).encode("ascii"))
            response = PictureResponse(reader)
            await response.read_head()
            if response.status in _REDIRECTS:
                return _location(response)
            _check_head(response, kind)
            return await response.read_body(budget, param)
        finally:
            writer.transport.abort()

    def _target(self, url: str, param: str) -> _Target:
        """Raises InvalidRequest for what is not an https: URL of an allowed host."""
        try:
            if _UNFIT.search(url):
                raise ValueError
            parts = urlsplit(url)
            port = parts.port or 443
            host = (parts.hostname or "").rstrip(".").encode("idna").decode("ascii").lower()
            if (not host or "@" in parts.netloc) and parts.scheme == "https":
                raise ValueError
            path = quote(parts.path or "/", safe="/%:@!$&'()*+,;=~")
            query = quote(parts.query, safe="/%:@!$&'()*+,;=~?")
        except ValueError:  # UnicodeError is one
            raise InvalidRequest(
                f"{param} must look like https://host/picture.png, without spaces and passwords",
                param=param,
            ) from None
        if parts.scheme != "https":
            raise _failed(param, f"it leads to {parts.scheme[:20]!r}; only https is followed")
        if ANY_HOST not in self._hosts and host not in self._hosts:
            raise _failed(param, f"{host[:255]} is not among --allowed-media-domains")
        return _Target(host, port, f"{path}?{query}" if parts.query else path)

    async def _resolve(self, target: _Target, param: str) -> list[str]:
        """Its addresses. Raises InvalidRequest unless all may be connected to."""
        try:
            found = await asyncio.get_running_loop().run_in_executor(
                self._resolvers,
                lambda: socket.getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM),
            )
        except (OSError, UnicodeError):
            raise _failed(param, "its host has no address") from None
        addresses = list(dict.fromkeys(str(entry[4][0]) for entry in found))
        if not all(map(self._is_allowed, addresses)):
            logger.warning("Pictures: %s is at %s, refused", target.host, ", ".join(addresses))
            raise _failed(param, f"{target.host} is not at a public address")
        return addresses

    async def _connect(
        self, target: _Target, addresses: Sequence[str]
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """To the first that answers. Raises OSError."""
        if self._context is None:
            self._context = client_context()
        failed: OSError | None = None
        for address in addresses:
            try:
                return await asyncio.open_connection(
                    address, target.port, ssl=self._context, server_hostname=target.host
                )
            except ssl.SSLError:
                raise
            except OSError as error:
                failed = error
        raise failed or OSError("no address")


def _location(response: PictureResponse) -> str:
    location = response.headers.get(b"location", b"")
    try:
        text = location.decode("utf-8")
    except UnicodeDecodeError:
        text = ""
    if not text:
        raise BadResponse("it redirects to nowhere")
    return text


def _check_head(response: PictureResponse, wanted: MediaKind) -> None:
    """Raises BadResponse for what is not the file of a picture or a sound."""
    if response.status != 200:
        raise BadResponse(f"its host answers {response.status}")
    kind = response.headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
    if not kind.startswith(f"{wanted}/".encode()):
        name = kind.decode("latin-1")[:50] or "no content type"
        raise BadResponse(f"its host sends {name!r}; it must be {wanted}/*")
    if response.headers.get(b"content-encoding", b"identity").lower() != b"identity":
        raise BadResponse("its host compresses the response")


def _failed(param: str, why: str) -> InvalidRequest:
    return InvalidRequest(f"{param}: the file cannot be fetched: {why}; {_INSTEAD}", param=param)
