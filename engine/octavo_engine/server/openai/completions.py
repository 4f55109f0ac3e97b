"""POST /v1/completions: texts and token ids in, text out, streamed or whole."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from octavo_engine.core.text.outputs import RequestOutput
from octavo_engine.core.validate import check_length_of_prompt
from octavo_engine.errors import InvalidRequest, RequestError
from octavo_engine.server.compat.orca import load_headers
from octavo_engine.server.generation.job import JobOutput, RouteSource
from octavo_engine.server.generation.kv_transfer import kv_answer
from octavo_engine.server.generation.logprobs import completion_logprobs, prompt_logprobs
from octavo_engine.server.generation.make_job import default_max_tokens
from octavo_engine.server.generation.prepare import PreparedRequest, prepare
from octavo_engine.server.generation.prompts import encode, split_prompts, truncate
from octavo_engine.server.generation.run import collect_outputs, run_job
from octavo_engine.server.generation.sse_writer import sse_sink
from octavo_engine.server.generation.structured import (
    name_field,
    note_validity,
    with_grammar,
)
from octavo_engine.server.generation.usage import Usage
from octavo_engine.server.http.exchange import JSON
from octavo_engine.server.http.sse import DONE, Chunks
from octavo_engine.server.openai.schemas import CompletionRequest
from octavo_engine.server.routers.token_lines import TokenLines
from octavo_engine.tokenization.detokenizer import offsets

if TYPE_CHECKING:
    from collections.abc import Sequence

    from octavo_engine.core.media.prompt import PromptMedia
    from octavo_engine.core.text.logprobs import DecodedLogprobs
    from octavo_engine.core.text.outputs import CompletionOutput, PromptLogprobs
    from octavo_engine.server.http.exchange import Exchange
    from octavo_engine.server.service import Service
    from octavo_engine.state.sampling_params import SamplingParams
    from octavo_engine.tokenization.tokenizer import Tokenizer

DEFAULT_MAX_TOKENS = 16  # OpenAI's


async def completions(exchange: Exchange, service: Service) -> None:
    request = await exchange.json(CompletionRequest)
    prepared = await prepare_completion(exchange, service, request)
    try:
        async with exchange.while_present():
            if request.stream:
                await _stream(exchange, service, prepared)
            else:
                await _whole(exchange, service, prepared)
    except RequestError as error:
        name_field(error, request)
        raise


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedCompletion(PreparedRequest):
    """A completion request that will run."""

    request: CompletionRequest
    texts: list[str]  # of the prompts, for echo; empty strings otherwise
    no_tokens: bool  # max_tokens 0: the prompt is scored, the one token made is thrown away

    @property
    def as_ids(self) -> bool:
        return bool(self.request.return_tokens_as_token_ids)


async def prepare_completion(
    exchange: Exchange, service: Service, request: CompletionRequest
) -> PreparedCompletion:
    """Raises RequestError for whatever cannot be served."""
    reader = _CompletionReader(service, request)
    prepared = await prepare(exchange, service, reader)
    return PreparedCompletion(
        id=prepared.id,
        model=prepared.model,
        created=prepared.created,
        job=prepared.job,
        opened=prepared.opened,
        request=request,
        texts=reader.echoed(),
        no_tokens=reader.no_tokens,
    )


class _CompletionReader:
    """What a completion adds to the common steps."""

    media: PromptMedia | None = None

    id_prefix = "cmpl"
    uses_model_defaults = True

    def __init__(self, service: Service, request: CompletionRequest) -> None:
        self.fields = request
        self.model = request.model
        self.request_id = request.request_id
        self.logprobs = request.logprobs
        self.no_tokens = request.max_tokens == 0 and bool(request.echo)
        self._service = service
        self._given: list[str | list[int]] = []
        self._ids: list[list[int]] = []

    @property
    def max_tokens(self) -> int:
        if self.no_tokens:
            return 1
        given = self.fields.max_tokens
        if given is not None:
            return given
        return default_max_tokens(DEFAULT_MAX_TOKENS, self._ids, self._service.engine.info)

    def check(self) -> None:
        request = self.fields
        ids = request.prompt
        if request.truncate_prompt_tokens is None and len(ids) and isinstance(ids[0], int):
            check_length_of_prompt(len(ids), self._service.engine.info)  # before they are walked
        self._given = split_prompts(request.prompt, self._service.settings.limits)
        if request.max_tokens == 0 and not self.no_tokens:
            raise InvalidRequest(
                "max_tokens 0 is for echo: true, which scores the prompt", param="max_tokens"
            )
        if request.thinking_token_budget not in (None, -1):
            raise RequestError(
                "thinking_token_budget is only supported for chat completions.",
                param="thinking_token_budget",
                code="not_supported",
            )
        if self.no_tokens and request.logprob_token_ids:
            raise InvalidRequest(
                "logprob_token_ids requires max_tokens > 0.",
                param="logprob_token_ids",
            )

    async def prompts(self) -> list[list[int]]:
        request, engine = self.fields, self._service.engine
        longest = engine.info.max_model_len
        most = longest if request.truncate_prompt_tokens is None else None
        special = request.add_special_tokens is not False
        for prompt in self._given:
            if isinstance(prompt, str):
                prompt = await encode(
                    engine.tokenizer, prompt, add_special_tokens=special, most=most
                )
            keep, side = request.truncate_prompt_tokens, request.truncation_side
            self._ids.append(truncate(prompt, keep, longest, side))
        return self._ids

    async def settle(self, params: SamplingParams) -> SamplingParams:
        request = self.fields
        params = await with_grammar(request, params)
        if request.echo and request.logprobs is not None:
            counts = (request.logprobs, request.prompt_logprobs or 0)
            wanted = -1 if -1 in counts else max(counts)
            params = msgspec.structs.replace(params, prompt_logprobs=wanted)
        return params

    def route(self) -> RouteSource:
        return RouteSource("completion")

    def echoed(self) -> list[str]:
        """The text of each prompt where it is echoed, else an empty one."""
        if not self.fields.echo:
            return [""] * len(self._ids)
        tokenizer = self._service.engine.tokenizer
        return [
            _echo(tokenizer, self.fields, prompt, tokens)
            for prompt, tokens in zip(self._given, self._ids, strict=True)
        ]


def _echo(
    tokenizer: Tokenizer, request: CompletionRequest, prompt: str | list[int], tokens: list[int]
) -> str:
    """The prompt as it came; of token ids all that they say, unless the client skips some."""
    if isinstance(prompt, str) and request.truncate_prompt_tokens is None:
        return prompt
    skip = request.skip_special_tokens
    return tokenizer.decode(
        tokens, skip_special_tokens=isinstance(prompt, str) if skip is None else skip
    )


# ── whole ──


async def _whole(exchange: Exchange, service: Service, prepared: PreparedCompletion) -> None:
    usage = Usage(prepared.job)
    results: dict[int, RequestOutput] = {}
    for prompt_index, output in await collect_outputs(service, prepared.job):
        usage.add(prompt_index, output)
        if prepared.no_tokens:
            _forget_tokens(output)
            usage.forget_completion()
        known = results.setdefault(prompt_index, output)
        if known is not output:
            known.absorb(output)
    choices = [
        _choice(service, prepared, prompt_index, results[prompt_index], output)
        for prompt_index in sorted(results)
        for output in results[prompt_index].outputs
    ]
    texts = [output.text for result in results.values() for output in result.outputs]
    await note_validity(exchange, prepared.request, prepared.job.params.grammar, texts)
    await exchange.reply(
        msgspec.json.encode(
            {
                "id": prepared.id,
                "object": "text_completion",
                "created": prepared.created,
                "model": prepared.model,
                "choices": choices,
                "service_tier": None,
                "system_fingerprint": None,
                "usage": usage.as_dict(),
                "kv_transfer_params": kv_answer(
                    prepared.request.kv_transfer_params, service.engine.info, prepared.id
                ),
            }
        ),
        headers=[JSON, *load_headers(exchange, service)],
    )


def _choice(
    service: Service, prepared: PreparedCompletion, prompt_index: int, result: RequestOutput,
    output: CompletionOutput,
) -> dict[str, Any]:  # fmt: skip
    request = prepared.request
    choice: dict[str, Any] = {
        "index": prompt_index * prepared.job.params.n + output.index,
        "text": prepared.texts[prompt_index] + output.text,
        "logprobs": None,
        "finish_reason": output.finish_reason,
        "stop_reason": output.stop_reason,
        "token_ids": None,
        "prompt_logprobs": None,
        "prompt_token_ids": None,
    }
    if request.logprobs is not None:
        choice["logprobs"] = _logprobs(
            service, prepared, result, output.logprobs or [],
            echo=prepared.texts[prompt_index], opening=True,
        )  # fmt: skip
    if request.prompt_logprobs is not None and result.prompt_logprobs is not None:
        choice["prompt_logprobs"] = prompt_logprobs(result.prompt_logprobs)
    if request.return_token_ids:
        choice["token_ids"] = output.token_ids
        choice["prompt_token_ids"] = result.prompt_token_ids
    return choice


def _logprobs(
    service: Service, prepared: PreparedCompletion, result: RequestOutput,
    entries: Sequence[DecodedLogprobs], *,
    echo: str, opening: bool,
) -> dict[str, Any]:  # fmt: skip
    """Of the new tokens, and before them of the prompt's when it is echoed."""
    as_ids = prepared.as_ids
    answer = completion_logprobs(entries, [len(echo) + e.offset for e in entries], as_ids=as_ids)
    if not opening or not prepared.request.echo or result.prompt_logprobs is None:
        return answer
    tokenizer, ids = service.engine.tokenizer, result.prompt_token_ids
    prompt = completion_logprobs(
        result.prompt_logprobs, _offsets_in(echo, tokenizer, ids), as_ids=as_ids,
        first=tokenizer.token_text(ids[0]) if ids else "",
    )  # fmt: skip
    return {name: [*prompt[name], *answer[name]] for name in prompt}


