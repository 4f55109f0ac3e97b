"""GET and POST /ping, POST /invocations: the two paths that SageMaker calls."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from octavo_engine.errors import InvalidRequest, RequestError
from octavo_engine.server.admin.probes import health
from octavo_engine.server.compat.token_generate import token_generate
from octavo_engine.server.http.exchange import Exchange  # noqa: TC001  (a route's signature)
from octavo_engine.server.openai.chat.endpoint import chat_completions
from octavo_engine.server.openai.completions import completions
from octavo_engine.server.pooling.classify import classify
from octavo_engine.server.pooling.cohere_embed import cohere_embed
from octavo_engine.server.pooling.embeddings import embeddings
from octavo_engine.server.pooling.pooling import pooling
from octavo_engine.server.pooling.rerank import rerank
from octavo_engine.server.pooling.score import PAIRS, score
from octavo_engine.server.service import Service  # noqa: TC001

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    Handler = Callable[[Exchange, Service], Awaitable[None]]


async def ping(exchange: Exchange, service: Service) -> None:
    await health(exchange, service)


async def invocations(exchange: Exchange, service: Service) -> None:
    """The endpoint that takes bodies of this shape answers."""
    body = await exchange.body()
    fields = await exchange.shape(body)
    handler = handler_of(fields, service.engine.info.tasks)
    inner = exchange.again(body)
    try:
        await handler(inner, service)
    except RequestError as error:  # here, for only the inner one knows whether a stream began
        await inner.refuse(error)
    finally:
        exchange.status = inner.status


def handler_of(fields: Any, tasks: Sequence[str]) -> Handler:
    """Raises InvalidRequest for a body of no known shape."""
    if isinstance(fields, dict):
        for names, handler in _SHAPES:
            if all(name in fields for name in names):
                return handler
        if "messages" in fields and "generate" in tasks:
            return chat_completions
        if "input" in fields or "messages" in fields:
            return _of_input(fields, tasks)
    raise InvalidRequest(
        "the body has the shape of no endpoint: give messages, prompt, token_ids, input, texts, "
        "query with documents, or text_1 with text_2"
    )


def _of_input(fields: Mapping[str, Any], tasks: Sequence[str]) -> Handler:
    if "task" in fields:
        return pooling
    if "embed" in tasks:
        return embeddings
    return classify if "classify" in tasks else pooling


_SHAPES: tuple[tuple[tuple[str, ...], Handler], ...] = (
    (("prompt",), completions),
    (("token_ids",), token_generate),
    (("query", "documents"), rerank),
    *((pair, score) for pair in PAIRS),
    (("texts",), cohere_embed),
    (("inputs",), cohere_embed),
)
