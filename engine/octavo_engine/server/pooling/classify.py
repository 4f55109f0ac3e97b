"""POST /classify: how likely each of the model's labels is for a text."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from octavo_engine.server.http.exchange import Exchange  # noqa: TC001  (a route's signature)
from octavo_engine.server.pooling.bodies import ClassifyRequest
from octavo_engine.server.pooling.items import text_items
from octavo_engine.server.pooling.work import begin, choose, pool, reply_list, usage
from octavo_engine.server.service import Service  # noqa: TC001
from octavo_engine.state.pooling import PoolingParams

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray


async def classify(exchange: Exchange, service: Service) -> None:
    request = await exchange.json(ClassifyRequest)
    prepared = begin(exchange, service, request, "classify")
    params = PoolingParams(task=choose(service, "classify"), activate=request.activate)
    items = await text_items(service, request)
    rows = await pool(exchange, service, prepared, items, params)
    labels = service.engine.info.labels
    entries = (_entry(index, row, labels) for index, row in enumerate(rows))
    await reply_list(exchange, prepared, entries, usage(items))


def _entry(index: int, row: NDArray[np.float32], labels: Sequence[str]) -> bytes:
    best = int(row.argmax())
    return msgspec.json.encode(
        {
            "index": index,
            "label": labels[best] if best < len(labels) else None,
            "probs": row.tolist(),
            "num_classes": row.size,
        }
    )
