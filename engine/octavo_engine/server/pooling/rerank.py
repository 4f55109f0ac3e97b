"""POST /rerank: documents in the order in which they fit a query, as Jina and Cohere answer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from octavo_engine.errors import InvalidRequest
from octavo_engine.server.http.errors import not_supported
from octavo_engine.server.http.exchange import Exchange  # noqa: TC001  (a route's signature)
from octavo_engine.server.pooling.bodies import RerankRequest
from octavo_engine.server.pooling.scoring import Sides, score_sides
from octavo_engine.server.pooling.work import begin, num_tokens
from octavo_engine.server.service import Service  # noqa: TC001

if TYPE_CHECKING:
    from octavo_engine.server.pooling.scoring import PairScores
    from octavo_engine.server.pooling.work import PreparedPooling


async def rerank(exchange: Exchange, service: Service) -> None:
    await exchange.reply(msgspec.json.encode(await _ranked(exchange, service)))


async def rerank_v2(exchange: Exchange, service: Service) -> None:
    """With what Cohere's clients read beside."""
    answer = await _ranked(exchange, service)
    answer["meta"] = {"api_version": {"version": "2"}, "billed_units": {"search_units": 1}}
    await exchange.reply(msgspec.json.encode(answer))


async def _ranked(exchange: Exchange, service: Service) -> dict[str, Any]:
    request = await exchange.json(RerankRequest)
    prepared = begin(exchange, service, request, "rerank")
    if request.top_n is not None and request.top_n < 0:
        raise InvalidRequest("top_n must not be negative; 0 means all", param="top_n")
    if request.rank_fields not in (None, [], ["text"]):
        raise not_supported("rank_fields", "documents are read by their text")
    if request.max_chunks_per_doc not in (None, 1):
        raise not_supported("max_chunks_per_doc", "documents are read as one piece")
    texts = [doc if isinstance(doc, str) else doc.text for doc in request.documents]
    sides = Sides(first=[request.query], second=texts, names=("query", "documents"))
    scores = await score_sides(exchange, service, prepared, request, sides)
    return _answer(prepared, request, texts, scores)


def _answer(
    prepared: PreparedPooling, request: RerankRequest, texts: list[str], scores: PairScores
) -> dict[str, Any]:
    # Equal scores keep the order of the request.
    order = sorted(range(len(texts)), key=lambda index: -scores.values[index])
    shown = order[: request.top_n] if request.top_n else order
    with_text = request.return_documents is not False
    count = num_tokens(scores.items)
    return {
        "id": prepared.id,
        "model": prepared.model,
        "usage": {"prompt_tokens": count, "total_tokens": count},
        "results": [
            {
                "index": index,
                "document": {"text": texts[index], "multi_modal": None} if with_text else None,
                "relevance_score": scores.values[index],
            }
            for index in shown
        ],
    }
