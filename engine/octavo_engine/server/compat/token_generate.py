"""POST /inference/v1/generate: token ids in, token ids out, for callers with a tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from octavo_engine.errors import RequestError
from octavo_engine.server.generation.logprobs import chat_logprobs, prompt_logprobs
from octavo_engine.server.generation.prepare import prepare
from octavo_engine.server.generation.run import collect_outputs, run_job
from octavo_engine.server.generation.sse_writer import sse_sink
from octavo_engine.server.generation.structured import with_grammar
from octavo_engine.server.generation.usage import Usage
from octavo_engine.server.http.errors import not_supported
from octavo_engine.server.http.exchange import Exchange  # noqa: TC001  (a route's signature)
from octavo_engine.server.http.sse import DONE
from octavo_engine.server.openai.schemas import SamplingFields, StreamOptions
from octavo_engine.server.routers.token_lines import TokenLines
from octavo_engine.server.service import Service  # noqa: TC001

if TYPE_CHECKING:
    from octavo_engine.core.media.prompt import PromptMedia
    from octavo_engine.core.text.outputs import CompletionOutput, RequestOutput
    from octavo_engine.server.generation.job import Job, JobOutput
    from octavo_engine.state.sampling_params import SamplingParams


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


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedTokens:
    """A request for tokens that will run."""

    request: TokenRequest
    id: str
    job: Job


async def _prepare(exchange: Exchange, service: Service, request: TokenRequest) -> PreparedTokens:
    prepared = await prepare(exchange, service, _TokenReader(request))
    return PreparedTokens(request=request, id=exchange.request_id, job=prepared.job)


class _TokenReader:
    """What a request for tokens adds to the common steps."""

    media: PromptMedia | None = None

    id_prefix = "gen"
    uses_model_defaults = False

    def __init__(self, request: TokenRequest) -> None:
        given = request.sampling_params
        self.model = request.model
        self.request_id = request.request_id
        self.fields = msgspec.structs.replace(
            given,
            stream=request.stream,
            stream_options=request.stream_options,
            cache_salt=request.cache_salt,
            priority=request.priority,
        )
        self.max_tokens = given.max_tokens
        # Tokens that are named need not be counted here.
        named_only = given.logprobs is None and given.logprob_token_ids
        self.logprobs = 0 if named_only else given.logprobs
        self._request = request

    def check(self) -> None:
        for name in ("features", "kv_transfer_params"):
            if getattr(self._request, name):
                raise not_supported(name)
        if self.fields.kv_transfer_params:
            raise not_supported("kv_transfer_params")

    async def prompts(self) -> list[list[int]]:
        return [self._request.token_ids]

    async def settle(self, params: SamplingParams) -> SamplingParams:
        params = await with_grammar(self.fields, params)
        # Stop strings are found in text; without them none need be made.
        return msgspec.structs.replace(params, detokenize=bool(params.stop))

    def route(self) -> None:
        """Routers have no key for such a body."""


async def _whole(exchange: Exchange, service: Service, prepared: PreparedTokens) -> None:
    usage = Usage(prepared.job)
    result: RequestOutput | None = None
    for _, output in await collect_outputs(service, prepared.job):
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
    await run_job(service, prepared.job, sink, stream=True)


class _EventWriter:
    """From one request's outputs to its events."""

    def __init__(self, prepared: PreparedTokens) -> None:
        self._prepared = prepared
        self._usage = usage = Usage(prepared.job)
        self.lines = TokenLines(prepared.job, usage, id=prepared.id, created=0, wanted=False)
        options = prepared.request.stream_options
        self._wants_usage = options is not None and bool(options.include_usage)

    def events(self, output: JobOutput) -> bytes:
        """Hot path: once per output."""
        self._usage.add(0, output.output)
        choices = [_choice(self._prepared, new) for new in output.output.outputs]
        return _event(TokenChunk(request_id=self._prepared.id, choices=choices))

    def is_last(self, output: JobOutput) -> bool:
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
