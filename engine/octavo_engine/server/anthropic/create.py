"""POST /v1/messages and POST /v1/messages/count_tokens."""

from __future__ import annotations

import dataclasses
import secrets
from typing import TYPE_CHECKING

import msgspec

from octavo_engine.core.pooling.async_pooling import check_task
from octavo_engine.core.text.output_stream import OutputSink
from octavo_engine.errors import RequestError
from octavo_engine.server.anthropic import shapes
from octavo_engine.server.anthropic.answer import MessageBuilder, frames
from octavo_engine.server.anthropic.bodies import CountTokensRequest, MessagesRequest
from octavo_engine.server.anthropic.request import read_turn
from octavo_engine.server.generation.prompts import COUNTED
from octavo_engine.server.http.exchange import Exchange  # noqa: TC001  (a route's signature)
from octavo_engine.server.openai.chat.conversation import rendered
from octavo_engine.server.openai.chat.pictures import counted_with_pictures
from octavo_engine.server.openai.chat.prepare import prepare_chat
from octavo_engine.server.openai.chat.session import ChatSession
from octavo_engine.server.service import Service  # noqa: TC001

if TYPE_CHECKING:
    from octavo_engine.server.openai.chat.prepare import PreparedChat
    from octavo_engine.server.openai.chat.session import ChatDelta


async def create_message(exchange: Exchange, service: Service) -> None:
    request = await exchange.json(MessagesRequest)
    turn = read_turn(request)
    # Clients switch thinking on for every model.
    if service.model.dialect.reasoning is None:
        turn.chat.thinking_token_budget = None
    try:
        prepared = await prepare_chat(exchange, service, turn.chat, prefix="msg", kind="messages")
        prepared, is_cut_short = _with_room(prepared, service.engine.info.max_model_len)
        session = ChatSession(service, prepared)
        answer = MessageBuilder(
            id=f"msg_{secrets.token_hex(12)}", model=prepared.model, usage=session.usage,
            is_cut_short=is_cut_short,
        )  # fmt: skip
        async with exchange.while_present():
            if request.stream:
                await _streamed(exchange, session, answer)
            else:
                await _whole(exchange, session, answer)
    except RequestError as error:
        turn.rename(error)
        raise


async def count_tokens(exchange: Exchange, service: Service) -> None:
    """Of the prompt that the same fields would make for /v1/messages."""
    request = await exchange.json(CountTokensRequest)
    turn = read_turn(request)
    try:
        service.model.check_name(request.model)
        check_task("generate", service.engine.info)
        if turn.chat.tool_choice == "none" and service.settings.exclude_tools_when_tool_choice_none:
            turn.chat.tools = None
        prompt = await rendered(
            service.engine.tokenizer, turn.chat.conversation, service.settings.limits,
            trust_template=False, describes_tools=service.model.dialect.describes_tools,
            most=COUNTED * service.engine.info.max_model_len,
            takes_pictures=service.engine.pictures is not None,
        )  # fmt: skip
        prompt = await counted_with_pictures(service, turn.chat.messages, prompt)
    except RequestError as error:
        turn.rename(error)
        raise
    await exchange.reply(msgspec.json.encode(shapes.TokenCount(input_tokens=len(prompt.ids))))


def _with_room(prepared: PreparedChat, max_model_len: int) -> tuple[PreparedChat, bool]:
    """Clients must say max_tokens and say the most that any model can: it is cut to the room."""
    params = prepared.job.params
    room = max_model_len - len(prepared.job.prompts[0])
    if params.max_tokens is None or not 0 < room < params.max_tokens:
        return prepared, False
    params = msgspec.structs.replace(params, max_tokens=room)
    return dataclasses.replace(prepared, job=dataclasses.replace(prepared.job, params=params)), True


async def _whole(exchange: Exchange, session: ChatSession, answer: MessageBuilder) -> None:
    async def put(delta: ChatDelta) -> None:
        for choice in delta.choices:
            answer.read(choice)

    await session.run(OutputSink(put), stream=False)
    answer.end()
    await exchange.reply(msgspec.json.encode(answer.whole()))


async def _streamed(exchange: Exchange, session: ChatSession, answer: MessageBuilder) -> None:
    async def put(delta: ChatDelta) -> None:
        events = []
        if not exchange.started:
            events = answer.begin()
            await exchange.open_stream()
        for choice in delta.choices:
            events += answer.read(choice)
        if delta.finished:
            await exchange.close(frames(events + answer.end()))
        elif events:
            await exchange.write(frames(events))

    await session.run(OutputSink(put), stream=True)
