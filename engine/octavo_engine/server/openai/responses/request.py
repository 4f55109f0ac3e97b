"""A responses request as a chat request, and an error of the chat in the words of this one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from octavo_engine.errors import InvalidRequest
from octavo_engine.server.http.error_params import blame
from octavo_engine.server.http.errors import not_supported
from octavo_engine.server.openai.responses.items import plain, said_in
from octavo_engine.server.openai.schemas import ChatCompletionRequest, ChatMessageBody

if TYPE_CHECKING:
    from collections.abc import Sequence

    from octavo_engine.errors import RequestError
    from octavo_engine.server.openai.responses.bodies import ResponsesRequest

# Fields of the chat request under the same name.
SAME = (
    "model", "stream", "temperature", "top_p", "top_k", "min_p", "seed", "stop",
    "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "min_tokens",
    "ignore_eos", "stop_token_ids", "include_stop_str_in_output", "skip_special_tokens",
    "bad_words", "allowed_token_ids", "chat_template_kwargs", "structured_outputs", "cache_salt",
    "priority", "request_id", "user", "parallel_tool_calls", "cache_control",
    "prompt_cache_retention", "session_id", "prefetch",
)  # fmt: skip
LOGPROBS, ENCRYPTED = "message.output_text.logprobs", "reasoning.encrypted_content"
# What `include` may name. All but the logprobs belong to tools and inputs that are not here, or
# would hide what is sent openly: they add nothing.
INCLUDABLE = (
    LOGPROBS, ENCRYPTED, "file_search_call.results", "web_search_call.results",
    "web_search_call.action.sources", "message.input_image.image_url",
    "computer_call_output.output.image_url", "code_interpreter_call.outputs",
)  # fmt: skip
MAX_METADATA, MAX_KEY_CHARS, MAX_VALUE_CHARS = 16, 64, 512
# How the chat calls what this request calls otherwise.
_NAMES = {
    "prompt": "input",
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
    "response_format.json_schema": "text.format",
    "response_format.json_schema.schema": "text.format.schema",
    "logprobs": "top_logprobs",
}


@dataclass(frozen=True, slots=True)
class ResponseTurn:
    """A request, ready for the chat."""

    chat: ChatCompletionRequest
    said: list[ChatMessageBody]  # all that was said so far, without the instructions
    places: list[str]  # the field that each message of the chat came from

    def rename(self, error: RequestError) -> None:
        """The field as this client knows it, in the error's words too."""
        blame(error, _NAMES, self.places, tool=lambda field: field.replace("].function", "]"))


def read_turn(request: ResponsesRequest, before: Sequence[ChatMessageBody]) -> ResponseTurn:
    """`before`: what was said in the responses before. Raises RequestError."""
    check(request)
    said = said_in(request.input, before)
    messages = [*before, *(one.message for one in said)]
    places = ["previous_response_id"] * len(before) + [one.place for one in said]
    system: list[ChatMessageBody] = []
    if request.instructions is not None:
        system.append(ChatMessageBody(role="system", content=request.instructions))
    chat = ChatCompletionRequest(messages=_with_one_system([*system, *messages]))
    # Where instructions and the first messages became one, that one stands for all of them.
    merged = len(system) + len(messages) - len(chat.messages)
    places = (["instructions"] * len(system) + places)[merged:]
    for name in SAME:
        setattr(chat, name, getattr(request, name))
    chat.max_completion_tokens = request.max_output_tokens
    if request.reasoning is not None:
        chat.reasoning_effort = request.reasoning.effort
    if wants_logprobs(request):
        chat.logprobs, chat.top_logprobs = True, request.top_logprobs
    if request.text is not None and request.text.format is not None:
        chat.response_format = _response_format(request.text.format)
    if request.tools:
        chat.tools = [_tool(f"tools[{n}]", tool) for n, tool in enumerate(request.tools)]
        chat.tool_choice = _tool_choice(request.tool_choice)
    elif request.tool_choice not in (None, "auto", "none"):
        raise InvalidRequest("tool_choice needs tools", param="tool_choice")
    return ResponseTurn(chat, messages, places)


def wants_logprobs(request: ResponsesRequest) -> bool:
    return LOGPROBS in (request.include or ()) or bool(request.top_logprobs)


def check(request: ResponsesRequest) -> None:
    """What no chat request has. Raises RequestError."""
    for name in ("conversation", "prompt"):
        if getattr(request, name) not in (None, [], {}):
            raise not_supported(name)
    for entry in request.include or ():
        if entry not in INCLUDABLE:
            raise InvalidRequest(
                f"include: {entry[:60]!r} is not one of {', '.join(INCLUDABLE)}", param="include"
            )
    if request.max_tool_calls is not None and request.max_tool_calls < 0:
        raise InvalidRequest(
            f"max_tool_calls must be at least 0; got {request.max_tool_calls}",
            param="max_tool_calls",
        )
    if request.stream_options is not None and not request.stream:
        raise InvalidRequest(
            "stream_options is only allowed with stream: true", param="stream_options"
        )
    if isinstance(request.input, list) and not request.input:
        raise InvalidRequest("input must hold at least one item", param="input")
    _check_metadata(request.metadata or {})


def _check_metadata(metadata: dict[str, str]) -> None:
    if len(metadata) > MAX_METADATA:
        raise InvalidRequest(
            f"metadata must be at most {MAX_METADATA} entries; got {len(metadata)}",
            param="metadata",
        )
    for key, value in metadata.items():
        if len(key) > MAX_KEY_CHARS or len(value) > MAX_VALUE_CHARS:
            raise InvalidRequest(
                f"metadata: keys have at most {MAX_KEY_CHARS} characters, values "
                f"{MAX_VALUE_CHARS}; {key[:MAX_KEY_CHARS]!r} has more",
                param="metadata",
            )


def _with_one_system(messages: list[ChatMessageBody]) -> list[ChatMessageBody]:
    """Instructions and the system messages right after them as one: few templates know two."""
    count = 0
    while count < len(messages) and messages[count].role in ("system", "developer"):
        count += 1
    if count < 2:
        return messages
    texts = [plain(message.content or "") for message in messages[:count]]
    return [ChatMessageBody(role="system", content="\n\n".join(texts)), *messages[count:]]


def _response_format(given: dict[str, Any]) -> dict[str, Any]:
    if given.get("type") != "json_schema":
        return given
    return {"type": "json_schema", "json_schema": {k: v for k, v in given.items() if k != "type"}}


def _tool(at: str, tool: dict[str, Any]) -> dict[str, Any]:
    kind = tool.get("type")
    if kind != "function":
        raise not_supported(
            f"{at}.type {kind!r:.50}", "only function is: the server runs no tools itself",
            param=f"{at}.type",
        )  # fmt: skip
    fields = ("name", "description", "parameters", "strict")
    function = {name: tool[name] for name in fields if tool.get(name) is not None}
    return {"type": "function", "function": function}


def _tool_choice(choice: str | dict[str, Any] | None) -> Any:
    if not isinstance(choice, dict):
        return choice
    match choice:
        case {"type": "function", "name": str(name)}:
            return {"type": "function", "function": {"name": name}}
        case {"type": "allowed_tools", **rest}:
            return {"type": "allowed_tools", "allowed_tools": rest}
        case {"type": "function"}:
            raise InvalidRequest("tool_choice.name is required", param="tool_choice.name")
        case _:
            raise not_supported(
                f"tool_choice.type {choice.get('type')!r:.50}", "function and allowed_tools are",
                param="tool_choice",
            )  # fmt: skip
