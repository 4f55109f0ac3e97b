"""POST /score: how well each pair of texts fits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from octavo_engine.errors import InvalidRequest
from octavo_engine.server.http.exchange import Exchange  # noqa: TC001  (a route's signature)
from octavo_engine.server.pooling.bodies import ScoreRequest
from octavo_engine.server.pooling.scoring import Sides, score_sides
from octavo_engine.server.pooling.work import begin, reply_list, usage
from octavo_engine.server.service import Service  # noqa: TC001

if TYPE_CHECKING:
    from octavo_engine.server.pooling.bodies import Texts

PAIRS = (
    ("text_1", "text_2"),
    ("data_1", "data_2"),
    ("queries", "documents"),
    ("queries", "items"),
)


async def score(exchange: Exchange, service: Service) -> None:
    request = await exchange.json(ScoreRequest)
    prepared = begin(exchange, service, request, "score")
    scores = await score_sides(exchange, service, prepared, request, sides_of(request))
    entries = (
        msgspec.json.encode({"index": index, "object": "score", "score": value})
        for index, value in enumerate(scores.values)
    )
    await reply_list(exchange, prepared, entries, usage(scores.items))


def sides_of(request: ScoreRequest) -> Sides:
    """Raises InvalidRequest unless exactly one pair of names is given."""
    given = {name for pair in PAIRS for name in pair if getattr(request, name) is not None}
    for first, second in PAIRS:
        if given == {first, second}:
            return Sides(
                first=_texts(getattr(request, first)),
                second=_texts(getattr(request, second)),
                names=(first, second),
            )
    known = ", ".join(f"{first} and {second}" for first, second in PAIRS)
    shown = " and ".join(sorted(given)) or "none of them"
    raise InvalidRequest(f"give one of these pairs: {known}; got {shown}", param=PAIRS[0][0])


def _texts(given: Texts) -> list[str]:
    return [given] if isinstance(given, str) else given
