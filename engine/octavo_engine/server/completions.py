"""POST /v1/completions: texts and token ids in, text out, streamed or whole."""

from __future__ import annotations

import time
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from octavo_engine.core.pooling import check_task
from octavo_engine.errors import InvalidRequest
from octavo_engine.server import generation
from octavo_engine.server.logprobs import completion_logprobs, prompt_logprobs
from octavo_engine.server.params import check_sizes, sampling_params
from octavo_engine.server.prompts import encode, split_prompts, truncate
from octavo_engine.server.request_ids import adopt
from octavo_engine.server.resume import continued, opened
from octavo_engine.server.schemas import CompletionRequest
from octavo_engine.server.sse import DONE, Chunks
from octavo_engine.server.structured import with_grammar
from octavo_engine.server.token_lines import TokenLines
from octavo_engine.server.unsupported import refuse_unsupported
from octavo_engine.server.usage import Usage

if TYPE_CHECKING:
    from octavo_engine.core.outputs import CompletionOutput, DecodedLogprobs, RequestOutput
    from octavo_engine.server.exchange import Exchange
    from octavo_engine.server.service import Service

DEFAULT_MAX_TOKENS = 16  # OpenAI's


async def completions(exchange: Exchange, service: Service) -> None:
    request = await exchange.json(CompletionRequest)
    asked = await prepare(exchange, service, request)
    async with exchange.while_present():
        if request.stream:
            await _stream(exchange, service, asked)
        else:
            await _whole(exchange, service, asked)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A completion request, checked."""

    request: CompletionRequest
    id: str
    model: str
    created: int
    job: generation.Job
    texts: list[str]  # of the prompts, for echo; empty strings otherwise
    no_tokens: bool  # max_tokens 0: the prompt is scored, the one token made is thrown away
    opened: set[int]  # choices that began before: of a stream that is resumed

    @property
    def as_ids(self) -> bool:
        return bool(self.request.return_tokens_as_token_ids)


async def prepare(exchange: Exchange, service: Service, request: CompletionRequest) -> Asked:
    """Raises RequestError for whatever cannot be served."""
    model = service.check_model(request.model)
    check_task("generate", service.engine.info)
    refuse_unsupported(request)
    adopt(exchange, request.request_id)
    limits = service.settings.limits
    check_sizes(request, limits)
    prompts = split_prompts(request.prompt, limits)
    no_tokens = request.max_tokens == 0 and bool(request.echo)
    if request.max_tokens == 0 and not no_tokens:
        raise InvalidRequest(
            "max_tokens 0 is for echo: true, which scores the prompt", param="max_tokens"
        )
    tokenizer, info = service.engine.tokenizer, service.engine.info
    special = request.add_special_tokens is not False
    ids: list[list[int]] = []
    for prompt in prompts:
        if isinstance(prompt, str):
            prompt = await encode(tokenizer, prompt, add_special_tokens=special)
        keep, side = request.truncate_prompt_tokens, request.truncation_side
        ids.append(truncate(prompt, keep, info.max_model_len, side))
    max_tokens = 1 if no_tokens else request.max_tokens
    if max_tokens is None:
        max_tokens = generation.default_max_tokens(DEFAULT_MAX_TOKENS, ids, info)
    params = sampling_params(
        request,
        max_tokens=max_tokens,
        logprobs=request.logprobs,
        defaults=info.default_params if service.settings.generation_config == "auto" else {},
        limits=limits,
    )
    params = await with_grammar(request, params)
    if request.echo and request.logprobs is not None:
        wanted = max(request.logprobs, request.prompt_logprobs or 0)
        params = msgspec.structs.replace(params, prompt_logprobs=wanted)
    texts = [""] * len(ids)
    if request.echo:
        skip = request.skip_special_tokens is not False
        texts = [
            prompt
            if isinstance(prompt, str) and request.truncate_prompt_tokens is None
            else tokenizer.decode(tokens, skip_special_tokens=skip)
            for prompt, tokens in zip(prompts, ids, strict=True)
        ]
    id_ = f"cmpl-{exchange.request_id}"
    job = generation.make_job(service, request, id_, ids, params)
    job = await generation.routed(exchange, service, job, "completion")
    resume = exchange.resume
    return Asked(
        request=request,
        id=id_ if resume is None else resume.id,
        model=model,
        created=int(time.time()) if resume is None else resume.created,
        job=continued(exchange, service, job, stream=bool(request.stream)),
        texts=texts,
        no_tokens=no_tokens,
        opened=opened(resume),
    )


# ── whole ──


async def _whole(exchange: Exchange, service: Service, asked: Asked) -> None:
    usage = Usage(asked.job)
    results: dict[int, RequestOutput] = {}
    async with aclosing(generation.run(service, asked.job, stream=False)) as pieces:
        async for piece in pieces:
            usage.add(piece.prompt_index, piece.news)
            if asked.no_tokens:
                _forget_tokens(piece.news)
                usage.forget_completion()
            known = results.setdefault(piece.prompt_index, piece.news)
            if known is not piece.news:
                known.absorb(piece.news)
    choices = [
        _choice(service, asked, prompt_index, results[prompt_index], output)
        for prompt_index in sorted(results)
        for output in results[prompt_index].outputs
    ]
    await exchange.reply(
        msgspec.json.encode(
            {
                "id": asked.id,
                "object": "text_completion",
                "created": asked.created,
                "model": asked.model,
                "choices": choices,
                "service_tier": None,
                "system_fingerprint": None,
                "usage": usage.as_dict(),
                "kv_transfer_params": None,
            }
        )
    )


def _choice(
    service: Service, asked: Asked, prompt_index: int, result: RequestOutput,
    output: CompletionOutput,
) -> dict[str, Any]:  # fmt: skip
    request = asked.request
    choice: dict[str, Any] = {
        "index": prompt_index * asked.job.params.n + output.index,
        "text": asked.texts[prompt_index] + output.text,
        "logprobs": None,
        "finish_reason": output.finish_reason,
        "stop_reason": output.stop_reason,
        "token_ids": None,
        "prompt_logprobs": None,
        "prompt_token_ids": None,
    }
    if request.logprobs is not None:
        choice["logprobs"] = _logprobs(
            service, asked, result, output.logprobs or [],
            offset=0, echo=asked.texts[prompt_index], opening=True,
        )  # fmt: skip
    if request.prompt_logprobs is not None and result.prompt_logprobs is not None:
        choice["prompt_logprobs"] = prompt_logprobs(result.prompt_logprobs)
    if request.return_token_ids:
        choice["token_ids"] = output.token_ids
        choice["prompt_token_ids"] = result.prompt_token_ids
    return choice


def _logprobs(
    service: Service, asked: Asked, news: RequestOutput, entries: list[DecodedLogprobs], *,
    offset: int, echo: str, opening: bool,
) -> dict[str, Any]:  # fmt: skip
    """Of the new tokens, and before them of the prompt's when it is echoed."""
    # Where the answer begins is told by the echoed text: tokens that have no part in it, such as
    # that of the beginning, count among the prompt's offsets only.
    start = offset + len(echo) if opening else offset
    texts = [entry.text for entry in entries]
    answer = completion_logprobs(entries, texts, offset=start, as_ids=asked.as_ids)
    if not opening or not asked.request.echo or news.prompt_logprobs is None:
        return answer
    token_text = service.engine.tokenizer.token_text
    texts = [token_text(token) for token in news.prompt_token_ids]
    prompt = completion_logprobs(news.prompt_logprobs, texts, offset=offset, as_ids=asked.as_ids)
    return {name: [*prompt[name], *answer[name]] for name in prompt}


