"""Counts the tokens of a chat's prompt without running it, for the endpoints that only count."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo_engine.server.http.owner import owner_of
from octavo_engine.server.openai.chat.conversation import rendered
from octavo_engine.server.openai.chat.pictures import counted_with_pictures, media_kind

if TYPE_CHECKING:
    from octavo_engine.server.http.exchange import Exchange
    from octavo_engine.server.openai.schemas import ChatCompletionRequest
    from octavo_engine.server.service import Service


async def count_prompt(
    exchange: Exchange,
    service: Service,
    chat: ChatCompletionRequest,
    *,
    describes_tools: bool = False,
    most: int | None = None,
) -> int:
    """As it would run, media included. Raises RequestError; `most` as in `rendered`."""
    prompt = await rendered(
        service.engine.tokenizer, chat.conversation, service.settings.limits,
        trust_template=False, describes_tools=describes_tools, most=most, takes=media_kind(service),
    )  # fmt: skip
    owner = owner_of(exchange, service.guard)
    prompt = await counted_with_pictures(service, chat.messages, prompt, owner)
    return len(prompt.ids)
