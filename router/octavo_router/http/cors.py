"""CORS: which pages in browsers may call the router, and the headers that allow it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from octavo_router.errors import Rejected
from octavo_router.http.messages import Inbound, Reply

if TYPE_CHECKING:
    from collections.abc import Sequence

    from octavo_router.config.settings import ServerConfig

_MAX_AGE_S: Final = 600
_EXPOSED: Final = "x-request-id, request-id, x-error-code, x-served-by, retry-after"
_ORIGIN: Final = b"origin"
_METHOD: Final = "access-control-request-method"
_HEADERS: Final = "access-control-request-headers"


class Cors:
    """By the settings of the server."""

    def __init__(self, config: ServerConfig) -> None:
        self._origins = frozenset(config.allowed_origins)
        self._methods = config.allowed_methods
        self._headers = frozenset(name.lower() for name in config.allowed_headers)
        self._has_credentials = config.allow_credentials

    def answer_lines(self, fields: Sequence[tuple[bytes, bytes]]) -> bytes:
        """What every answer has to a request with these fields; names are in lower case."""
        origin = next((value for name, value in fields if name == _ORIGIN), b"")
        if not origin:
            return b""
        if not self._allows(origin.decode("latin-1")):
            return b"vary: origin\r\n"
        named = b"*" if "*" in self._origins else origin
        lines = b"access-control-allow-origin: %b\r\n" % named
        if named != b"*":
            lines += b"vary: origin\r\n"
        if self._has_credentials:
            lines += b"access-control-allow-credentials: true\r\n"
        return lines + f"access-control-expose-headers: {_EXPOSED}\r\n".encode()

    def preflight(self, request: Inbound) -> Reply:
        """What a page may ask for. Its key is not with it: this comes before. Raises Rejected."""
        headers = request.headers
        if not self._allows(headers.get("origin") or ""):
            raise _refusal("server.allowed_origins", "origin")
        method = headers.get(_METHOD) or ""
        if "*" not in self._methods and method not in self._methods:
            raise _refusal("server.allowed_methods", _METHOD)
        requested = headers.get(_HEADERS) or ""
        names = {name.strip().lower() for name in requested.split(",") if name.strip()}
        if "*" not in self._headers and not names <= self._headers:
            raise _refusal("server.allowed_headers", _HEADERS)
        allowed = [
            ("access-control-allow-methods", method),
            ("access-control-max-age", str(_MAX_AGE_S)),
        ]
        if requested:
            allowed.append(("access-control-allow-headers", requested))
        return Reply(204, headers=allowed)

    def _allows(self, origin: str) -> bool:
        return bool(origin) and ("*" in self._origins or origin in self._origins)


def is_preflight(method: str, fields: Sequence[tuple[bytes, bytes]]) -> bool:
    names = {name for name, _ in fields} if method == "OPTIONS" else set()
    return {_ORIGIN, _METHOD.encode()} <= names


def _refusal(setting: str, param: str) -> Rejected:
    message = f"This origin is not allowed to make this request; see {setting}."
    return Rejected(400, "invalid_header", message, param=param)
