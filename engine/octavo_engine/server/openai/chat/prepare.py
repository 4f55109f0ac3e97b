"""A chat request, checked and ready to run. Raises RequestError for whatever cannot be served."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from octavo_engine.core.pooling.async_pooling import check_task
from octavo_engine.dialects.events import Content, joined
from octavo_engine.errors import InvalidRequest
from octavo_engine.server.compat.legacy_functions import adopt_functions
from octavo_engine.server.compat.unsupported_fields import refuse_unsupported
from octavo_engine.server.generation import job as generation
from octavo_engine.server.generation.params import check_logprobs, check_sizes, sampling_params
from octavo_engine.server.generation.prompts import truncate
from octavo_engine.server.generation.resume import continued, opened
from octavo_engine.server.generation.structured import note_left_over
from octavo_engine.server.http.request_ids import adopt
from octavo_engine.server.openai.chat.conversation import render, rendered
from octavo_engine.server.openai.chat.output_format import OutputFormat, plan
from octavo_engine.server.openai.chat.tools import read_offer

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from octavo_engine.protocol.route_keys import Kind
    from octavo_engine.server.http.exchange import Exchange
    from octavo_engine.server.openai.chat.tools import ToolOffer
    from octavo_engine.server.openai.schemas import ChatCompletionRequest
    from octavo_engine.server.service import Service
    from octavo_engine.server.settings import ServerSettings
    from octavo_engine.state.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedChat:
    """What will run, and how its answers are read."""

    request: ChatCompletionRequest
    id: str
    model: str
    created: int
    role: str
    job: generation.Job
    reading: OutputFormat
    prompt: str  # as it was rendered
    opened: set[int]  # choices that began before: of a stream that is resumed
    has_functions: bool = False  # a call is told as function_call, as it was asked for

    @property
    def as_ids(self) -> bool:
        return bool(self.request.return_tokens_as_token_ids)

    @property
    def echo(self) -> str:
        """What is said again before the answer: the last message, if it is of the same side."""
        last = self.request.messages[-1]
        if not self.request.echo or last.role != self.role:
            return ""
        if isinstance(last.content, list):
            return "\n".join(part.text or "" for part in last.content)
        return last.content or ""


async def prepare(
    exchange: Exchange,
    service: Service,
    request: ChatCompletionRequest,
    *,
    prefix: str = "chatcmpl",
    kind: Kind = "chat",
) -> PreparedChat:
    """The id is `prefix` and the exchange's own.

    `kind` is the shape of the body that came, by which routers know it.
    """
    model = service.check_model(request.model)
    check_task("generate", service.engine.info)
    adopt(exchange, request.request_id)
    refuse_unsupported(request)
    settings = service.settings
    check_sizes(request, settings.limits)
    logprobs = _logprobs_wanted(request, settings.limits.max_logprobs)
    has_functions = adopt_functions(request)
    offer = _offer(request, settings)
    tokenizer, info = service.engine.tokenizer, service.engine.info
    prompt = await rendered(
        tokenizer,
        request.conversation,
        settings.limits,
        trust_template=settings.trust_request_chat_template,
        describes_tools=service.dialect.describes_tools,
        # The template has written the special tokens already.
        add_special_tokens=bool(request.add_special_tokens),
        most=info.max_model_len if request.truncate_prompt_tokens is None else None,
    )
    keep, side = request.truncate_prompt_tokens, request.truncation_side
    ids = truncate(prompt.ids, keep, info.max_model_len, side)
    reading = await plan(request, offer, service.dialect, prompt.text)
    note_left_over(exchange, reading.grammar)
    params = sampling_params(
        request,
        max_tokens=_max_tokens(request),
        logprobs=logprobs,
        defaults=info.default_params if settings.generation_config == "auto" else {},
        limits=settings.limits,
    )
    params = _with_reading(params, reading)
    id_ = f"{prefix}-{exchange.request_id}"
    job = generation.make_job(service, request, id_, [ids], params)
    job = await generation.routed(
        exchange, service, job, kind, text=prompt.text,
        render_next=_next_turn(service, request, reading),
    )  # fmt: skip
    resume = exchange.resume
    return PreparedChat(
        request=request,
        id=id_ if resume is None else resume.id,
        model=model,
        created=int(time.time()) if resume is None else resume.created,
        role=settings.response_role,
        job=continued(exchange, service, job, stream=bool(request.stream)),
        reading=reading,
        prompt=prompt.text,
        opened=opened(resume),
        has_functions=has_functions,
    )


def _offer(request: ChatCompletionRequest, settings: ServerSettings) -> ToolOffer:
    """The tools that may be called; those that the prompt must not show are taken out of it."""
    offer = read_offer(request.tools, request.tool_choice, request.parallel_tool_calls)
    if offer.mode == "auto" and not settings.enable_auto_tool_choice:
        raise InvalidRequest(
            "tool_choice auto is switched off here (--enable-auto-tool-choice); use required, a "
            "function's name or none",
            param="tool_choice",
        )
    if offer.mode == "none" and settings.exclude_tools_when_tool_choice_none:
        request.conversation.tools = request.tools = None
    return offer


def _max_tokens(request: ChatCompletionRequest) -> int | None:
    newer = request.max_completion_tokens
    return request.max_tokens if newer is None else newer


def _with_reading(params: SamplingParams, reading: OutputFormat) -> SamplingParams:
    if reading.grammar is None and not reading.shown_ids:
        return params
    return msgspec.structs.replace(
        params, grammar=reading.grammar, shown_special_ids=reading.shown_ids
    )


def _next_turn(
    service: Service, request: ChatCompletionRequest, reading: OutputFormat
) -> Callable[[str], Awaitable[str]]:
    """What the next turn's prompt will be, for routers, if this one is answered so."""

    async def render_next(answer: str) -> str:
        if not reading.is_plain:
            parser = reading.parser()
            if joined(parser.push(answer) + parser.finish()) != [Content(answer)]:
                # A client sends back what it got: neither thoughts nor calls as they were written.
                raise InvalidRequest("the next turn cannot be told from this answer")
        return await render(
            service.engine.tokenizer,
            request.continued(answer),
            service.settings.limits,
            trust_template=service.settings.trust_request_chat_template,
            describes_tools=service.dialect.describes_tools,
        )

    return render_next


def _logprobs_wanted(request: ChatCompletionRequest, limit: int) -> int | None:
    top = request.top_logprobs
    if top is not None:
        if top < -1:
            raise InvalidRequest(
                f"top_logprobs must be at least 0, or -1 for all; got {top}", param="top_logprobs"
            )
        check_logprobs("top_logprobs", top, limit)
    if request.logprobs:
        return top or 0
    if top:
        raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")
    return None
