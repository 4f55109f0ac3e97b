"""POST /v1/embeddings: texts, token ids or a conversation in, one vector each out."""

from __future__ import annotations

from octavo_engine.core.pooling import tokenize
from octavo_engine.server.http.exchange import Exchange  # noqa: TC001  (a route's signature)
from octavo_engine.server.pooling.bodies import EmbeddingRequest
from octavo_engine.server.pooling.encoding import Encoding
from octavo_engine.server.pooling.items import text_items
from octavo_engine.server.pooling.long_texts import pool_texts
from octavo_engine.server.pooling.vectors import reply_vectors
from octavo_engine.server.pooling.work import begin, choose
from octavo_engine.server.service import Service  # noqa: TC001
from octavo_engine.state.pooling import PoolingParams


async def embeddings(exchange: Exchange, service: Service) -> None:
    request = await exchange.json(EmbeddingRequest)
    prepared = begin(exchange, service, request, "embd")
    task = choose(service, "embed")
    params = PoolingParams(task=task, activate=request.activate, dimensions=request.dimensions)
    prefix = tokenize.prompt_of(service.engine.info, request.prompt_name)
    items = await text_items(service, request, prefix=prefix)
    rows = await pool_texts(exchange, service, prepared, items, params)
    await reply_vectors(
        exchange, prepared, items, rows, Encoding.of(request), kind="embedding", field="embedding"
    )
