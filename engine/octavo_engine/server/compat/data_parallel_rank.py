"""X-data-parallel-rank: which of several engines behind one API; here there is one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo_engine.errors import InvalidRequest

if TYPE_CHECKING:
    from octavo_engine.server.http.exchange import Exchange

RANK_HEADER = b"x-data-parallel-rank"


def check_rank(exchange: Exchange) -> None:
    """Raises InvalidRequest for another rank than the one there is."""
    given = exchange.header(RANK_HEADER)
    if given != "0":
        raise InvalidRequest(
            f"x-data-parallel-rank must be 0: one engine answers here; got {given[:16]!r}",
            param="x-data-parallel-rank",
            code="invalid_header",
        )
