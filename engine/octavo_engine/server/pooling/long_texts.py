"""Vectors of texts that are longer than the model reads: of their pieces, the mean by length.

As vLLM's chunked processing has it, but that each piece of a text stands between the model's
special tokens, as the text itself would: a model that looks at [CLS] finds one in each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from octavo_engine.core.pooling.async_pooling import PoolingItem
from octavo_engine.errors import ContextLengthExceeded
from octavo_engine.server.pooling.work import pool

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from octavo_engine.server.http.exchange import Exchange
    from octavo_engine.server.pooling.work import PreparedPooling
    from octavo_engine.server.service import Service
    from octavo_engine.state.pooling import PoolingParams

_UNIT = 1e-3  # how far from 1 the length of a vector may be that was normalised


class TextPiece(NamedTuple):
    """Of a text: what is computed, and how many of its tokens are the text's own."""

    item: PoolingItem
    weight: int


async def pool_texts(
    exchange: Exchange, service: Service, prepared: PreparedPooling, items: list[PoolingItem],
    params: PoolingParams,
) -> list[NDArray[np.float32]]:  # fmt: skip
    """One vector an item; longer ones than the model reads where --max-embed-len allows it. Raises
    RequestError."""
    room, longest = service.engine.info.max_model_len, service.settings.limits.max_embed_len
    if longest <= room or all(len(item.token_ids) <= room for item in items):
        return await pool(exchange, service, prepared, items, params)
    for item in items:
        if len(item.token_ids) > longest:
            raise ContextLengthExceeded(
                f"a text has {len(item.token_ids)} tokens, but at most {longest} are taken here "
                "(--max-embed-len); shorten it, or ask for truncation",
                param="input",
            )
    special = service.engine.tokenizer.encode("")
    cut = [pieces_of(item.token_ids, room, special) for item in items]
    rows = iter(
        await pool(exchange, service, prepared, [one.item for part in cut for one in part], params)
    )
    return [joined([next(rows) for _ in part], [one.weight for one in part]) for part in cut]


def pieces_of(ids: list[int], room: int, special: Sequence[int]) -> list[TextPiece]:
    """Pieces of at most `room` tokens. `special` is what the tokenizer writes around nothing: where
    it stands around the text it stands around each piece."""
    if len(ids) <= room:
        return [TextPiece(PoolingItem(ids), len(ids))]
    head = _num_common(ids, special)
    tail = list(special[head:])
    if ids[len(ids) - len(tail) :] != tail or len(special) >= room:
        head, tail = 0, []  # a client's own ids, say: they are cut as they are
    inside = ids[head : len(ids) - len(tail)]
    size = room - head - len(tail)
    parts = [inside[start : start + size] for start in range(0, len(inside), size)]
    return [TextPiece(PoolingItem([*ids[:head], *part, *tail]), len(part)) for part in parts]


def joined(rows: list[NDArray[np.float32]], weights: list[int]) -> NDArray[np.float32]:
    """The mean, each piece counting as its tokens do; of unit length if all pieces are."""
    if len(rows) == 1:
        return rows[0]
    wide = np.stack(rows).astype(np.float64)
    mean = np.average(wide, axis=0, weights=weights)
    norm = float(np.linalg.norm(mean))
    if norm > 0.0 and (np.abs(np.linalg.norm(wide, axis=1) - 1.0) < _UNIT).all():
        mean /= norm
    return np.asarray(mean, dtype=np.float32)


def _num_common(ids: Sequence[int], special: Sequence[int]) -> int:
    """How many of the special tokens the text begins with."""
    count = 0
    while count < len(special) and ids[count] == special[count]:
        count += 1
    return count
