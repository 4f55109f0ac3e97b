"""POST …/render: what the endpoint would hand to the engine, tokens and parameters, without a run.

The answer is what /inference/v1/generate takes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from octavo_engine.server.http.errors import not_supported
from octavo_engine.server.http.exchange import Exchange  # noqa: TC001  (a route's signature)
from octavo_engine.server.openai.chat.prepare import prepare_chat
from octavo_engine.server.openai.completions import prepare_completion
from octavo_engine.server.openai.schemas import ChatCompletionRequest, CompletionRequest
from octavo_engine.server.service import Service  # noqa: TC001

if TYPE_CHECKING:
    from octavo_engine.server.generation.job import Job
    from octavo_engine.server.openai.schemas import SamplingFields

# What the answer cannot say in a way that the engine's own parameters would be read back from.
_INNER = ("grammar", "shown_special_ids", "bad_words_token_ids", "detokenize")
_OUTER = ("response_format", "structured_outputs")


class RenderAnswer(msgspec.Struct, kw_only=True):
    """One prompt, ready for the engine."""

    request_id: str
    token_ids: list[int]
    sampling_params: dict[str, Any]
    model: str
    stream: bool
    stream_options: dict[str, Any] | None
    cache_salt: str | None
    priority: int
    features: None = None
    kv_transfer_params: None = None


async def render_completion(exchange: Exchange, service: Service) -> None:
    """One entry a prompt."""
    request = await exchange.json(CompletionRequest)
    _check(request)
    prepared = await prepare_completion(exchange, service, request)
    await exchange.reply(msgspec.json.encode(_rendered(request, prepared.model, prepared.job)))


async def render_chat(exchange: Exchange, service: Service) -> None:
    request = await exchange.json(ChatCompletionRequest)
    _check(request)
    prepared = await prepare_chat(exchange, service, request)
    await exchange.reply(msgspec.json.encode(_rendered(request, prepared.model, prepared.job)[0]))


def _check(request: SamplingFields) -> None:
    """Raises RequestError."""
    if request.return_token_offsets:
        raise not_supported("return_token_offsets", "token ids are returned without offsets")


def _rendered(request: SamplingFields, model: str, job: Job) -> list[RenderAnswer]:
    params = msgspec.to_builtins(job.params)
    params["max_tokens"] = job.params.max_tokens  # whose default is another one there
    for name in _INNER:
        params.pop(name, None)
    for name in _OUTER:
        if getattr(request, name, None) is not None:
            params[name] = msgspec.to_builtins(getattr(request, name))
    options = request.stream_options
    many = len(job.prompts) > 1
    return [
        RenderAnswer(
            request_id=f"{job.request_id}-{number}" if many else job.request_id,
            token_ids=ids,
            sampling_params=params,
            model=model,
            stream=bool(request.stream),
            stream_options=None if options is None else msgspec.to_builtins(options),
            cache_salt=job.cache_salt or None,
            priority=job.priority,
        )
        for number, ids in enumerate(job.prompts)
    ]
