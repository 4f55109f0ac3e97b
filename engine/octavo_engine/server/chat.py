"""POST /v1/chat/completions: a conversation in, the next message out, streamed or whole."""

from __future__ import annotations

import time
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from octavo_engine.errors import InvalidRequest, RequestError
from octavo_engine.server import generation
from octavo_engine.server.logprobs import chat_logprobs, prompt_logprobs
from octavo_engine.server.params import check_sizes, sampling_params
from octavo_engine.server.prompts import encode, render, truncate
from octavo_engine.server.resume import continued, opened
from octavo_engine.server.schemas import ChatCompletionRequest
from octavo_engine.server.sse import DONE, Chunks
from octavo_engine.server.token_lines import TokenLines
from octavo_engine.server.unsupported import refuse_unsupported
from octavo_engine.server.usage import Usage

if TYPE_CHECKING:
    from octavo_engine.core.outputs import CompletionOutput, RequestOutput
    from octavo_engine.server.exchange import Exchange
    from octavo_engine.server.service import Service


async def chat_completions(exchange: Exchange, service: Service) -> None:
    request = await exchange.json(ChatCompletionRequest)
    try:
        asked = await prepare(exchange, service, request)
        async with exchange.while_present():
            if request.stream:
                await _stream(exchange, service, asked)
            else:
                await _whole(exchange, service, asked)
    except RequestError as error:  # name the field as this client knows it
        if error.param == "prompt":
            error.param = "messages"
        elif error.param == "max_tokens" and request.max_completion_tokens is not None:
            error.param = "max_completion_tokens"
        raise


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A chat request, checked."""

    request: ChatCompletionRequest
    id: str
    model: str
    created: int
    role: str
    job: generation.Job
    opened: set[int]  # choices that began before: of a stream that is resumed

    @property
    def as_ids(self) -> bool:
        return bool(self.request.return_tokens_as_token_ids)


async def prepare(exchange: Exchange, service: Service, request: ChatCompletionRequest) -> Asked:
    """Raises RequestError for whatever cannot be served."""
    model = service.check_model(request.model)
    refuse_unsupported(request)
    settings = service.settings
    check_sizes(request, settings.limits)
    logprobs = _logprobs_wanted(request)
    tokenizer, info = service.engine.tokenizer, service.engine.info
    text = await render(
        tokenizer,
        request.conversation,
        settings.limits,
        trust_template=settings.trust_request_chat_template,
    )
    # The template has written the special tokens already.
    ids = await encode(tokenizer, text, add_special_tokens=bool(request.add_special_tokens))
    ids = truncate(ids, request.truncate_prompt_tokens, info.max_model_len)
    max_tokens = request.max_completion_tokens
    if max_tokens is None:
        max_tokens = request.max_tokens
    params = sampling_params(
        request,
        max_tokens=max_tokens,
        logprobs=logprobs,
        defaults=info.default_params if settings.generation_config == "auto" else {},
        limits=settings.limits,
    )
    id_ = f"chatcmpl-{exchange.request_id}"
    job = generation.make_job(service, request, id_, [ids], params)

    async def render_next(answer: str) -> str:
        return await render(
            tokenizer,
            request.continued(answer),
            settings.limits,
            trust_template=settings.trust_request_chat_template,
        )

    job = await generation.routed(
        exchange, service, job, "chat", text=text, render_next=render_next
    )
    resume = exchange.resume
    return Asked(
        request=request,
        id=id_ if resume is None else resume.id,
        model=model,
        created=int(time.time()) if resume is None else resume.created,
        role=settings.response_role,
        job=continued(exchange, service, job, stream=bool(request.stream)),
        opened=opened(resume),
    )


def _logprobs_wanted(request: ChatCompletionRequest) -> int | None:
    top = request.top_logprobs
    if top is not None and top < 0:
        raise InvalidRequest("top_logprobs must not be negative", param="top_logprobs")
    if top is not None and top > 20:
        raise InvalidRequest(f"top_logprobs must be at most 20; got {top}", param="top_logprobs")
    if request.logprobs:
        return top or 0
    if top:
        raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")
    return None


# ── whole ──


async def _whole(exchange: Exchange, service: Service, asked: Asked) -> None:
    usage = Usage(asked.job)
    result: RequestOutput | None = None
    async with aclosing(generation.run(service, asked.job, stream=False)) as pieces:
        async for piece in pieces:
            usage.add(0, piece.news)
            if result is None:
                result = piece.news
            else:
                result.absorb(piece.news)
    assert result is not None  # a request ends with an output or an error
    request = asked.request
    scores = result.prompt_logprobs if request.prompt_logprobs is not None else None
    await exchange.reply(
        msgspec.json.encode(
            {
                "id": asked.id,
                "object": "chat.completion",
                "created": asked.created,
                "model": asked.model,
                "choices": [_choice(asked, output) for output in result.outputs],
                "service_tier": None,
                "system_fingerprint": None,
                "usage": usage.as_dict(),
                "prompt_logprobs": None if scores is None else prompt_logprobs(scores),
                "prompt_token_ids": result.prompt_token_ids if request.return_token_ids else None,
                "kv_transfer_params": None,
            }
        )
    )


def _choice(asked: Asked, output: CompletionOutput) -> dict[str, Any]:
    logprobs = None
    if output.logprobs is not None:
        logprobs = chat_logprobs(output.logprobs, as_ids=asked.as_ids)
    return {
        "index": output.index,
        "message": {
            "role": asked.role,
            "content": output.text,
            "refusal": None,
            "annotations": None,
            "audio": None,
            "function_call": None,
            "tool_calls": [],
            "reasoning": None,
        },
        "logprobs": logprobs,
        "finish_reason": output.finish_reason,
        "stop_reason": output.stop_reason,
        "token_ids": output.token_ids if asked.request.return_token_ids else None,
    }


# ── streamed ──


async def _stream(exchange: Exchange, service: Service, asked: Asked) -> None:
    request, job = asked.request, asked.job
    options = request.stream_options
    chunks = Chunks(
        id=asked.id, model=asked.model, created=asked.created, chat=True, role=asked.role
    )
    usage = Usage(job)
    lines = TokenLines(job, usage, id=asked.id, created=asked.created, wanted=exchange.wants_tokens)
    every_usage = options is not None and bool(options.continuous_usage_stats)
    ids = bool(request.return_token_ids)
    verbose = bool(request.logprobs) or ids or every_usage
    async with aclosing(generation.run(service, job, stream=True)) as pieces:
        async for piece in pieces:
            news = piece.news
            usage.add(0, news)
            frames: list[bytes] = []
            if not exchange.started:
                await exchange.open_stream()
                prompt_ids = news.prompt_token_ids if ids else None
                for index in range(job.params.n):
                    if index not in asked.opened:
                        first_ids = None if index else prompt_ids
                        frames += [
                            lines.head(index),
                            chunks.role(index, prompt_token_ids=first_ids),
                        ]
            for output in news.outputs:
                lines.note(output.index, output.token_ids)
                if not (output.text or output.finish_reason or (verbose and output.token_ids)):
                    continue
                logprobs = None
                if output.logprobs is not None:
                    logprobs = chat_logprobs(output.logprobs, as_ids=asked.as_ids)
                frames.append(lines.head(output.index))
                frames.append(
                    chunks.delta(
                        output.index,
                        output,
                        output.text,
                        logprobs=logprobs,
                        token_ids=output.token_ids if ids else None,
                        usage=usage.as_dict() if every_usage else None,
                    )
                )
            if news.finished:
                if options is not None and options.include_usage:
                    frames.append(chunks.usage(usage.as_dict()))
                frames.append(DONE)
                await exchange.close(lines.begun(b"".join(frames)))
            elif frames:
                await exchange.write(lines.begun(b"".join(frames)))
