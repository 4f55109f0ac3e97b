"""What the Messages API says: the message, its blocks, the events of its stream, its errors."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

StopReason = Literal[
    "end_turn", "max_tokens", "stop_sequence", "tool_use", "pause_turn",
    "model_context_window_exceeded",
]  # fmt: skip


class AnthropicErrorDetail(msgspec.Struct, kw_only=True):
    type: str
    message: str


class AnthropicError(msgspec.Struct, kw_only=True, tag_field="type", tag="error"):
    """Every error of these paths."""

    error: AnthropicErrorDetail
    request_id: str


# ── the message ──


class TextBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="text"):
    text: str
    citations: None


class ToolUseBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


class ThinkingBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="thinking"):
    thinking: str
    signature: str


ContentBlock = TextBlock | ToolUseBlock | ThinkingBlock


class AnthropicOutputDetails(msgspec.Struct, kw_only=True):
    thinking_tokens: int


class AnthropicUsage(msgspec.Struct, kw_only=True):
    """Tokens of the prompt are those read from the cache and, beside them, input_tokens."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: AnthropicOutputDetails


class AnthropicAnswer(msgspec.Struct, kw_only=True, tag_field="type", tag="message"):
    id: str
    role: Literal["assistant"]
    model: str
    content: list[ContentBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: AnthropicUsage


class TokenCount(msgspec.Struct, kw_only=True):
    input_tokens: int


# ── models ──


class AnthropicModel(msgspec.Struct, kw_only=True, tag_field="type", tag="model"):
    id: str
    display_name: str
    created_at: str  # RFC 3339
    lifecycle: Literal["active"]
    max_input_tokens: int | None  # null while the model is loaded
    max_tokens: int | None


class AnthropicModelList(msgspec.Struct, kw_only=True):
    data: list[AnthropicModel]
    first_id: str | None
    last_id: str | None
    has_more: bool


# ── events ──


class MessageStart(msgspec.Struct, kw_only=True, tag_field="type", tag="message_start"):
    message: AnthropicAnswer


class PingEvent(msgspec.Struct, kw_only=True, tag_field="type", tag="ping"):
    pass


class BlockStart(msgspec.Struct, kw_only=True, tag_field="type", tag="content_block_start"):
    index: int
    content_block: ContentBlock


class TextDelta(msgspec.Struct, kw_only=True, tag_field="type", tag="text_delta"):
    text: str


class InputPiece(msgspec.Struct, kw_only=True, tag_field="type", tag="input_json_delta"):
    partial_json: str


class ThinkingPiece(msgspec.Struct, kw_only=True, tag_field="type", tag="thinking_delta"):
    thinking: str


class SignaturePiece(msgspec.Struct, kw_only=True, tag_field="type", tag="signature_delta"):
    signature: str


class BlockDelta(msgspec.Struct, kw_only=True, tag_field="type", tag="content_block_delta"):
    index: int
    delta: TextDelta | InputPiece | ThinkingPiece | SignaturePiece


class BlockStop(msgspec.Struct, kw_only=True, tag_field="type", tag="content_block_stop"):
    index: int


class MessageEnd(msgspec.Struct, kw_only=True):
    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(msgspec.Struct, kw_only=True, tag_field="type", tag="message_delta"):
    delta: MessageEnd
    usage: AnthropicUsage


class MessageStop(msgspec.Struct, kw_only=True, tag_field="type", tag="message_stop"):
    pass


class MessageBroken(msgspec.Struct, kw_only=True, tag_field="type", tag="error"):
    """The last event of a stream that failed."""

    error: AnthropicErrorDetail


MessageEvent = (
    MessageStart | PingEvent | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop
    | MessageBroken
)  # fmt: skip
