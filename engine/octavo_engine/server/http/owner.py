"""Whose a request is, for what the engine keeps and limits by tenant."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from octavo_engine.protocol.endpoints import OWNER_HEADER
from octavo_engine.server.http.auth import given_key

if TYPE_CHECKING:
    from octavo_engine.server.http.auth import Guard
    from octavo_engine.server.http.exchange import Exchange


def owner_of(exchange: Exchange, guard: Guard) -> bytes:
    """Of a request, by its key and the tenant that a router names: a digest.

    Behind a router all requests have the router's key. Where there is neither, all are one.
    """
    tenant = exchange.header(OWNER_HEADER.encode())
    key = ""
    if guard.keys.is_required:
        key = given_key(exchange.header(b"authorization"), exchange.header(b"x-api-key"))
    elif not tenant:
        return b""
    whole = f"{key}\0{tenant}" if tenant else key
    return hashlib.blake2b(whole.encode(), digest_size=16).digest()
