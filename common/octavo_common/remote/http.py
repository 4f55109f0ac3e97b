"""A small blocking HTTP client: redirects without leaking credentials, proxies, and deadlines.

Nothing but the standard library: fetching runs in threads, where an event loop would be in the way.
"""

from __future__ import annotations

import http.client
import ipaddress
import json
import os
import socket
import ssl
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self
from urllib.parse import SplitResult, urljoin, urlsplit

from octavo_common.remote.errors import FetchError, FetchReason, Passing, of_status

# (method, URL, headers) → the headers that prove who asks. For the first origin only.
Sign = Callable[[str, str, Mapping[str, str]], Mapping[str, str]]
# An iterable is iterated again after a redirect, and needs a content-length among the headers.
Body = bytes | Iterable[bytes]

MAX_REDIRECTS = 5
MAX_TEXT_BYTES = 32 * 2**20  # of listings and manifests
_REDIRECTS = frozenset((301, 302, 303, 307, 308))
_BLOCK_BYTES = 2**18


@dataclass(slots=True)
class HttpResponse:
    """Use as a context manager; `read` until it gives nothing."""

    status: int
    headers: Mapping[str, str]  # names in lower case
    url: str  # after redirects
    _response: http.client.HTTPResponse = field(repr=False)
    _connection: http.client.HTTPConnection = field(repr=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._response.close()  # it has the socket where the server ends the connection
        self._connection.close()

    def read(self) -> bytes:
        """The next block; b"" at the end. Raises Passing where it breaks off or stands still."""
        try:
            return self._response.read1(_BLOCK_BYTES)
        except TimeoutError:
            raise Passing(f"{_host(self.url)} sent nothing for a while") from None
        except (OSError, http.client.HTTPException) as error:
            raise Passing(f"the connection to {_host(self.url)} broke: {_say(error)}") from None

    def text(self, *, max_bytes: int = MAX_TEXT_BYTES) -> bytes:
        """All of a listing or manifest, or of what is not larger than `max_bytes`."""
        blocks, size = [], 0
        while block := self.read():
            blocks.append(block)
            size += len(block)
            if size > max_bytes:
                raise FetchError(FetchReason.FAILED, f"{_host(self.url)} sent more than it should")
        length = self.headers.get("content-length", "")
        if length.isdigit() and size < int(length):
            raise Passing(f"the connection to {_host(self.url)} broke off")
        return b"".join(blocks)

    @property
    def retry_after_s(self) -> float | None:
        value = self.headers.get("retry-after", "")
        return float(value) if value.isdigit() else None


class Http:
    """`stall_s`: how long a server may be silent. Safe to use from many threads."""

    def __init__(
        self,
        *,
        stall_s: float = 30.0,
        environ: Mapping[str, str] = os.environ,
        allow_link_local: bool = False,
    ) -> None:
        self._stall_s = stall_s
        self._environ = environ
        self._allow_link_local = allow_link_local
        self._tls: ssl.SSLContext | None = None

    def open(
        self,
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        sign: Sign | None = None,
        method: str = "GET",
        body: Body | None = None,
    ) -> HttpResponse:
        """Whatever the status. Raises Passing where nobody answers, FetchError for a redirect that
        may not be followed."""
        origin = _origin(urlsplit(url))
        for _ in range(MAX_REDIRECTS + 1):
            parts = _check(url)
            sent = {"accept-encoding": "identity", "user-agent": "octavo", **(headers or {})}
            if sign is not None and _origin(parts) == origin:
                sent |= sign(method, url, sent)
            answer = self._send(method, url, parts, sent, body)
            location = answer.headers.get("location")
            if answer.status not in _REDIRECTS or not location:
                return answer
            answer.close()
            target = urljoin(url, location)
            if parts.scheme == "https" and urlsplit(target).scheme != "https":
                raise FetchError(
                    FetchReason.FAILED,
                    f"{_host(url)} redirects from https to {target[:200]}; refused",
                )
            url = target
            if answer.status == 303:
                method, body = "GET", None
        raise FetchError(
            FetchReason.FAILED, f"{_host(url)} redirects more than {MAX_REDIRECTS} times"
        )

    def get(
        self,
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        sign: Sign | None = None,
        hint: str = "",
        what: str = "",
    ) -> tuple[bytes, Mapping[str, str]]:
        """Body and headers of a 200. Raises FetchError for all else."""
        with self.open(url, headers=headers, sign=sign) as answer:
            if answer.status == 200:
                return answer.text(), answer.headers
            raise of_status(answer.status, what or url, hint=hint, after_s=answer.retry_after_s)

    def _send(
        self, method: str, url: str, parts: SplitResult, headers: Mapping[str, str], body: Any
    ) -> HttpResponse:
        self._refuse_link_local(str(parts.hostname), url)
        connection, target = self._connection(parts, url)
        try:
            connection.connect()
            if isinstance(connection.sock, socket.socket):  # what a name stands for shows here
                self._refuse_link_local(connection.sock.getpeername()[0], url)
            connection.request(method, target, body=body, headers=dict(headers))
            response = connection.getresponse()
        except TimeoutError:
            connection.close()
            raise Passing(f"{_host(url)} does not answer") from None
        except ssl.SSLCertVerificationError as error:
            connection.close()
            raise FetchError(
                FetchReason.UNREACHABLE,
                f"the certificate of {_host(url)} is not trusted: {error.verify_message}; set "
                "SSL_CERT_FILE to its authority",
            ) from None
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise Passing(
                f"{_host(url)} cannot be reached: {_say(error)}; check address, DNS and proxy"
            ) from None
        except BaseException:
            connection.close()
            raise
        fields = {name.lower(): value for name, value in response.getheaders()}
        return HttpResponse(response.status, fields, url, response, connection)

    def _connection(self, parts: SplitResult, url: str) -> tuple[http.client.HTTPConnection, str]:
        """Direct, or through the proxy that the environment names."""
        host, port = str(parts.hostname), parts.port
        target = parts._replace(scheme="", netloc="", fragment="").geturl() or "/"
        proxy = self._proxy(parts)
        kind = http.client.HTTPConnection
        if parts.scheme != "https":
            if proxy is None:
                return kind(host, port or 80, timeout=self._stall_s), target
            return kind(str(proxy.hostname), proxy.port or 80, timeout=self._stall_s), url
        if self._tls is None:
            self._tls = ssl.create_default_context()
        if proxy is None:
            return (
                http.client.HTTPSConnection(
                    host, port or 443, timeout=self._stall_s, context=self._tls
                ),
                target,
            )
        tunnel = http.client.HTTPSConnection(
            str(proxy.hostname), proxy.port or 80, timeout=self._stall_s, context=self._tls
        )
        tunnel.set_tunnel(host, port or 443)
        return tunnel, target

    def _proxy(self, parts: SplitResult) -> SplitResult | None:
        name = f"{parts.scheme}_proxy"
        named = self._environ.get(name) or self._environ.get(name.upper())
        skipped = self._environ.get("no_proxy") or self._environ.get("NO_PROXY") or ""
        bypass: Any = getattr(urllib.request, "proxy_bypass_environment")  # noqa: B009  # untyped
        if not named or bypass(str(parts.hostname), {"no": skipped}):
            return None
        return urlsplit(named if "://" in named else f"http://{named}")

    def _refuse_link_local(self, host: str, url: str) -> None:
        """NOTE: the metadata servers of clouds live there, and give keys to whoever asks."""
        if self._allow_link_local:
            return
        try:
            peer = ipaddress.ip_address(host.partition("%")[0])
        except ValueError:
            return
        mapped = getattr(peer, "ipv4_mapped", None)
        if (mapped or peer).is_link_local:
            raise FetchError(
                FetchReason.FAILED,
                f"{_host(url)} is a link-local address; nothing is fetched there",
            )


def json_object(content: bytes, what: str) -> dict[str, Any]:
    try:
        fields = json.loads(content)
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict):
        raise FetchError(FetchReason.FAILED, f"{what} is not JSON as it should be")
    return fields


def _check(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        parts = SplitResult("", "", "", "", "")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise FetchError(FetchReason.FAILED, f"{url[:200]} is not an address of http or https")
    if any(ord(character) <= 32 or ord(character) == 127 for character in url):
        raise FetchError(FetchReason.FAILED, f"{url[:200]!r} has spaces or control characters")
    return parts


def _origin(parts: SplitResult) -> tuple[str, str | None, int | None]:
    return parts.scheme, parts.hostname, parts.port or {"http": 80, "https": 443}.get(parts.scheme)


def _host(url: str) -> str:
    return urlsplit(url).hostname or url[:200]


def _say(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
