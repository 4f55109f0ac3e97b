"""The bodies of POST /v1/messages and /v1/messages/count_tokens. Unknown fields are accepted."""

from __future__ import annotations

from typing import Any

import msgspec


class ContentBlock(msgspec.Struct, kw_only=True):
    """A text, image, tool_use, tool_result, thinking or redacted_thinking, by its type."""

    type: str
    text: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: Any = None  # of a tool_result: text or blocks
    is_error: bool | None = None
    thinking: str | None = None
    signature: str | None = None  # not looked at: reasoning is not secret
    data: str | None = None
    source: dict[str, Any] | None = None  # of an image
    cache_control: Any = None


class AnthropicMessage(msgspec.Struct, kw_only=True):
    role: str
    content: str | list[ContentBlock]


class AnthropicTool(msgspec.Struct, kw_only=True):
    name: str
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    cache_control: Any = None


class AnthropicToolChoice(msgspec.Struct, kw_only=True):
    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct, kw_only=True):
    type: str
    budget_tokens: int | None = None  # max_tokens bounds reasoning and answer together
    display: str | None = None


class OutputConfig(msgspec.Struct, kw_only=True):
    effort: str | None = None
    format: dict[str, Any] | None = None


class ContextEdit(msgspec.Struct, kw_only=True):
    type: str


class ContextManagement(msgspec.Struct, kw_only=True):
    edits: list[ContextEdit] | None = None


class CountTokensRequest(msgspec.Struct, kw_only=True):
    """What a prompt is made of."""

    messages: list[AnthropicMessage]
    model: str | None = None
    system: str | list[ContentBlock] | None = None
    tools: list[AnthropicTool] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    context_management: ContextManagement | None = None
    # of other services: refused
    container: Any = None
    mcp_servers: Any = None


class MessagesRequest(CountTokensRequest, kw_only=True):
    max_tokens: int
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    # as a chat request has them
    min_p: float | None = None
    seed: int | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool | None = None
    cache_salt: str | None = None
    cache_control: Any = None
    session_id: str | None = None
    prefetch: bool | None = None
    priority: int | None = None
    request_id: str | None = None
