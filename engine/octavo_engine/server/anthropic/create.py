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
from octavo_engine.server.anthropic.answer import MessageBuilder, frame
from octavo_engine.server.anthropic.bodies import CountTokensRequest, MessagesRequest
from octavo_engine.server.anthropic.request import read_turn
from octavo_engine.server.generation.prompts import COUNTED
from octavo_engine.server.http.exchange import Exchange  # noqa: TC001  (a route's signature)
from octavo_engine.server.openai.chat.counting import count_prompt
from octavo_engine.server.openai.chat.prepare import prepare_chat
from octavo_engine.server.openai.chat.session import ChatSession
from octavo_engine.server.routers.item_events import ItemEvents
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
        # A resumed stream goes on as the message that it began as.
        id_ = prepared.id if exchange.resume is not None else f"msg_{secrets.token_hex(12)}"
        prepared = dataclasses.replace(prepared, id=id_)
        session = ChatSession(service, prepared)
        answer = MessageBuilder(
            id=id_, model=prepared.model, usage=session.usage, is_cut_short=is_cut_short
        )
        async with exchange.while_present():
            if request.stream:
                events = ItemEvents(exchange, prepared, session.usage)
                await _streamed(exchange, session, answer, events)
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
        count = await count_prompt(
            exchange, service, turn.chat,
            describes_tools=service.model.dialect.describes_tools,
            most=COUNTED * service.engine.info.max_model_len,
        )  # fmt: skip
    except RequestError as error:
        turn.rename(error)
        raise
    await exchange.reply(msgspec.json.encode(shapes.TokenCount(input_tokens=count)))


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


async def _streamed(
    exchange: Exchange, session: ChatSession, answer: MessageBuilder, events: ItemEvents
) -> None:
    async def put(delta: ChatDelta) -> None:
        if not exchange.started:
            events.add(map(frame, answer.begin()))
            await exchange.open_stream()
        for choice in delta.replayed:
            events.add(map(frame, answer.read(choice)))
        for choice in delta.choices:
            events.add(map(frame, answer.read(choice)), choice.token_ids)
        if delta.finished:
            *others, last = answer.end()
            events.add(map(frame, others))
            await exchange.close(events.take(frame(last)))
        elif frames := events.take():
            await exchange.write(frames)

    await session.run(OutputSink(put), stream=True)
