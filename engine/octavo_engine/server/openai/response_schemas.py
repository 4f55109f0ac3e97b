"""The shapes of the answers, for /openapi.json and docs/api.md. What writes them is elsewhere.

Hot paths write their JSON by hand; a test holds what they write against these shapes, so that
neither can change alone. Fields with a default are not always there.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

FinishReason = Literal[
    "stop", "length", "tool_calls", "function_call", "abort", "error", "repetition"
]


class ErrorDetail(msgspec.Struct, kw_only=True):
    """What went wrong, and what to do."""

    message: str
    type: str
    param: str | None  # the field to blame, if one is
    code: str | None  # see docs/errors.md


class Error(msgspec.Struct, kw_only=True):
    """Every error, also inside a broken stream."""

    error: ErrorDetail


# ── usage and logprobs ──


class PromptTokensDetails(msgspec.Struct, kw_only=True):
    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct, kw_only=True):
    reasoning_tokens: int
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class UsageAnswer(msgspec.Struct, kw_only=True):
    prompt_tokens: int
    total_tokens: int
    completion_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class TopLogprob(msgspec.Struct, kw_only=True):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct, kw_only=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, kw_only=True):
    content: list[TokenLogprob]


class CompletionLogprobs(msgspec.Struct, kw_only=True):
    """Parallel lists, one entry a token."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class PromptLogprob(msgspec.Struct, kw_only=True):
    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]  # by token id


# ── text ──


class CompletionChoice(msgspec.Struct, kw_only=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason
    stop_reason: str | int | None
    token_ids: list[int] | None
    prompt_logprobs: PromptLogprobs | None
    prompt_token_ids: list[int] | None


class KVTransferAnswer(msgspec.Struct, kw_only=True):
    """Where the prompt's KV cache lies, for a request with `do_remote_decode`."""

    do_remote_prefill: bool
    do_remote_decode: bool
    remote_engine_id: str
    remote_request_id: str
    remote_block_ids: None
    remote_host: str
    remote_port: int


class CompletionAnswer(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    service_tier: str | None
    system_fingerprint: str | None
    usage: UsageAnswer
    kv_transfer_params: KVTransferAnswer | None


class CompletionDelta(msgspec.Struct, kw_only=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class CompletionChunk(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionDelta]
    usage: UsageAnswer | None = None


# ── chat ──


class FunctionCall(msgspec.Struct, kw_only=True):
    name: str
    arguments: str


class ToolCall(msgspec.Struct, kw_only=True):
    id: str
    type: Literal["function"]
    function: FunctionCall


class ChatMessage(msgspec.Struct, kw_only=True):
    role: str
    content: str | None
    refusal: str | None
    annotations: list[Any] | None
    audio: None
    function_call: FunctionCall | None
    tool_calls: list[ToolCall] | msgspec.UnsetType = msgspec.UNSET  # absent where none is made
    reasoning: str | None


class ChatChoice(msgspec.Struct, kw_only=True):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    stop_reason: str | int | None
    token_ids: list[int] | None


class ChatCompletion(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    service_tier: str | None
    system_fingerprint: str | None
    usage: UsageAnswer
    prompt_logprobs: PromptLogprobs | None
    prompt_token_ids: list[int] | None
    prompt_text: str | None
    kv_transfer_params: KVTransferAnswer | None


class FunctionCallDelta(msgspec.Struct, kw_only=True):
    name: str | None = None
    arguments: str | None = None


class ToolCallDelta(msgspec.Struct, kw_only=True):
    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionCallDelta | None = None


class ChatDeltaAnswer(msgspec.Struct, kw_only=True):
    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCallDelta] | None = None
    function_call: FunctionCallDelta | None = None  # where functions were given, not tools


class ChatChunkChoice(msgspec.Struct, kw_only=True):
    index: int
    delta: ChatDeltaAnswer
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None


class ChatCompletionChunk(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    prompt_token_ids: list[int] | None = None
    prompt_text: str | None = None
    usage: UsageAnswer | None = None


# ── tokens, models, the server itself ──


class Tokenized(msgspec.Struct, kw_only=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(msgspec.Struct, kw_only=True):
    prompt: str


class ModelCard(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int | None
    permission: list[dict[str, Any]]
    vocab_size: int | None
    tasks: list[str] | None  # generate, or what else the model does
    implementation: str | None  # octavo; or transformers, whose bits may depend on the batch


class ModelList(msgspec.Struct, kw_only=True):
    object: Literal["list"]
    data: list[ModelCard]


class Version(msgspec.Struct, kw_only=True):
    version: str


class ServerLoad(msgspec.Struct, kw_only=True):
    server_load: int  # requests in flight


class TokenizerInfo(msgspec.Struct, kw_only=True):
    """What a client needs to write prompts as the model reads them."""

    tokenizer_class: str
    vocab_size: int
    model_max_length: int
    bos_token: str | None
    eos_token: str | None
    eos_token_ids: list[int]
    special_tokens: dict[str, str]  # by id
    chat_template: str | dict[str, str] | None  # several by name


class DrainStatus(msgspec.Struct, kw_only=True):
    state: Literal["draining"]
    in_flight: int


class LoadingStatus(msgspec.Struct, kw_only=True):
    phase: Literal["fetching", "loading"]
    bytes_done: int
    bytes_total: int  # 0: not known yet
    bytes_per_s: int  # 0: not known yet


class Probe(msgspec.Struct, kw_only=True):
    state: Literal["loading", "ready", "saturated", "stalled", "draining", "dead"]
    reason: str | None = None
    progress: float | None = None  # of loading, from 0 to 1
    loading: LoadingStatus | None = None
