"""POST /v2/embed: embeddings in Cohere's shape, several number types at once."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from octavo_engine.errors import InvalidRequest
from octavo_engine.server.http.errors import not_supported
from octavo_engine.server.http.exchange import Exchange  # noqa: TC001  (a route's signature)
from octavo_engine.server.pooling.bodies import CohereEmbedRequest, PoolingFields
from octavo_engine.server.pooling.encoding import Encoding, signs
from octavo_engine.server.pooling.items import Truncation, check_count, encoded
from octavo_engine.server.pooling.prompts import prompt_of
from octavo_engine.server.pooling.work import begin, choose, num_tokens, pool
from octavo_engine.server.service import Service  # noqa: TC001
from octavo_engine.state.pooling import PoolingParams

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

_PLAIN = Encoding(endianness="little")


def _binary(row: NDArray[np.float32]) -> list[int]:
    values: list[int] = (signs(row).astype(np.int16) - 128).tolist()
    return values


WRITERS: dict[str, Callable[[NDArray[np.float32]], Any]] = {
    "float": lambda row: row.tolist(),
    "binary": _binary,
    "ubinary": lambda row: signs(row).tolist(),
    "base64": lambda row: base64.b64encode(_PLAIN.pack(row)).decode(),
}


async def cohere_embed(exchange: Exchange, service: Service) -> None:
    request = await exchange.json(CohereEmbedRequest)
    fields = PoolingFields(model=request.model, priority=request.priority)
    prepared = begin(exchange, service, fields, "embd")
    types = _types(request)
    task = choose(service, "embed")
    texts = _texts(request)
    check_count(len(texts), service.settings.limits.max_pooling_items, "texts")
    info = service.engine.info
    prompt = prompt_of(info, request.input_type)
    items = await encoded(
        service.engine.tokenizer,
        [prompt + text for text in texts],
        special=True,
        cut=_cut(request, info.max_model_len),
    )
    params = PoolingParams(task=task, dimensions=request.output_dimension)
    rows = await pool(exchange, service, prepared, items, params)
    await exchange.reply(
        msgspec.json.encode(
            {
                "id": prepared.id,
                "embeddings": {kind: [WRITERS[kind](row) for row in rows] for kind in types},
                "texts": texts,
                "meta": {
                    "api_version": {"version": "2"},
                    "billed_units": {"input_tokens": num_tokens(items)},
                },
                "response_type": "embeddings_by_type",
            }
        )
    )


def _types(request: CohereEmbedRequest) -> list[str]:
    types = list(dict.fromkeys(request.embedding_types or ["float"]))
    for kind in types:
        if kind not in WRITERS:
            known = ", ".join(WRITERS)
            raise not_supported("embedding_types", f"{kind} needs calibration; there are {known}")
    return list(types)


def _texts(request: CohereEmbedRequest) -> list[str]:
    """Raises InvalidRequest, or not_supported for pictures."""
    if request.images:
        raise not_supported("images", "this model reads text only")
    if (request.texts is None) == (request.inputs is None):
        raise InvalidRequest("give either texts or inputs", param="texts")
    param = "texts"
    texts = request.texts
    if texts is None:
        param, texts = "inputs", []
        for item in request.inputs or ():
            for part in item.content:
                if part.type != "text" or part.text is None:
                    raise not_supported("inputs", "this model reads content of type text only")
            texts.append("\n".join(part.text or "" for part in item.content))
    if not texts or not all(texts):
        raise InvalidRequest(f"{param} needs at least one text, and none may be empty", param=param)
    return texts


def _cut(request: CohereEmbedRequest, max_model_len: int) -> Truncation:
    """Cohere cuts at the end by default."""
    keep = max_model_len
    if request.max_tokens is not None:
        if request.max_tokens < 1:
            raise InvalidRequest("max_tokens must be at least 1", param="max_tokens")
        keep = min(keep, request.max_tokens)
    match request.truncate:
        case "NONE":
            return Truncation()
        case "START":
            return Truncation(keep, "left")
        case _:
            return Truncation(keep, "right")
