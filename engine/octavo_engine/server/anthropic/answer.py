"""One message as it comes about: its blocks, and the events that describe each change.

message_start → for each block: start, deltas, stop → message_delta → message_stop, and a ping once
the first block has begun. A message that is not streamed is made the same way.
"""

from __future__ import annotations

import base64
import hashlib
import json
from typing import TYPE_CHECKING, Any

import msgspec

from octavo_engine.server.anthropic import shapes
from octavo_engine.server.openai.chat.parts import ChatParts, PartDelta, PartEnded, PartStarted

if TYPE_CHECKING:
    from octavo_engine.server.anthropic.shapes import ContentBlock, MessageEvent, StopReason
    from octavo_engine.server.generation.usage import Usage
    from octavo_engine.server.openai.chat.parts import ChatPart, Step
    from octavo_engine.server.openai.chat.session import ChoiceDelta


class MessageBuilder:
    """Of one message. `is_cut_short`: the room there is, is less than the client requested."""

    def __init__(self, *, id: str, model: str, usage: Usage, is_cut_short: bool) -> None:
        self._id = id
        self._model = model
        self._usage = usage
        self._is_cut_short = is_cut_short
        self._parts = ChatParts()
        self._finish_reason: str | None = None
        self._stop_sequence: str | None = None

    def begin(self) -> list[MessageEvent]:
        """After the first delta: only then is it known what came from the cache."""
        message = self._message([], None)
        message.usage.output_tokens = message.usage.output_tokens_details.thinking_tokens = 0
        return [shapes.MessageStart(message=message)]

    def read(self, delta: ChoiceDelta) -> list[MessageEvent]:
        """Hot path: once per delta."""
        if delta.finish_reason is not None:
            self._finish_reason = delta.finish_reason
            if isinstance(delta.stop_reason, str):
                self._stop_sequence = delta.stop_reason
        return self._events(self._parts.read(delta))

    def end(self) -> list[MessageEvent]:
        events = self._events(self._parts.end())
        end = shapes.MessageEnd(stop_reason=self._stop_reason, stop_sequence=self._stop_sequence)
        usage = usage_of(self._usage)
        return [*events, shapes.MessageDelta(delta=end, usage=usage), shapes.MessageStop()]

    def whole(self) -> shapes.AnthropicAnswer:
        """After `end`."""
        return self._message([_block(part) for part in self._parts.parts], self._stop_reason)

    def _message(
        self, content: list[ContentBlock], stop_reason: StopReason | None
    ) -> shapes.AnthropicAnswer:
        return shapes.AnthropicAnswer(
            id=self._id,
            role="assistant",
            model=self._model,
            content=content,
            stop_reason=stop_reason,
            stop_sequence=None if stop_reason is None else self._stop_sequence,
            usage=usage_of(self._usage),
        )

    @property
    def _stop_reason(self) -> StopReason:
        match self._finish_reason:
            case "length":
                return "model_context_window_exceeded" if self._is_cut_short else "max_tokens"
            case "abort":
                return "pause_turn"
            case _ if self._stop_sequence is not None:
                return "stop_sequence"
            case _:
                return "tool_use" if self._parts.has_calls else "end_turn"

    def _events(self, steps: list[Step]) -> list[MessageEvent]:
        events: list[MessageEvent] = []
        for step in steps:
            match step:
                case PartStarted(part):
                    block = _block(part, is_empty=True)
                    events.append(shapes.BlockStart(index=part.index, content_block=block))
                    if part.index == 0:
                        events.append(shapes.PingEvent())
                case PartDelta(part, text, _):
                    if text:
                        events.append(shapes.BlockDelta(index=part.index, delta=_piece(part, text)))
                case PartEnded(part):
                    if part.kind == "reasoning":
                        sign = shapes.SignaturePiece(signature=_signature(part.text))
                        events.append(shapes.BlockDelta(index=part.index, delta=sign))
                    events.append(shapes.BlockStop(index=part.index))
        return events


def frame(event: MessageEvent) -> bytes:
    """As it goes over the wire."""
    tag = str(event.__struct_config__.tag).encode()
    return b"event: %s\ndata: %s\n\n" % (tag, msgspec.json.encode(event))


def usage_of(usage: Usage) -> shapes.AnthropicUsage:
    cached = usage.cached_tokens
    return shapes.AnthropicUsage(
        input_tokens=usage.prompt_tokens - cached,
        cache_creation_input_tokens=0,
        cache_read_input_tokens=cached,
        output_tokens=usage.completion_tokens,
        output_tokens_details=shapes.AnthropicOutputDetails(thinking_tokens=usage.reasoning_tokens),
    )


def _block(part: ChatPart, *, is_empty: bool = False) -> ContentBlock:
    text = "" if is_empty else part.text
    if part.kind == "call":
        return shapes.ToolUseBlock(id=part.call_id, name=part.name, input=_input(text))
    if part.kind == "reasoning":
        signature = "" if is_empty else _signature(text)
        return shapes.ThinkingBlock(thinking=text, signature=signature)
    return shapes.TextBlock(text=text, citations=None)


def _piece(
    part: ChatPart, text: str
) -> shapes.TextDelta | shapes.InputPiece | shapes.ThinkingPiece:  # fmt: skip
    if part.kind == "call":
        return shapes.InputPiece(partial_json=text)
    if part.kind == "reasoning":
        return shapes.ThinkingPiece(thinking=text)
    return shapes.TextDelta(text=text)


def _input(arguments: str) -> dict[str, Any]:
    """The form has room for an object only; what the model cut off or garbled is shown as text."""
    if not arguments.strip():
        return {}
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return {"_invalid": arguments}
    return value if isinstance(value, dict) else {"_invalid": arguments}


def _signature(text: str) -> str:
    """Clients send it back with the reasoning; ours proves nothing and is not looked at."""
    digest = hashlib.blake2b(text.encode(errors="replace"), digest_size=24).digest()
    return base64.b64encode(digest).decode()
