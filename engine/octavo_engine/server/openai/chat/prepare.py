"""A chat request, checked and ready to run. Raises RequestError for whatever cannot be served."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from octavo_engine.dialects.events import Content, joined
from octavo_engine.errors import InvalidRequest
from octavo_engine.server.compat.legacy_functions import adopt_functions
from octavo_engine.server.generation.job import RouteSource
from octavo_engine.server.generation.params import check_logprobs
from octavo_engine.server.generation.prepare import PreparedRequest, prepare
from octavo_engine.server.generation.prompts import truncate
from octavo_engine.server.http.owner import owner_of
from octavo_engine.server.openai.chat.conversation import render, rendered
from octavo_engine.server.openai.chat.output_format import OutputFormat, plan
from octavo_engine.server.openai.chat.pictures import media_kind, with_pictures
from octavo_engine.server.openai.chat.tools import read_offer

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from octavo_engine.core.media.prompt import PromptMedia
    from octavo_engine.protocol.route_keys import Kind
    from octavo_engine.server.http.exchange import Exchange
    from octavo_engine.server.openai.chat.conversation import RenderedPrompt
    from octavo_engine.server.openai.chat.tools import ToolOffer
    from octavo_engine.server.openai.schemas import ChatCompletionRequest
    from octavo_engine.server.service import Service
    from octavo_engine.server.settings import ServerSettings
    from octavo_engine.state.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedChat(PreparedRequest):
    """What will run, and how its answers are read."""

    request: ChatCompletionRequest
    role: str
    reading: OutputFormat
    prompt: str  # as it was rendered
    has_functions: bool = False  # calls are reported as function_call, as they were requested

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


async def prepare_chat(
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
    owner = owner_of(exchange, service.guard)
    reader = _ChatReader(service, request, prefix, kind, owner)
    prepared = await prepare(exchange, service, reader)
    return PreparedChat(
        id=prepared.id,
        model=prepared.model,
        created=prepared.created,
        job=prepared.job,
        opened=prepared.opened,
        request=request,
        role=service.settings.response_role,
        reading=reader.reading,
        prompt=reader.prompt.text,
        has_functions=reader.has_functions,
    )


class _ChatReader:
    """What a chat adds to the common steps."""

    uses_model_defaults = True
    logprobs: int | None = None  # these are known once each step has run
    has_functions = False
    media: PromptMedia | None = None
    offer: ToolOffer
    prompt: RenderedPrompt
    reading: OutputFormat

    def __init__(
        self,
        service: Service,
        request: ChatCompletionRequest,
        prefix: str,
        kind: Kind,
        owner: bytes,
    ) -> None:
        self.fields = request
        self.model = request.model
        self.request_id = request.request_id
        self.id_prefix = prefix
        self._kind: Kind = kind
        self._owner = owner  # whose the request is
        self._service = service

    @property
    def max_tokens(self) -> int | None:
        newer = self.fields.max_completion_tokens
        return self.fields.max_tokens if newer is None else newer

    def check(self) -> None:
        settings = self._service.settings
        self.logprobs = _logprobs_wanted(self.fields, settings.limits.max_logprobs)
        self.has_functions = adopt_functions(self.fields)
        self.offer = _offer(self.fields, settings)

    async def prompts(self) -> list[list[int]]:
        service, request = self._service, self.fields
        longest = service.engine.info.max_model_len
        self.prompt = await rendered(
            service.engine.tokenizer,
            request.conversation,
            service.settings.limits,
            trust_template=service.settings.trust_request_chat_template,
            describes_tools=service.model.dialect.describes_tools,
            # The template has written the special tokens already.
            add_special_tokens=bool(request.add_special_tokens),
            most=longest if request.truncate_prompt_tokens is None else None,
            takes=media_kind(service),
        )
        await self._add_pictures()
        keep, side = request.truncate_prompt_tokens, request.truncation_side
        return [truncate(self.prompt.ids, keep, longest, side)]

    async def _add_pictures(self) -> None:
        ids, self.media = await with_pictures(
            self._service, self.fields.messages, self.prompt.ids, self._owner
        )
        self.prompt = self.prompt._replace(ids=ids)
        if self.media is not None and self.fields.truncate_prompt_tokens is not None:
            raise InvalidRequest(
                "truncate_prompt_tokens cannot be combined with pictures or sounds",
                param="truncate_prompt_tokens",
            )

    async def settle(self, params: SamplingParams) -> SamplingParams:
        dialect = self._service.model.dialect
        self.reading = await plan(self.fields, self.offer, dialect, self.prompt.text)
        return _with_reading(params, self.reading)

    def route(self) -> RouteSource:
        render_next = _next_turn(self._service, self.fields, self.reading)
        return RouteSource(self._kind, self.prompt.text, render_next)


def _offer(request: ChatCompletionRequest, settings: ServerSettings) -> ToolOffer:
    """The tools that may be called; those that the prompt must not show are taken out of it."""
    offer = read_offer(request.tools, request.tool_choice, request.parallel_tool_calls)
    if offer.mode == "auto" and not settings.enable_auto_tool_choice:
        raise InvalidRequest(
            "tool_choice auto is disabled on this server (--enable-auto-tool-choice); use "
            "required, a function's name or none",
            param="tool_choice",
        )
    if offer.mode == "none" and settings.exclude_tools_when_tool_choice_none:
        request.conversation.tools = request.tools = None
    return offer


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
                # A client sends back what it got: neither reasoning nor calls as they were written.
                raise InvalidRequest("the next turn's prompt cannot be derived from this answer")
        return await render(
            service.engine.tokenizer,
            request.continued(answer),
            service.settings.limits,
            trust_template=service.settings.trust_request_chat_template,
            describes_tools=service.model.dialect.describes_tools,
            takes=media_kind(service),
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
