"""What a handler of the router's own routes gets and gives: `Inbound`, `Reply`, `Handler`.

The proxied routes do not pass through here: `proxy` relays them as bytes.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

RawHeaders: TypeAlias = Sequence[tuple[bytes, bytes]]  # as sent: order, case and repeats are kept


class Headers:
    """The header fields of a request. Looking one up walks the few there are."""

    __slots__ = ("raw",)

    def __init__(self, raw: RawHeaders = ()) -> None:
        self.raw = raw

    def get(self, name: str) -> str | None:
        """The first field of this name. Bytes outside ASCII come as Latin-1, as HTTP says."""
        wanted = name.encode()
        for key, value in self.raw:
            if len(key) == len(wanted) and key.lower() == wanted:
                return value.decode("latin-1")
        return None

    def __contains__(self, name: str) -> bool:
        return self.get(name) is not None


@dataclass(slots=True)
class Inbound:
    """One request for one of the router's own routes, whole."""

    method: str
    path: str  # without the query, as sent: nothing is unquoted
    query: str = ""
    headers: Headers = Headers()  # noqa: RUF009  # an empty one is never changed
    body: bytes = b""
    client: str = ""  # address of the peer; not what a header claims
    is_admin: bool = False  # it came by the listener that is for administrators

    def parameter(self, name: str) -> str | None:
        """The first value of a query parameter."""
        from urllib.parse import parse_qsl

        pairs = parse_qsl(self.query, keep_blank_values=True, max_num_fields=32)
        return next((value for key, value in pairs if key == name), None)


@dataclass(slots=True)
class Reply:
    """An answer. A `body` that is an iterator is streamed, and closed when the client goes away."""

    status: int = 200
    body: bytes | AsyncIterator[bytes] = b""
    content_type: str = "application/json"
    headers: Sequence[tuple[str, str]] = ()  # further ones; framing is not theirs to choose

    @classmethod
    def json(cls, value: Any, status: int = 200) -> Reply:
        return cls(status, json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode())


Handler: TypeAlias = Callable[[Inbound], Reply | Awaitable[Reply]]  # may raise errors.Refused
