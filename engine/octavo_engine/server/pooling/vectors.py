"""Answers made of numbers, as JSON or as bytes: of embeddings and of pooling."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from octavo_engine.errors import InvalidRequest
from octavo_engine.server.pooling.work import reply_list, usage

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np
    from numpy.typing import NDArray

    from octavo_engine.core.pooling.async_pooling import PoolingItem
    from octavo_engine.server.http.exchange import Exchange
    from octavo_engine.server.pooling.encoding import Encoding
    from octavo_engine.server.pooling.work import PreparedPooling

_MAX_METADATA_BYTES = 32 * 2**10  # clients and proxies accept headers of about this size
_BYTES = (b"content-type", b"application/octet-stream")


async def reply_vectors(
    exchange: Exchange, prepared: PreparedPooling, items: list[PoolingItem],
    rows: list[NDArray[np.float32]],
    encoding: Encoding, *, kind: str, field: str,
) -> None:  # fmt: skip
    if encoding.is_binary:
        await _reply_bytes(exchange, prepared, items, rows, encoding)
        return
    middle = f',"object":"{kind}","{field}":'.encode()

    def entries() -> Iterator[bytes]:
        for index, row in enumerate(rows):
            yield b"".join((b'{"index":', b"%d" % index, middle, encoding.value(row), b"}"))

    await reply_list(exchange, prepared, entries(), usage(items))


async def _reply_bytes(
    exchange: Exchange, prepared: PreparedPooling, items: list[PoolingItem],
    rows: list[NDArray[np.float32]],
    encoding: Encoding,
) -> None:  # fmt: skip
    """The numbers of all texts one after the other; a header says where each begins."""
    headers = [_BYTES]
    if encoding.format == "bytes":
        metadata = msgspec.json.encode(
            {
                "id": prepared.id,
                "created": prepared.created,
                "model": prepared.model,
                "data": encoding.layout(rows),
                "usage": usage(items),
            }
        )
        if len(metadata) > _MAX_METADATA_BYTES:
            raise InvalidRequest(
                f"the layout of {len(rows)} texts does not fit a header; ask for "
                "encoding_format bytes_only, or send fewer texts",
                param="encoding_format",
            )
        headers.append((b"metadata", metadata))
    await exchange.reply(b"".join(map(encoding.pack, rows)), headers=headers)
