"""X-data-parallel-rank: which of several cores behind one API; clients cannot choose it here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo_engine.errors import InvalidRequest

if TYPE_CHECKING:
    from octavo_engine.server.http.exchange import Exchange

RANK_HEADER = b"x-data-parallel-rank"


def check_rank(exchange: Exchange, size: int) -> None:
    """Raises InvalidRequest, but for the rank of the only core."""
    given = exchange.header(RANK_HEADER)
    if size > 1:
        raise InvalidRequest(
            "x-data-parallel-rank cannot be chosen: the engine sends each request to the core that "
            "holds its prefix or has the least to do; leave the header out",
            param="x-data-parallel-rank",
            code="invalid_header",
        )
    if given != "0":
        raise InvalidRequest(
            f"x-data-parallel-rank must be 0: one engine answers here; got {given[:16]!r}",
            param="x-data-parallel-rank",
            code="invalid_header",
        )
