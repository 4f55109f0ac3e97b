"""A messages request as a chat request, and an error of the chat in the words of this one."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from octavo_engine.errors import InvalidRequest
from octavo_engine.server.anthropic.bodies import ContentBlock, MessagesRequest
from octavo_engine.server.generation.retention import ttl_of
from octavo_engine.server.http.error_params import blame
from octavo_engine.server.http.errors import not_supported
from octavo_engine.server.openai.schemas import (
    ChatCompletionRequest,
    ChatMessageBody,
    ContentPart,
)

if TYPE_CHECKING:
    from octavo_engine.errors import RequestError
    from octavo_engine.server.anthropic.bodies import (
        AnthropicMessage,
        AnthropicTool,
        AnthropicToolChoice,
        ContextManagement,
        CountTokensRequest,
        Thinking,
    )

SAME = (
    "model", "stream", "temperature", "top_p", "top_k", "min_p", "seed", "repetition_penalty",
    "ignore_eos", "cache_salt", "priority", "request_id", "max_tokens", "session_id", "prefetch",
)  # fmt: skip
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_THINKING = {"enabled": True, "adaptive": None, "between_tools": None, "disabled": False}
# How the chat calls what this request calls otherwise.
_NAMES = {
    "prompt": "messages",
    "stop": "stop_sequences",
    "reasoning_effort": "output_config.effort",
    "thinking_token_budget": "thinking.budget_tokens",
    "response_format": "output_config.format",
    "response_format.json_schema": "output_config.format",
    "response_format.json_schema.schema": "output_config.format.schema",
}
_TOOL = re.compile(r"(tools\[\d+\])\.function\.?(parameters)?")


def _tool_field(before: str) -> str:
    met = _TOOL.match(before)
    if met is None:
        return before
    field = "input_schema" if met[2] else before[met.end() :]
    return f"{met[1]}.{field}" if field else met[1]


@dataclass(frozen=True, slots=True)
class MessageTurn:
    """A request, ready for the chat."""

    chat: ChatCompletionRequest
    places: list[str]  # the field that each message of the chat came from

    def rename(self, error: RequestError) -> None:
        """The field as this client knows it, in the error's words: its form has no other place."""
        blame(error, _NAMES, self.places, tool=_tool_field)


def read_turn(request: CountTokensRequest) -> MessageTurn:
    """Raises RequestError that names the field."""
    for name in ("container", "mcp_servers"):
        if getattr(request, name) not in (None, [], {}):
            raise not_supported(name)
    _check_edits(request.context_management)
    reader = _Reader()
    if request.system is not None:
        text = _texts("system", request.system)
        if text:
            reader.add(ChatMessageBody(role="system", content=text), "system")
    if not request.messages:
        raise InvalidRequest("messages must hold at least one message", param="messages")
    for number, message in enumerate(request.messages):
        reader.read(f"messages[{number}]", message)
    chat = ChatCompletionRequest(messages=reader.messages)
    if request.messages[-1].role == "assistant":  # its answer goes on where this ends
        chat.continue_final_message = True
        chat.add_generation_prompt = False
    _add_tools(chat, request)
    _add_thinking(chat, request)
    if isinstance(request, MessagesRequest):
        for name in SAME:
            setattr(chat, name, getattr(request, name))
        chat.stop = request.stop_sequences
        chat.cache_control = _cache_control(request)
    return MessageTurn(chat, reader.places)


def _cache_control(request: MessagesRequest) -> Any:
    """The request's own; without one, the longest that any of its parts has: all of the prompt is
    retained in any case."""
    if request.cache_control is not None:
        return request.cache_control
    marked = [(f"tools[{n}]", tool.cache_control) for n, tool in enumerate(request.tools or ())]
    contents = [("system", request.system)]
    contents += [(f"messages[{n}].content", m.content) for n, m in enumerate(request.messages)]
    for at, content in contents:
        if isinstance(content, list):
            marked += [(f"{at}[{n}]", block.cache_control) for n, block in enumerate(content)]
    found = [
        (ttl_of(control, f"{at}.cache_control"), control)
        for at, control in marked
        if control is not None
    ]
    return max(found, key=lambda one: one[0])[1] if found else None


def _check_edits(management: ContextManagement | None) -> None:
    """Thoughts of earlier turns are the chat template's to keep or drop, so that an edit about them
    changes nothing. Others would change what the model reads."""
    edits = management.edits if management is not None else None
    for number, edit in enumerate(edits or ()):
        if not edit.type.startswith("clear_thinking_"):
            field = f"context_management.edits[{number}].type"
            raise not_supported(f"{field} {edit.type[:50]!r}", "clear_thinking is", param=field)


