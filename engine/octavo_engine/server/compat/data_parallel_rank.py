"""X-data-parallel-rank: which of several cores behind one API a request goes to."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo_engine.errors import InvalidRequest

if TYPE_CHECKING:
    from octavo_engine.server.http.exchange import Exchange

RANK_HEADER = b"x-data-parallel-rank"


def read_rank(exchange: Exchange, size: int) -> int | None:
    """None: the engine chooses. Raises InvalidRequest where none of `size` cores is named so."""
    if RANK_HEADER not in exchange.headers:
        return None
    given = exchange.header(RANK_HEADER)
    if given in map(str, range(size)):
        return int(given)
    name = RANK_HEADER.decode()
    if size == 1:
        message = f"{name} must be 0: one engine core answers here"
    else:
        message = (
            f"{name} must be a number from 0 to {size - 1}; leave it out, and the engine chooses "
            "the core that holds the prompt's prefix or has the least to do"
        )
    raise InvalidRequest(f"{message}; got {given[:16]!r}", param=name, code="invalid_header")