def _forget_tokens(news: RequestOutput) -> None:
    """The prompt was to be scored; the one token that the engine made on top is not told."""
    for output in news.outputs:
        output.text, output.token_ids, output.logprobs = "", [], None
        output.stop_reason = None
        if output.finish_reason in ("stop", "length"):
            output.finish_reason = "length"


# ── streamed ──


async def _stream(exchange: Exchange, service: Service, asked: Asked) -> None:
    request, job = asked.request, asked.job
    options = request.stream_options
    chunks = Chunks(id=asked.id, model=asked.model, created=asked.created, chat=False)
    usage = Usage(job)
    lines = TokenLines(job, usage, id=asked.id, created=asked.created, wanted=exchange.wants_tokens)
    every_usage = options is not None and bool(options.continuous_usage_stats)
    verbose = request.logprobs is not None or bool(request.return_token_ids) or every_usage
    begun = set(asked.opened)  # choices that have had their first chunk
    offsets: dict[int, int] = {}  # characters told of each
    scores: dict[int, list[DecodedLogprobs | None]] = {}  # of the prompts that are echoed
    unfinished = len(job.prompts)
    if asked.no_tokens:
        usage.forget_completion()
    async with aclosing(generation.run(service, job, stream=True)) as pieces:
        async for piece in pieces:
            news = piece.news
            usage.note_prompt(piece.prompt_index, news)
            if asked.no_tokens:
                _forget_tokens(news)
            frames: list[bytes] = []
            if news.prompt_logprobs is None:  # they came with another choice's first token
                news.prompt_logprobs = scores.get(piece.prompt_index)
            else:
                scores[piece.prompt_index] = news.prompt_logprobs
            for output in news.outputs:
                index = piece.prompt_index * job.params.n + output.index
                lines.note(index, output.token_ids)
                if not asked.no_tokens:
                    usage.note_answer(piece.prompt_index, output.index, output.num_tokens)
                echo = asked.texts[piece.prompt_index]
                told = output.told_chars + (len(echo) if index in asked.opened else 0)
                opening = index not in begun
                text = output.text
                if opening:
                    begun.add(index)
                    text = echo + text
                if not (text or output.finish_reason or (verbose and output.token_ids)):
                    continue
                logprobs = None
                if request.logprobs is not None:
                    logprobs = _logprobs(
                        service, asked, news, output.logprobs or [],
                        offset=offsets.get(index, told), echo=echo, opening=opening,
                    )  # fmt: skip
                    offsets[index] = offsets.get(index, told) + len(text)
                ids = bool(request.return_token_ids)
                frames.append(lines.head(index))
                frames.append(
                    chunks.delta(
                        index,
                        output,
                        text,
                        logprobs=logprobs,
                        token_ids=output.token_ids if ids else None,
                        prompt_token_ids=news.prompt_token_ids if ids and opening else None,
                        usage=usage.as_dict() if every_usage else None,
                    )
                )
            unfinished -= news.finished
            if not exchange.started:
                await exchange.open_stream()
            if unfinished == 0:
                if options is not None and options.include_usage:
                    frames.append(chunks.usage(usage.as_dict()))
                frames.append(DONE)
                await exchange.close(lines.begun(b"".join(frames)))
            elif frames:
                await exchange.write(lines.begun(b"".join(frames)))