def _add_tools(chat: ChatCompletionRequest, request: CountTokensRequest) -> None:
    choice = request.tool_choice
    if not request.tools:
        if choice is not None and choice.type not in ("auto", "none"):
            raise InvalidRequest("tool_choice needs tools", param="tool_choice")
        return
    chat.tools = [_tool(f"tools[{n}]", tool) for n, tool in enumerate(request.tools)]
    if choice is not None:
        chat.tool_choice = _tool_choice(choice)
        chat.parallel_tool_calls = not choice.disable_parallel_tool_use


def _tool(at: str, tool: AnthropicTool) -> dict[str, Any]:
    if tool.type not in (None, "custom"):
        raise not_supported(
            f"{at}.type {tool.type[:50]!r}", "only tools with an input_schema of their own are",
            param=f"{at}.type",
        )  # fmt: skip
    if tool.input_schema is None:
        raise InvalidRequest(f"{at}.input_schema is required", param=f"{at}.input_schema")
    function: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description is not None:
        function["description"] = tool.description
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


def _tool_choice(choice: AnthropicToolChoice) -> Any:
    if choice.type == "tool":
        if not choice.name:
            raise InvalidRequest("tool_choice.name is required", param="tool_choice.name")
        return {"type": "function", "function": {"name": choice.name}}
    if choice.type not in _CHOICES:
        raise InvalidRequest(
            f"tool_choice.type must be auto, any, tool or none; got {choice.type[:50]!r}",
            param="tool_choice.type",
        )
    return _CHOICES[choice.type]


def _add_thinking(chat: ChatCompletionRequest, request: CountTokensRequest) -> None:
    kwargs = dict(request.chat_template_kwargs or {})
    if request.thinking is not None:
        is_on = _thinks(request.thinking, getattr(request, "max_tokens", None))
        if is_on is not None:
            kwargs.setdefault("enable_thinking", is_on)
        if is_on:
            chat.thinking_token_budget = request.thinking.budget_tokens
        chat.include_reasoning = is_on is not False and request.thinking.display != "omitted"
    chat.chat_template_kwargs = kwargs or None
    config = request.output_config
    if config is None:
        return
    chat.reasoning_effort = config.effort
    if config.format is not None:
        if config.format.get("type") != "json_schema":
            raise not_supported(
                "output_config.format.type", "json_schema is", param="output_config.format"
            )
        schema = {"name": "answer", "schema": config.format.get("schema"), "strict": True}
        chat.response_format = {"type": "json_schema", "json_schema": schema}


def _thinks(thinking: Thinking, max_tokens: int | None) -> bool | None:
    """None: as the model's template does by itself."""
    if thinking.type not in _THINKING:
        raise InvalidRequest(
            f"thinking.type must be one of {', '.join(_THINKING)}; got {thinking.type[:50]!r}",
            param="thinking.type",
        )
    budget = thinking.budget_tokens
    if thinking.type == "enabled" and (budget is None or budget < 1024):
        raise InvalidRequest(
            "thinking.budget_tokens must be at least 1024", param="thinking.budget_tokens"
        )
    if budget is not None and max_tokens is not None and budget >= max_tokens:
        raise InvalidRequest(
            f"thinking.budget_tokens must be less than max_tokens; got {budget} and {max_tokens}",
            param="thinking.budget_tokens",
        )
    return _THINKING[thinking.type]


