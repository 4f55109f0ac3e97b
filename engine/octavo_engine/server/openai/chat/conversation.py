"""From a conversation to the prompt that the model's chat template makes of it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from octavo_engine.core.media.sources import MEDIA_PARTS
from octavo_engine.errors import InvalidRequest, ModelError
from octavo_engine.server.http.errors import not_supported
from octavo_engine.server.openai.chat.described_tools import described, takes_system
from octavo_engine.server.openai.chat.tools import read_tools
from octavo_engine.tokenization.chat_template import ChatTemplate
from octavo_engine.tokenization.messages import MARKS
from octavo_engine.tokenization.threads import off_loop

if TYPE_CHECKING:
    from collections.abc import Callable

    from octavo_engine.models.vision_config import MediaKind
    from octavo_engine.server.limits import RequestLimits
    from octavo_engine.server.openai.schemas import ChatMessageBody, ContentPart, ConversationFields
    from octavo_engine.tokenization.tokenizer import Template, Tokenizer

ROLES = ("system", "developer", "user", "assistant", "tool")
TEXT_PARTS = ("text", "input_text", "output_text", "refusal")
REASONING_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
# Template variables that a request may not set: they are ours, or the model's.
RESERVED_KWARGS = frozenset(
    ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message",
     "chat_template", "tokenize", "bos_token", "eos_token", "raise_exception", "strftime_now",
     # parameters on the way to the template
     "add_special_tokens", "guard", "self", "template")
)  # fmt: skip


T = TypeVar("T")


class RenderedPrompt(NamedTuple):
    """A prompt as text and as tokens. What users wrote is text in both, whatever it spells."""

    text: str
    ids: list[int]


async def render(
    tokenizer: Tokenizer, request: ConversationFields, limits: RequestLimits, *,
    trust_template: bool,
    describes_tools: bool = False, takes: MediaKind | None = None,
) -> str:  # fmt: skip
    """The conversation as the model's chat template writes it; with `describes_tools` tools are no
    matter of the template's. Raises InvalidRequest."""
    template, options = _prepared(
        tokenizer, request, limits, trust_template=trust_template, takes=takes
    )
    if describes_tools and request.chat_template is None:  # a request's own is as it wants it
        _describe_tools(template, options)
    return await _timely(options["messages"], lambda: template.render(**options))


async def rendered(
    tokenizer: Tokenizer, request: ConversationFields, limits: RequestLimits, *,
    trust_template: bool,
    add_special_tokens: bool = False, describes_tools: bool = False, most: int | None = None,
    takes: MediaKind | None = None,
) -> RenderedPrompt:  # fmt: skip
    """As `render`, with the tokens: only the template's own control tokens become control ids.
    Raises ContextLengthExceeded, unread, for a prompt that surely has more than `most` of them."""
    template, options = _prepared(
        tokenizer, request, limits, trust_template=trust_template, takes=takes
    )
    if describes_tools and request.chat_template is None:  # a request's own is as it wants it
        _describe_tools(template, options)

    def work() -> RenderedPrompt:
        return RenderedPrompt(
            *tokenizer.render_chat(
                template=template, add_special_tokens=add_special_tokens, max_tokens=most, **options
            )
        )

    return await _timely(options["messages"], work)


def check_messages(
    messages: list[ChatMessageBody], limits: RequestLimits, *, takes: MediaKind | None = None
) -> list[dict[str, Any]]:
    """As dicts in the shape templates expect: text parts joined, or, where there is what the model
    `takes` among them, as parts."""
    if not messages:
        raise InvalidRequest("messages must hold at least one message", param="messages")
    if len(messages) > limits.max_messages:
        raise InvalidRequest(
            f"messages must be at most {limits.max_messages}; got {len(messages)}",
            param="messages",
        )
    return [
        _message(f"messages[{index}]", message, takes=takes)
        for index, message in enumerate(messages)
    ]


def check_template_kwargs(kwargs: dict[str, Any] | None) -> dict[str, Any]:
    """Scalars only, and none of the names that are ours."""
    for name, value in (kwargs or {}).items():
        param = f"chat_template_kwargs.{name}"
        if name in RESERVED_KWARGS:
            raise InvalidRequest(f"{param} cannot be set by a request", param=param)
        if not isinstance(value, str | int | float | bool | None):
            raise InvalidRequest(f"{param} must be a string, number or boolean", param=param)
    return dict(kwargs or {})


# ── the template and what it is given ──


def _prepared(
    tokenizer: Tokenizer,
    request: ConversationFields,
    limits: RequestLimits,
    *,
    trust_template: bool,
    takes: MediaKind | None = None,
) -> tuple[Template, dict[str, Any]]:
    messages = check_messages(request.messages, limits, takes=takes)
    read_tools(request.tools)
    adds_prompt = request.add_generation_prompt is not False
    if request.continue_final_message:
        if request.add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message and add_generation_prompt exclude each other",
                param="continue_final_message",
            )
        if messages[-1]["role"] != "assistant":
            raise InvalidRequest(
                "continue_final_message needs a last message of role assistant",
                param="continue_final_message",
            )
        adds_prompt = False
    template = _template(tokenizer, request, trust_template=trust_template)
    options: dict[str, Any] = {
        "messages": messages,
        "add_generation_prompt": adds_prompt,
        "tools": request.tools,
        "continue_final_message": bool(request.continue_final_message),
        **check_template_kwargs(request.chat_template_kwargs),
        **_effort(request),
    }
    if request.documents is not None:
        options["documents"] = _documents(template, request.documents)
    return template, options


