"""POST /v1/chat/completions: a conversation in, the next message out, streamed or whole."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo_engine.errors import RequestError
from octavo_engine.server.compat.legacy_functions import rename_tools
from octavo_engine.server.openai.chat.prepare import prepare_chat
from octavo_engine.server.openai.chat.stream import answer_stream
from octavo_engine.server.openai.chat.whole import answer_whole
from octavo_engine.server.openai.schemas import ChatCompletionRequest

if TYPE_CHECKING:
    from octavo_engine.server.http.exchange import Exchange
    from octavo_engine.server.service import Service


async def chat_completions(exchange: Exchange, service: Service) -> None:
    request = await exchange.json(ChatCompletionRequest)
    try:
        prepared = await prepare_chat(exchange, service, request)
        async with exchange.while_present():
            if request.stream:
                await answer_stream(exchange, service, prepared)
            else:
                await answer_whole(exchange, service, prepared)
    except RequestError as error:  # name the field as this client knows it
        if error.param == "prompt":
            error.param = "messages"
        elif request.functions:
            rename_tools(error)
        elif error.param == "max_tokens" and request.max_completion_tokens is not None:
            error.param = "max_completion_tokens"
        raise