class _Reader:
    """From messages of blocks to messages of a chat."""

    def __init__(self) -> None:
        self.messages: list[ChatMessageBody] = []
        self.places: list[str] = []
        self._calls: set[str] = set()

    def add(self, message: ChatMessageBody, place: str) -> None:
        self.messages.append(message)
        self.places.append(place)

    def read(self, at: str, message: AnthropicMessage) -> None:
        content = message.content
        if message.role not in ("user", "assistant", "system"):
            raise InvalidRequest(
                f"{at}.role must be user, assistant or system; got {message.role[:50]!r}",
                param=f"{at}.role",
            )
        if isinstance(content, str):
            self.add(ChatMessageBody(role=message.role, content=content), at)
        elif message.role == "assistant":
            self.add(self._assistant(f"{at}.content", content), at)
        elif message.role == "system":
            self.add(ChatMessageBody(role="system", content=_texts(f"{at}.content", content)), at)
        else:
            self._user(at, content)

    def _user(self, at: str, blocks: list[ContentBlock]) -> None:
        """Results of tools are messages of their own; texts beside each other are one."""
        parts: list[ContentPart] = []
        for number, block in enumerate(blocks):
            place = f"{at}.content[{number}]"
            if block.type == "image":
                source = {"url": _image_url(place, block)}
                parts.append(ContentPart(type="image_url", image_url=source))
                continue
            if block.type != "tool_result":
                parts.append(ContentPart(type="text", text=_text(place, block)))
                continue
            self._end_parts(parts, at)
            self.add(self._result(place, block), place)
        self._end_parts(parts, at)
        if not blocks:
            raise InvalidRequest(f"{at}.content must not be empty", param=f"{at}.content")

    def _end_parts(self, parts: list[ContentPart], at: str) -> None:
        if not parts:
            return
        content: str | list[ContentPart] = parts[:]
        if all(part.type == "text" for part in parts):
            content = "\n".join(part.text or "" for part in parts)
        self.add(ChatMessageBody(role="user", content=content), at)
        parts.clear()

    def _result(self, at: str, block: ContentBlock) -> ChatMessageBody:
        if block.tool_use_id is None:
            raise InvalidRequest(f"{at}.tool_use_id is required", param=f"{at}.tool_use_id")
        if block.tool_use_id not in self._calls:
            raise InvalidRequest(
                f"{at}.tool_use_id: there is no tool_use {block.tool_use_id[:128]} before it",
                param=f"{at}.tool_use_id",
            )
        content = block.content if block.content is not None else ""
        if not isinstance(content, str):
            content = _texts(f"{at}.content", _blocks(f"{at}.content", content))
        if block.is_error and not content:
            content = "error"  # the model must learn that it failed
        return ChatMessageBody(role="tool", content=content, tool_call_id=block.tool_use_id)

    def _assistant(self, at: str, blocks: list[ContentBlock]) -> ChatMessageBody:
        texts: list[str] = []
        reasoning_parts: list[str] = []
        calls: list[dict[str, Any]] = []
        for number, block in enumerate(blocks):
            place = f"{at}[{number}]"
            match block.type:
                case "thinking":
                    reasoning_parts.append(block.thinking or "")
                case "redacted_thinking":
                    pass  # of another service, and only it could read them
                case "tool_use":
                    calls.append(self._call(place, block))
                case _:
                    texts.append(_text(place, block))
        return ChatMessageBody(
            role="assistant",
            content="\n".join(texts),
            reasoning="\n".join(reasoning_parts) or None,
            tool_calls=calls or None,
        )

    def _call(self, at: str, block: ContentBlock) -> dict[str, Any]:
        for name in ("id", "name"):
            if not getattr(block, name):
                raise InvalidRequest(f"{at}.{name} is required", param=f"{at}.{name}")
        assert block.id is not None
        self._calls.add(block.id)
        function = {
            "name": block.name,
            "arguments": msgspec.json.encode(block.input or {}).decode(),
        }
        return {"id": block.id, "type": "function", "function": function}


def _blocks(at: str, value: Any) -> list[ContentBlock]:
    try:
        return msgspec.convert(value, list[ContentBlock])
    except msgspec.ValidationError:
        raise InvalidRequest(f"{at} must be a string or a list of blocks", param=at) from None


def _image_url(at: str, block: ContentBlock) -> str:
    """Of a picture in base64 as a data URL; others as they are."""
    source = block.source or {}
    kind, data, url = source.get("media_type"), source.get("data"), source.get("url")
    if source.get("type") == "url" and isinstance(url, str):
        return url
    if source.get("type") == "base64" and isinstance(kind, str) and isinstance(data, str):
        return f"data:{kind};base64,{data}"
    raise InvalidRequest(
        f"{at}.source must be of type base64 with media_type and data, or of type url",
        param=f"{at}.source",
    )


def _texts(at: str, content: str | list[ContentBlock]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(_text(f"{at}[{number}]", block) for number, block in enumerate(content))


def _text(at: str, block: ContentBlock) -> str:
    if block.type != "text":
        raise not_supported(
            f"{at}.type {block.type[:50]!r}", "this model reads text only", param=f"{at}.type"
        )
    if block.text is None:
        raise InvalidRequest(f"{at}.text is required", param=f"{at}.text")
    return block.text
