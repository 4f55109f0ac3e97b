"""A chat's answer in one piece of JSON, nulls included."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from octavo_engine.core.text.output_stream import OutputSink
from octavo_engine.server.compat.orca import load_headers
from octavo_engine.server.generation.kv_transfer import kv_answer
from octavo_engine.server.generation.logprobs import chat_logprobs, prompt_logprobs
from octavo_engine.server.generation.structured import note_validity
from octavo_engine.server.http.exchange import JSON
from octavo_engine.server.openai.chat.session import ChatSession, client_reason

if TYPE_CHECKING:
    from octavo_engine.core.text.logprobs import DecodedLogprobs
    from octavo_engine.core.text.outputs import RequestOutput
    from octavo_engine.server.http.exchange import Exchange
    from octavo_engine.server.openai.chat.prepare import PreparedChat
    from octavo_engine.server.openai.chat.session import CallDelta, ChatDelta, ChoiceDelta
    from octavo_engine.server.service import Service


@dataclass(slots=True)
class WholeChoice:
    """All of one answer, joined from its deltas."""

    index: int
    content: str = ""
    reasoning: str = ""
    calls: dict[int, CallDelta] = field(default_factory=dict)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[DecodedLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    def add(self, delta: ChoiceDelta) -> None:
        self.content += delta.content
        self.reasoning += delta.reasoning
        for call in delta.calls:
            known = self.calls.setdefault(call.index, call)
            if known is not call:
                known.arguments += call.arguments
        self.token_ids += delta.token_ids
        if delta.logprobs is not None:
            self.logprobs = [*(self.logprobs or ()), *delta.logprobs]
        self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason


async def collect(session: ChatSession) -> tuple[list[WholeChoice], RequestOutput]:
    """All answers in order, and the engine's own output for what it says of the prompt."""
    choices: dict[int, WholeChoice] = {}
    result: RequestOutput | None = None

    async def put(delta: ChatDelta) -> None:
        nonlocal result
        for choice in delta.choices:
            choices.setdefault(choice.index, WholeChoice(choice.index)).add(choice)
        if result is None:
            result = delta.output
        else:
            result.absorb(delta.output)

    await session.run(OutputSink(put), stream=False)
    assert result is not None  # a request ends with an output or an error
    return [choices[index] for index in sorted(choices)], result


async def answer_whole(exchange: Exchange, service: Service, prepared: PreparedChat) -> None:
    session = ChatSession(service, prepared)
    choices, result = await collect(session)
    request = prepared.request
    scores = result.prompt_logprobs if request.prompt_logprobs is not None else None
    texts = [choice.content for choice in choices if not choice.calls]
    await note_validity(exchange, request, prepared.reading.grammar, texts)
    await exchange.reply(
        msgspec.json.encode(
            {
                "id": prepared.id,
                "object": "chat.completion",
                "created": prepared.created,
                "model": prepared.model,
                "choices": [_choice(prepared, choice) for choice in choices],
                "service_tier": None,
                "system_fingerprint": None,
                "usage": session.usage.as_dict(),
                "prompt_logprobs": None if scores is None else prompt_logprobs(scores),
                "prompt_token_ids": result.prompt_token_ids if request.return_token_ids else None,
                "prompt_text": prepared.prompt if request.return_prompt_text else None,
                "kv_transfer_params": kv_answer(
                    request.kv_transfer_params, service.engine.info, prepared.id
                ),
            }
        ),
        headers=[JSON, *load_headers(exchange, service)],
    )


def _choice(prepared: PreparedChat, choice: WholeChoice) -> dict[str, Any]:
    logprobs = None
    if choice.logprobs is not None:
        logprobs = chat_logprobs(choice.logprobs, as_ids=prepared.as_ids)
    content: str | None = prepared.echo + choice.content
    if not content and (choice.calls or choice.reasoning):
        content = None
    calls = [{"name": call.name, "arguments": call.arguments} for call in choice.calls.values()]
    message: dict[str, Any] = {
        "role": prepared.role,
        "content": content,
        "refusal": None,
        "annotations": None,
        "audio": None,
        "function_call": calls[0] if calls and prepared.has_functions else None,
        "reasoning": choice.reasoning or None,
    }
    if calls and not prepared.has_functions:  # an empty list is no list to some clients
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": function}
            for call, function in zip(choice.calls.values(), calls, strict=True)
        ]
    return {
        "index": choice.index,
        "message": message,
        "logprobs": logprobs,
        "finish_reason": client_reason(prepared, choice.finish_reason),
        "stop_reason": choice.stop_reason,
        "token_ids": choice.token_ids if prepared.request.return_token_ids else None,
    }
