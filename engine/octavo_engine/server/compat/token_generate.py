"""POST /inference/v1/generate: token ids in, token ids out, for callers with a tokenizer."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from octavo_engine.core.pooling.async_pooling import check_task
from octavo_engine.errors import RequestError
from octavo_engine.server.compat.unsupported_fields import refuse_unsupported
from octavo_engine.server.generation import job as generation
from octavo_engine.server.generation.logprobs import chat_logprobs, prompt_logprobs
from octavo_engine.server.generation.params import check_sizes, sampling_params
from octavo_engine.server.generation.sse_writer import sse_sink
from octavo_engine.server.generation.structured import grammar_of, wants_grammar
from octavo_engine.server.generation.usage import Usage
from octavo_engine.server.http.errors import not_supported
from octavo_engine.server.http.exchange import Exchange  # noqa: TC001  (a route's signature)
from octavo_engine.server.http.request_ids import adopt
from octavo_engine.server.http.sse import DONE
from octavo_engine.server.openai.schemas import SamplingFields, StreamOptions
from octavo_engine.server.routers.token_lines import TokenLines
from octavo_engine.server.service import Service  # noqa: TC001

if TYPE_CHECKING:
    from octavo_engine.core.text.outputs import CompletionOutput, RequestOutput


class TokenParams(SamplingFields, kw_only=True):
    """Sampling parameters under SamplingParams' names."""

    logprobs: int | None = None
    prompt_logprob_token_ids: Any = None
    detokenize: bool | None = None  # of no effect on the answer: it has no text


class TokenRequest(msgspec.Struct, kw_only=True):
    token_ids: list[int]
    sampling_params: TokenParams = msgspec.field(default_factory=TokenParams)
    model: str | None = None
    request_id: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None
    priority: int | None = None
    features: Any = None
    kv_transfer_params: Any = None


class TokenIdChoice(msgspec.Struct, kw_only=True):
    index: int
    logprobs: dict[str, Any] | None
    finish_reason: str | None
    token_ids: list[int]


class TokenAnswer(msgspec.Struct, kw_only=True):
    request_id: str
    choices: list[TokenIdChoice]
    prompt_logprobs: list[dict[str, Any] | None] | None = None
    kv_transfer_params: None = None
    usage: dict[str, Any] | None = None


class TokenChunk(msgspec.Struct, kw_only=True, omit_defaults=True):
    request_id: str
    choices: list[TokenIdChoice]
    usage: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedTokens:
    request: TokenRequest
    id: str
    job: generation.Job


async def token_generate(exchange: Exchange, service: Service) -> None:
    request = await exchange.json(TokenRequest)
    try:
        prepared = await _prepare(exchange, service, request)
        async with exchange.while_present():
            await (_stream if request.stream else _whole)(exchange, service, prepared)
    except RequestError as error:  # name the field as this client knows it
        if error.param == "prompt":
            error.param = "token_ids"
        raise


async def _prepare(exchange: Exchange, service: Service, request: TokenRequest) -> PreparedTokens:
    service.check_model(request.model)
    info = service.engine.info
    check_task("generate", info)
    for name in ("features", "kv_transfer_params"):
        if getattr(request, name):
            raise not_supported(name)
    adopt(exchange, request.request_id)
    given = request.sampling_params
    refuse_unsupported(given)
    fields = msgspec.structs.replace(
        given,
        stream=request.stream,
        stream_options=request.stream_options,
        cache_salt=request.cache_salt,
        priority=request.priority,
    )
    check_sizes(fields, service.settings.limits)
    params = sampling_params(
        fields, max_tokens=given.max_tokens, logprobs=_logprobs_wanted(given), defaults={},
        limits=service.settings.limits,
    )  # fmt: skip
    if wants_grammar(given):
        grammar = await asyncio.to_thread(grammar_of, given)
        params = msgspec.structs.replace(params, grammar=grammar)
    # Stop strings are found in text; without them none need be made.
    params = msgspec.structs.replace(params, detokenize=bool(params.stop))
    id_ = exchange.request_id
    job = generation.make_job(service, fields, f"gen-{id_}", [request.token_ids], params)
    return PreparedTokens(request=request, id=id_, job=job)


def _logprobs_wanted(given: TokenParams) -> int | None:
    """Tokens that are named need not be counted here."""
    return 0 if given.logprobs is None and given.logprob_token_ids else given.logprobs


async def _whole(exchange: Exchange, service: Service, prepared: PreparedTokens) -> None:
    usage = Usage(prepared.job)
    result: RequestOutput | None = None
    for _, output in await generation.collect(service, prepared.job):
        usage.add(0, output)
        if result is None:
            result = output
        else:
            result.absorb(output)
    assert result is not None  # a request ends with an output or an error
    scores = result.prompt_logprobs
    answer = TokenAnswer(
        request_id=prepared.id,
        choices=[_choice(prepared, output) for output in result.outputs],
        prompt_logprobs=None if scores is None else prompt_logprobs(scores),
        usage=usage.as_dict(),
    )
    await exchange.reply(msgspec.json.encode(answer))


async def _stream(exchange: Exchange, service: Service, prepared: PreparedTokens) -> None:
    sink = sse_sink(exchange, _EventWriter(prepared))
    await generation.run(service, prepared.job, sink, stream=True)


class _EventWriter:
    """From one request's outputs to its events."""

    def __init__(self, prepared: PreparedTokens) -> None:
        self._prepared = prepared
        self._usage = usage = Usage(prepared.job)
        self.lines = TokenLines(prepared.job, usage, id=prepared.id, created=0, wanted=False)
        options = prepared.request.stream_options
        self._wants_usage = options is not None and bool(options.include_usage)

    def events(self, output: generation.JobOutput) -> bytes:
        """Hot path: once per output."""
        self._usage.add(0, output.output)
        choices = [_choice(self._prepared, new) for new in output.output.outputs]
        return _event(TokenChunk(request_id=self._prepared.id, choices=choices))

    def is_last(self, output: generation.JobOutput) -> bool:
        return output.output.finished

    def end(self) -> bytes:
        if not self._wants_usage:
            return DONE
        usage = self._usage.as_dict()
        return _event(TokenChunk(request_id=self._prepared.id, choices=[], usage=usage)) + DONE


def _choice(prepared: PreparedTokens, output: CompletionOutput) -> TokenIdChoice:
    logprobs = None
    if output.logprobs is not None:
        as_ids = bool(prepared.request.sampling_params.return_tokens_as_token_ids)
        logprobs = chat_logprobs(output.logprobs, as_ids=as_ids)
    return TokenIdChoice(
        index=output.index,
        logprobs=logprobs,
        finish_reason=output.finish_reason,
        token_ids=output.token_ids,
    )


def _event(chunk: TokenChunk) -> bytes:
    return b"data: " + msgspec.json.encode(chunk) + b"\n\n"
