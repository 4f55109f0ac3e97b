"""The id that a client gives to its request in the body, where it gives none in a header."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from octavo_engine.errors import InvalidRequest
from octavo_engine.protocol.endpoints import REQUEST_ID_HEADER

if TYPE_CHECKING:
    from octavo_engine.server.http.exchange import Exchange

_ID = re.compile(r"[A-Za-z0-9_.:\-]{1,128}")


def adopt(exchange: Exchange, given: str | None) -> None:
    """The header's id wins. Raises InvalidRequest (param "request_id")."""
    if given is None:
        return
    if not _ID.fullmatch(given):
        raise InvalidRequest(
            "request_id must have 1 to 128 characters of A-Z a-z 0-9 _ . : -", param="request_id"
        )
    if not exchange.header(REQUEST_ID_HEADER.encode()):
        exchange.request_id = given