def _describe_tools(template: Template, options: dict[str, Any]) -> None:
    """Where there are none, neither called nor to be called, nothing changes."""
    messages, tools = options["messages"], options["tools"]
    if tools or any("tool_calls" in each or each["role"] == "tool" for each in messages):
        if any(isinstance(each.get("content"), list) for each in messages):
            raise InvalidRequest(
                "tools cannot be combined with pictures or sounds: this model's chat template "
                "writes no tools",
                param="tools",
            )
        system = takes_system(template)
        options["messages"] = described(messages, tools, takes_system=system)
        options["tools"] = None


def _template(
    tokenizer: Tokenizer, request: ConversationFields, *, trust_template: bool
) -> Template:
    template = tokenizer.chat_template
    if request.chat_template is not None:
        if not trust_template:
            raise InvalidRequest(
                "chat_template is not accepted in requests by this server "
                "(--trust-request-chat-template allows it)",
                param="chat_template",
            )
        template = _replaced(template, request.chat_template)
    if template is None:
        raise InvalidRequest(
            "this model has no chat template; send the text itself as prompt or input, or start "
            "the server with --chat-template",
            param="messages",
        )
    return template


def _replaced(template: object, source: str) -> ChatTemplate:
    """The request's own template, with the special tokens of the model's if it has one."""
    try:
        if isinstance(template, ChatTemplate):
            return template.with_source(source)
        return ChatTemplate(source)
    except ModelError as error:
        raise InvalidRequest(f"chat_template: {error}", param="chat_template") from None


def _effort(request: ConversationFields) -> dict[str, Any]:
    """What templates know it by; those that do not simply never ask."""
    effort = request.reasoning_effort
    if effort is None:
        return {}
    if effort not in REASONING_EFFORTS:
        raise InvalidRequest(
            f"reasoning_effort must be one of {', '.join(REASONING_EFFORTS)}; got {effort!r:.50}",
            param="reasoning_effort",
        )
    template_kwargs = request.chat_template_kwargs or {}
    if effort == "none" and "enable_thinking" not in template_kwargs:
        return {"reasoning_effort": effort, "enable_thinking": False}
    return {"reasoning_effort": effort}


def _documents(template: Template, documents: Any) -> list[dict[str, Any]]:
    if not isinstance(documents, list) or not all(isinstance(item, dict) for item in documents):
        raise InvalidRequest("documents must be a list of objects", param="documents")
    if not isinstance(template, ChatTemplate) or not template.mentions("documents"):
        raise not_supported("documents", "this model's chat template has no place for them")
    return documents


async def _timely(messages: list[dict[str, Any]], work: Callable[[], T]) -> T:
    size = sum(len(message.get("content") or "") for message in messages)
    return await off_loop(work, size)


# ── one message ──


def _message(at: str, message: ChatMessageBody, *, takes: MediaKind | None) -> dict[str, Any]:
    if message.role not in ROLES:
        raise InvalidRequest(
            f"{at}.role must be one of {', '.join(ROLES)}; got {message.role[:50]!r}",
            param=f"{at}.role",
        )
    # Templates know "system"; "developer" is its newer name.
    role = "system" if message.role == "developer" else message.role
    result: dict[str, Any] = {"role": role}
    reasoning_parts: list[str] = []
    if message.content is not None:
        result["content"] = _content(at, message.content, reasoning_parts, takes=takes)
    elif message.role == "assistant":
        result["content"] = ""
    else:
        raise InvalidRequest(f"{at}.content is required", param=f"{at}.content")
    for name in ("name", "tool_call_id"):
        value = getattr(message, name)
        if value is not None:
            result[name] = value
    if message.tool_calls:
        calls = [_call(f"{at}.tool_calls[{i}]", c) for i, c in enumerate(message.tool_calls)]
        result["tool_calls"] = calls
    reasoning = message.reasoning or message.reasoning_content or "\n".join(reasoning_parts)
    if reasoning:
        result["reasoning_content"] = reasoning
    return result


def _call(at: str, call: dict[str, Any]) -> dict[str, Any]:
    """Templates take arguments as an object, where clients send them as text."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InvalidRequest(f"{at}.function needs a name", param=f"{at}.function")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            read = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError):
            read = arguments  # cut off, or never JSON: the model sees what it wrote
        arguments = read if isinstance(read, dict) else arguments
    elif arguments is None:
        arguments = {}
    return {"type": "function", **call, "function": {**function, "arguments": arguments}}


def _content(
    at: str,
    content: str | list[ContentPart],
    reasoning_parts: list[str],
    *,
    takes: MediaKind | None,
) -> str | list[dict[str, str]]:
    if isinstance(content, str):
        return content
    parts: list[dict[str, str]] = []
    for number, part in enumerate(content):
        field = f"{at}.content[{number}]"
        if part.type == "thinking" and part.thinking is not None:
            reasoning_parts.append(part.thinking)
        elif takes is not None and MEDIA_PARTS.get(part.type) == takes:
            parts.append({"type": takes})
        else:
            parts.append({"type": "text", "text": _text(field, part)})
    if any(mark in parts for mark in MARKS):
        return parts
    return "\n".join(part["text"] for part in parts)


def _text(field: str, part: ContentPart) -> str:
    if part.type in MEDIA_PARTS:
        noun = "pictures" if MEDIA_PARTS[part.type] == "image" else "sounds"
        raise not_supported(f"{field}.type", f"this model takes no {noun}")
    if part.type not in TEXT_PARTS:
        raise not_supported(f"{field}.type", f"this model reads text only; got {part.type[:50]!r}")
    name = "refusal" if part.type == "refusal" else "text"
    text: str | None = getattr(part, name)
    if text is None:
        raise InvalidRequest(f"{field}.{name} is required", param=f"{field}.{name}")
    return text
