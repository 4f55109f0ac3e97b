"""POST /pooling: whatever the model gives for a text or each of its tokens, as it is."""

from __future__ import annotations

from octavo_engine.core.pooling import tokenize
from octavo_engine.server.http.exchange import Exchange  # noqa: TC001  (a route's signature)
from octavo_engine.server.pooling.bodies import PoolingBody
from octavo_engine.server.pooling.encoding import Encoding
from octavo_engine.server.pooling.items import text_items
from octavo_engine.server.pooling.vectors import reply_vectors
from octavo_engine.server.pooling.work import begin, choose, pool
from octavo_engine.server.service import Service  # noqa: TC001
from octavo_engine.state.pooling import PoolingParams

EMBEDS = ("embed", "token_embed")


async def pooling(exchange: Exchange, service: Service) -> None:
    request = await exchange.json(PoolingBody)
    prepared = begin(exchange, service, request, "pool")
    if request.task is not None:
        task = choose(service, request.task)
    else:
        task = choose(service, "token_embed", "token_classify", "embed", "classify", "score")
    params = PoolingParams(task=task, activate=request.activate, dimensions=request.dimensions)
    prefix = tokenize.prompt_of(service.engine.info, request.prompt_name) if task in EMBEDS else ""
    items = await text_items(service, request, prefix=prefix)
    rows = await pool(exchange, service, prepared, items, params)
    await reply_vectors(
        exchange, prepared, items, rows, Encoding.of(request), kind="pooling", field="data"
    )
