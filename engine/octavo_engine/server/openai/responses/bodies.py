"""The body of POST /v1/responses and the queries of the routes beside it.

Fields unknown to us are accepted. Those typed Any would change the answer if they meant something
here: `request.py` says which of their values are refused.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class InputPart(msgspec.Struct, kw_only=True):
    """Of a message, of a tool's output, of reasoning."""

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: str | None = None
    detail: str | None = None


class InputItem(msgspec.Struct, kw_only=True):
    """A message, function_call, function_call_output or reasoning, by its type."""

    type: str = "message"
    id: str | None = None
    status: str | None = None
    role: str | None = None
    content: str | list[InputPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[InputPart] | None = None
    summary: list[InputPart] | None = None
    encrypted_content: str | None = None


class ReasoningOptions(msgspec.Struct, kw_only=True):
    effort: str | None = None
    summary: str | None = None  # none are written: the reasoning itself is shown
    generate_summary: str | None = None


class TextOptions(msgspec.Struct, kw_only=True):
    format: dict[str, Any] | None = None
    verbosity: str | None = None


class ResponsesStreamOptions(msgspec.Struct, kw_only=True):
    include_obfuscation: bool | None = None


class ResponseInput(msgspec.Struct, kw_only=True):
    """What the prompt of a response is made of, its input aside."""

    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    truncation: Literal["auto", "disabled"] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    conversation: Any = None  # of other services: refused


class InputTokensRequest(ResponseInput, kw_only=True):
    """What a prompt is made of."""

    input: str | list[InputItem] | None = None


class ResponsesRequest(ResponseInput, kw_only=True):
    input: str | list[InputItem]
    stream: bool | None = None
    stream_options: ResponsesStreamOptions | None = None
    store: bool | None = None
    background: bool | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None  # of tools that the server runs: there are none
    include: list[str] | None = None
    top_logprobs: int | None = None
    metadata: dict[str, str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: str | None = None
    prompt: Any = None  # of other services: refused
    # as a chat request has them
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    structured_outputs: Any = None
    cache_salt: str | None = None
    cache_control: Any = None
    prompt_cache_retention: Any = None
    session_id: str | None = None
    prefetch: bool | None = None
    priority: int | None = None
    request_id: str | None = None


class ResponseQuery(msgspec.Struct, kw_only=True):
    stream: bool | None = None
    starting_after: int | None = None  # the sequence_number of the last event that was seen


class InputItemsQuery(msgspec.Struct, kw_only=True):
    after: str | None = None
    order: Literal["asc", "desc"] | None = None
    limit: int | None = None
