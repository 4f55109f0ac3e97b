"""From what a client calls a prompt to token ids: texts, id lists, conversations."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from octavo_engine.errors import InvalidRequest, ModelError
from octavo_engine.server.http_errors import not_supported
from octavo_engine.server.unsupported import refuse_tools
from octavo_engine.tokenization.chat_template import ChatTemplate

if TYPE_CHECKING:
    from octavo_engine.server.limits import Limits
    from octavo_engine.server.schemas import Conversation, Message
    from octavo_engine.tokenization.tokenizer import Tokenizer

ROLES = ("system", "developer", "user", "assistant", "tool")
# Longer texts are rendered and tokenised in a thread, so that no other stream waits for them.
INLINE_CHARS = 4096
# Template variables that a request may not set: they are ours, or the model's.
RESERVED_KWARGS = frozenset(
    ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message",
     "chat_template", "tokenize", "bos_token", "eos_token", "raise_exception", "strftime_now")
)  # fmt: skip


def split_prompts(
    prompt: str | list[int | str | list[int]], limits: Limits
) -> list[str | list[int]]:
    """One entry a prompt. Raises InvalidRequest (param "prompt")."""
    if isinstance(prompt, str):
        _check_not_empty(prompt)
        return [prompt]
    if not prompt:
        raise InvalidRequest("prompt is empty; it needs at least one token", param="prompt")
    if isinstance(prompt[0], int):
        ids = [item for item in prompt if isinstance(item, int)]
        if len(ids) != len(prompt):
            raise InvalidRequest("prompt mixes token ids with other items", param="prompt")
        return [ids]
    if len(prompt) > limits.max_prompts:
        raise InvalidRequest(
            f"prompt must hold at most {limits.max_prompts} prompts; got {len(prompt)}",
            param="prompt",
        )
    prompts: list[str | list[int]] = []
    for item in prompt:
        if isinstance(item, int):
            raise InvalidRequest("prompt mixes token ids with other items", param="prompt")
        _check_not_empty(item)
        prompts.append(item)
    return prompts


async def encode(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
    if len(text) <= INLINE_CHARS:
        return tokenizer.encode(text, add_special_tokens=add_special_tokens)
    return await asyncio.to_thread(tokenizer.encode, text, add_special_tokens=add_special_tokens)


def truncate(ids: list[int], keep: int | None, max_model_len: int) -> list[int]:
    """The last `keep` tokens; -1 keeps what leaves room for one answer token."""
    if keep is None:
        return ids
    if keep < -1 or keep == 0:
        raise InvalidRequest(
            f"truncate_prompt_tokens must be -1 or at least 1; got {keep}",
            param="truncate_prompt_tokens",
        )
    return ids[-(max_model_len - 1 if keep == -1 else keep) :]


async def render(
    tokenizer: Tokenizer,
    request: Conversation,
    limits: Limits,
    *,
    trust_template: bool,
) -> str:
    """The conversation as the model's chat template writes it. Raises InvalidRequest."""
    refuse_tools(request.tools, request.tool_choice)
    messages = check_messages(request.messages, limits)
    add_generation_prompt = request.add_generation_prompt is not False
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
        add_generation_prompt = False
    template = tokenizer.chat_template
    if request.chat_template is not None:
        if not trust_template:
            raise InvalidRequest(
                "chat_template is not accepted from requests here "
                "(--trust-request-chat-template allows it)",
                param="chat_template",
            )
        template = _replaced(template, request.chat_template)
    if template is None:
        raise InvalidRequest(
            "this model has no chat template; use /v1/completions, or start the server with "
            "--chat-template",
            param="messages",
        )
    kwargs = check_template_kwargs(request.chat_template_kwargs)

    def work() -> str:
        return template.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            tools=request.tools,
            continue_final_message=bool(request.continue_final_message),
            **kwargs,
        )

    size = sum(len(message.get("content") or "") for message in messages)
    return work() if size <= INLINE_CHARS else await asyncio.to_thread(work)


def check_messages(messages: list[Message], limits: Limits) -> list[dict[str, Any]]:
    """As dicts in the shape templates expect, text parts joined."""
    if not messages:
        raise InvalidRequest("messages must hold at least one message", param="messages")
    if len(messages) > limits.max_messages:
        raise InvalidRequest(
            f"messages must be at most {limits.max_messages}; got {len(messages)}",
            param="messages",
        )
    return [_message(index, message) for index, message in enumerate(messages)]


def check_template_kwargs(kwargs: dict[str, Any] | None) -> dict[str, Any]:
    """Scalars only, and none of the names that are ours."""
    for name, value in (kwargs or {}).items():
        param = f"chat_template_kwargs.{name}"
        if name in RESERVED_KWARGS:
            raise InvalidRequest(f"{param} cannot be set by a request", param=param)
        if not isinstance(value, str | int | float | bool | None):
            raise InvalidRequest(f"{param} must be a string, number or boolean", param=param)
    return dict(kwargs or {})


def _message(index: int, message: Message) -> dict[str, Any]:
    at = f"messages[{index}]"
    if message.role not in ROLES:
        raise InvalidRequest(
            f"{at}.role must be one of {', '.join(ROLES)}; got {message.role[:50]!r}",
            param=f"{at}.role",
        )
    # Templates know "system"; "developer" is its newer name.
    role = "system" if message.role == "developer" else message.role
    result: dict[str, Any] = {"role": role}
    if message.content is not None:
        result["content"] = _text(at, message)
    elif message.role == "assistant":
        result["content"] = ""
    else:
        raise InvalidRequest(f"{at}.content is required", param=f"{at}.content")
    for name in ("name", "tool_calls", "tool_call_id"):
        value = getattr(message, name)
        if value is not None:
            result[name] = value
    reasoning = message.reasoning or message.reasoning_content
    if reasoning is not None:
        result["reasoning_content"] = reasoning
    return result


def _text(at: str, message: Message) -> str:
    if isinstance(message.content, str):
        return message.content
    texts: list[str] = []
    for number, part in enumerate(message.content or ()):
        if part.type not in ("text", "input_text", "output_text"):
            field = f"{at}.content[{number}].type"
            raise not_supported(field, f"this model reads text only; got {part.type[:50]!r}")
        if part.text is None:
            field = f"{at}.content[{number}].text"
            raise InvalidRequest(f"{field} is required", param=field)
        texts.append(part.text)
    return "\n".join(texts)


def _check_not_empty(prompt: str | list[int]) -> None:
    if not prompt:
        raise InvalidRequest("prompt is empty; it needs at least one token", param="prompt")


def _replaced(template: object, source: str) -> ChatTemplate:
    """The request's own template, with the special tokens of the model's if it has one."""
    try:
        if isinstance(template, ChatTemplate):
            return template.with_source(source)
        return ChatTemplate(source)
    except ModelError as error:
        raise InvalidRequest(f"chat_template: {error}", param="chat_template") from None
