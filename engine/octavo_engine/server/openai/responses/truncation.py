"""Truncation "auto": the oldest turns of a conversation give way until the rest fits the model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from octavo_engine.errors import ContextLengthExceeded
from octavo_engine.server.openai.chat.conversation import rendered

if TYPE_CHECKING:
    from octavo_engine.server.openai.responses.request import ResponseTurn
    from octavo_engine.server.openai.schemas import ChatMessageBody
    from octavo_engine.server.service import Service


async def fitted(service: Service, turn: ResponseTurn, max_output_tokens: int | None) -> None:
    """Drops messages from the chat. Instructions stay, and what begins is always a user's turn.

    If even the last turn is too long, all stays: the engine's own error has the numbers.
    """
    messages, places = turn.chat.messages, list(turn.places)
    num_system = int(messages[0].role in ("system", "developer"))
    room = service.engine.info.max_model_len - max(1, max_output_tokens or 1)

    def kept(start: int) -> list[ChatMessageBody]:
        return [*messages[:num_system], *messages[start:]]

    async def fits(start: int) -> bool:
        conversation = msgspec.structs.replace(turn.chat.conversation, messages=kept(start))
        try:
            prompt = await rendered(
                service.engine.tokenizer, conversation, service.settings.limits,
                trust_template=False, most=room,
                describes_tools=service.model.dialect.describes_tools,
            )  # fmt: skip
        except ContextLengthExceeded:
            return False
        return len(prompt.ids) <= room

    if await fits(num_system):
        return
    starts = [at for at in range(num_system + 1, len(messages)) if messages[at].role == "user"]
    low, high = 0, len(starts)  # the first of them that fits
    while low < high:
        middle = (low + high) // 2
        if await fits(starts[middle]):
            high = middle
        else:
            low = middle + 1
    if low == len(starts):
        return
    turn.chat.messages = kept(starts[low])
    turn.places[:] = places[:num_system] + places[starts[low] :]
