"""POST /v1/chat/completions/batch: several conversations in one request, one answer each."""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec

from octavo_engine.errors import InvalidRequest, RequestError
from octavo_engine.server.generation.gather import all_of
from octavo_engine.server.generation.inflight import names_of
from octavo_engine.server.generation.prompt_share import PromptShare
from octavo_engine.server.http.buffered_response import BufferedResponse
from octavo_engine.server.http.errors import not_supported
from octavo_engine.server.http.exchange import Exchange  # noqa: TC001  (a route's signature)
from octavo_engine.server.openai.chat.endpoint import chat_completions
from octavo_engine.server.openai.schemas import ChatCompletionRequest, ChatMessageBody
from octavo_engine.server.service import Service  # noqa: TC001

_COUNTS = ("prompt_tokens", "total_tokens", "completion_tokens")
_DETAILS = ("prompt_tokens_details", "completion_tokens_details")


class ChatBatchRequest(ChatCompletionRequest, kw_only=True):
    """As a chat request, but with a list of conversations."""

    messages: list[list[ChatMessageBody]]  # type: ignore[assignment]  # that is the point


async def chat_batch(exchange: Exchange, service: Service) -> None:
    request = await exchange.json(ChatBatchRequest)
    _check(request, service.settings.limits.max_prompts)
    fields = exchange.fields
    bodies = [msgspec.json.encode({**fields, "messages": each}) for each in fields["messages"]]
    ids = [f"chatcmpl-{exchange.request_id}-{number}" for number in range(len(bodies))]

    async def stop() -> None:
        for id_ in ids:
            await service.running.stop(id_)

    names = names_of(f"chatcmpl-{exchange.request_id}")
    with service.running.track(names, stop):
        async with exchange.while_present():
            share = PromptShare(service, 1)
            answers = await all_of(
                [
                    share.of(partial(_one, exchange, service, number, body))
                    for number, body in enumerate(bodies)
                ]
            )
    await exchange.reply(msgspec.json.encode(_merged(answers, exchange.request_id)))


def _check(request: ChatBatchRequest, limit: int) -> None:
    if not request.messages:
        raise InvalidRequest("messages must hold at least one conversation", param="messages")
    if len(request.messages) > limit:
        raise InvalidRequest(
            f"messages must be at most {limit} conversations; got {len(request.messages)}",
            param="messages",
        )
    if request.stream:
        raise not_supported("stream", "a batch of conversations is answered as a whole")
    if request.n not in (None, 1):
        raise not_supported("n", "a batch has one answer to each conversation")
    if request.tools:
        raise not_supported("tools", "send conversations with tools one by one")
    if request.use_beam_search:
        raise not_supported("use_beam_search")


async def _one(exchange: Exchange, service: Service, number: int, body: bytes) -> dict[str, Any]:
    """The chat endpoint itself answers, so that nothing can differ."""
    captured = BufferedResponse()
    inner = exchange.again(body, send=captured.send, shares_client=False)
    inner.request_id = f"{exchange.request_id}-{number}"
    inner.group = f"{exchange.request_id}-{id(exchange)}"  # a client may give two the same id
    try:
        await chat_completions(inner, service)
    except RequestError as error:
        if (error.param or "").startswith("messages"):
            error.param = f"messages[{number}]{(error.param or '').removeprefix('messages')}"
        raise
    answer: dict[str, Any] = captured.json()
    return answer


def _merged(answers: list[dict[str, Any]], request_id: str) -> dict[str, Any]:
    """As one answer whose choices are numbered as the conversations were."""
    whole = answers[0]
    whole["id"] = f"chatcmpl-{request_id}"
    whole["choices"] = [
        {**answer["choices"][0], "index": number} for number, answer in enumerate(answers)
    ]
    usages = [answer["usage"] for answer in answers]
    usage: dict[str, Any] = {name: sum(each[name] for each in usages) for name in _COUNTS}
    for name in _DETAILS:
        usage[name] = {key: sum(each[name][key] for each in usages) for key in usages[0][name]}
    whole["usage"] = usage
    return whole
