"""What the Responses API says: the response, its items, the events of its stream."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from octavo_engine.server.openai.response_schemas import TokenLogprob  # noqa: TC001  (msgspec reads)

Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
ItemStatus = Literal["in_progress", "completed", "incomplete"]

# ── items ──


class OutputText(msgspec.Struct, kw_only=True, tag_field="type", tag="output_text"):
    text: str
    annotations: list[dict[str, Any]]
    logprobs: list[TokenLogprob]


class ReasoningText(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning_text"):
    text: str


class OutputMessage(msgspec.Struct, kw_only=True, tag_field="type", tag="message"):
    id: str
    status: ItemStatus
    role: Literal["assistant"]
    content: list[OutputText]


class ReasoningItem(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning"):
    """Reasoning, as the model wrote it."""

    id: str
    status: ItemStatus
    summary: list[dict[str, Any]]
    content: list[ReasoningText]


class FunctionCallItem(msgspec.Struct, kw_only=True, tag_field="type", tag="function_call"):
    id: str
    status: ItemStatus
    call_id: str
    name: str
    arguments: str


OutputItem = OutputMessage | ReasoningItem | FunctionCallItem

# ── the response ──


class InputTokensDetails(msgspec.Struct, kw_only=True):
    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(msgspec.Struct, kw_only=True):
    reasoning_tokens: int


class ResponseUsage(msgspec.Struct, kw_only=True):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseFailure(msgspec.Struct, kw_only=True):
    code: str  # see docs/errors.md
    message: str


class IncompleteDetails(msgspec.Struct, kw_only=True):
    reason: str


class ReasoningSettings(msgspec.Struct, kw_only=True):
    effort: str | None
    summary: str | None


class TextSettings(msgspec.Struct, kw_only=True):
    format: dict[str, Any]
    verbosity: str


class ResponseObject(msgspec.Struct, kw_only=True):
    """A response, with its request."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Status
    background: bool
    error: ResponseFailure | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: ReasoningSettings
    safety_identifier: str | None
    service_tier: str
    store: bool
    temperature: float
    presence_penalty: float
    frequency_penalty: float
    text: TextSettings
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["auto", "disabled"]
    usage: ResponseUsage | None
    user: str | None


class InputTokens(msgspec.Struct, kw_only=True):
    object: Literal["response.input_tokens"]
    input_tokens: int


class DeletedResponse(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["response"]
    deleted: bool


class InputItemList(msgspec.Struct, kw_only=True):
    """The input of a request, item by item, without that of earlier responses."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


# ── events ──


class _Event(msgspec.Struct, kw_only=True, tag_field="type"):
    sequence_number: int


class _OfResponse(_Event, kw_only=True):
    response: ResponseObject


class ResponseCreated(_OfResponse, kw_only=True, tag="response.created"):
    pass


class ResponseInProgress(_OfResponse, kw_only=True, tag="response.in_progress"):
    pass


class ResponseCompleted(_OfResponse, kw_only=True, tag="response.completed"):
    pass


class ResponseIncomplete(_OfResponse, kw_only=True, tag="response.incomplete"):
    pass


class ResponseFailed(_OfResponse, kw_only=True, tag="response.failed"):
    pass


class StreamErrorEvent(_Event, kw_only=True, tag="error"):
    """What broke the stream, as in docs/errors.md; response.failed follows."""

    code: str | None
    message: str
    param: str | None


class _OfItem(_Event, kw_only=True):
    output_index: int


class ItemAdded(_OfItem, kw_only=True, tag="response.output_item.added"):
    item: OutputItem


class ItemDone(_OfItem, kw_only=True, tag="response.output_item.done"):
    item: OutputItem


class _OfPart(_OfItem, kw_only=True):
    item_id: str
    content_index: int


class PartAdded(_OfPart, kw_only=True, tag="response.content_part.added"):
    part: OutputText | ReasoningText


class PartDone(_OfPart, kw_only=True, tag="response.content_part.done"):
    part: OutputText | ReasoningText


class OutputTextDelta(_OfPart, kw_only=True, tag="response.output_text.delta"):
    delta: str
    logprobs: list[TokenLogprob]


class OutputTextDone(_OfPart, kw_only=True, tag="response.output_text.done"):
    text: str
    logprobs: list[TokenLogprob]


class ReasoningDelta(_OfPart, kw_only=True, tag="response.reasoning_text.delta"):
    delta: str


class ReasoningDone(_OfPart, kw_only=True, tag="response.reasoning_text.done"):
    text: str


class ArgumentsDelta(_OfItem, kw_only=True, tag="response.function_call_arguments.delta"):
    item_id: str
    delta: str


class ArgumentsDone(_OfItem, kw_only=True, tag="response.function_call_arguments.done"):
    item_id: str
    name: str
    arguments: str


Event = (
    ResponseCreated | ResponseInProgress | ResponseCompleted | ResponseIncomplete | ResponseFailed
    | StreamErrorEvent | ItemAdded | ItemDone | PartAdded | PartDone | OutputTextDelta
    | OutputTextDone
    | ReasoningDelta | ReasoningDone | ArgumentsDelta | ArgumentsDone
)  # fmt: skip