def _offsets_in(echo: str, tokenizer: Tokenizer, ids: Sequence[int]) -> list[int]:
    """Where each token of the prompt begins in the echoed text. Tokens that have no part in it,
    such as that of the beginning, stand where the next one does."""
    text = tokenizer.decode(ids, skip_special_tokens=False)
    before = len(text) - len(echo) if text.endswith(echo) else 0
    return [min(max(at - before, 0), len(echo)) for at in offsets(tokenizer, ids)]


def _forget_tokens(result: RequestOutput) -> None:
    """The prompt was to be scored; the one token that the engine made on top is not returned."""
    for output in result.outputs:
        output.text, output.token_ids, output.logprobs = "", [], None
        output.stop_reason = None
        if output.finish_reason in ("stop", "length"):
            output.finish_reason = "length"


# ── streamed ──


async def _stream(exchange: Exchange, service: Service, prepared: PreparedCompletion) -> None:
    writer = _EventWriter(exchange, service, prepared)
    await run_job(service, prepared.job, sse_sink(exchange, writer), stream=True)


class _EventWriter:
    """From one request's outputs to its events."""

    def __init__(self, exchange: Exchange, service: Service, prepared: PreparedCompletion) -> None:
        request, job = prepared.request, prepared.job
        options = request.stream_options
        self._service = service
        self._prepared = prepared
        self._chunks = Chunks(
            id=prepared.id, model=prepared.model, created=prepared.created, chat=False
        )
        self._usage = Usage(job)
        self.lines = TokenLines(
            job, self._usage, id=prepared.id, created=prepared.created, wanted=exchange.wants_tokens
        )
        self._wants_ids = bool(request.return_token_ids)
        self._wants_sum = service.settings.force_include_usage or (
            options is not None and bool(options.include_usage)
        )
        self._wants_sums = options is not None and options.wants_sums
        # Chunks without text are sent too where they carry something else.
        self._is_verbose = request.logprobs is not None or self._wants_ids or self._wants_sums
        self._begun = set(prepared.opened)  # choices that have had their first chunk
        # Of the prompts that are echoed with them, and choices that came before them:
        self._wants_scores = bool(request.echo) and request.logprobs is not None
        self._scores: dict[int, PromptLogprobs] = {}
        self._early: dict[int, RequestOutput] = {}
        self._unfinished = len(job.prompts)
        if prepared.no_tokens:
            self._usage.forget_completion()

    def events(self, output: JobOutput) -> bytes:
        """Hot path: once per output."""
        prepared, (place, result) = self._prepared, output
        self._usage.note_prompt(place, result)
        if prepared.no_tokens:
            _forget_tokens(result)
        if self._wants_scores:
            result = self._with_scores(place, result)
        frames: list[bytes] = []
        for new in result.outputs:
            index = place * prepared.job.params.n + new.index
            self.lines.note(index, new.token_ids)
            if not prepared.no_tokens:
                self._usage.note_answer(place, new.index, new.num_tokens)
            text = new.text
            opening = index not in self._begun
            if opening:
                self._begun.add(index)
                text = prepared.texts[place] + text
            if new.finish_reason is None and not self._is_verbose:
                if text:
                    frames += (self.lines.head(index), self._chunks.text(index, text))
            elif text or new.finish_reason or new.token_ids:
                frames.append(self.lines.head(index))
                frames.append(self._chunk(result, place, new, text, opening=opening))
        self._unfinished -= result.finished
        return b"".join(frames)

    def is_last(self, output: JobOutput) -> bool:
        return self._unfinished == 0

    def end(self) -> bytes:
        return self._chunks.usage(self._usage.as_dict()) + DONE if self._wants_sum else DONE

    def _with_scores(self, place: int, result: RequestOutput) -> RequestOutput:
        """Each choice begins with the prompt's scores. They come with one choice's first token, and
        another one, which found the prompt cached, may be quicker: it waits for them."""
        early = self._early.pop(place, None)
        if early is not None:
            early.absorb(result)
            result = early
        if result.prompt_logprobs is None:
            result.prompt_logprobs = self._scores.get(place)
        if result.prompt_logprobs is not None:
            self._scores[place] = result.prompt_logprobs
        elif not result.finished:
            first, begun = place * self._prepared.job.params.n, self._begun
            waiting = [o for o in result.outputs if first + o.index not in begun]
            result.outputs = [o for o in result.outputs if first + o.index in begun]
            if waiting:
                self._early[place] = RequestOutput(
                    result.request_id, result.prompt, result.prompt_token_ids, waiting
                )
        return result

    def _chunk(
        self, result: RequestOutput, place: int, output: CompletionOutput, text: str, *,
        opening: bool,
    ) -> bytes:  # fmt: skip
        prepared = self._prepared
        logprobs = None
        if prepared.request.logprobs is not None:
            logprobs = _logprobs(
                self._service, prepared, result, output.logprobs or [],
                echo=prepared.texts[place], opening=opening,
            )  # fmt: skip
        ids = self._wants_ids
        return self._chunks.delta(
            place * prepared.job.params.n + output.index,
            output,
            text,
            logprobs=logprobs,
            token_ids=output.token_ids if ids else None,
            prompt_token_ids=result.prompt_token_ids if ids and opening else None,
            usage=self._usage.as_dict() if self._wants_sums else None,
        )
