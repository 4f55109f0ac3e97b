"""Documented fields that would change the answer and that we cannot honour yet: refused by name.

Each row names a field and says which of its values change nothing; any other value is a 400. What
is not listed here and not in the schemas (user, metadata, store, …) is accepted and has no effect.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from octavo_engine.errors import InvalidRequest
from octavo_engine.server.http_errors import not_supported

if TYPE_CHECKING:
    from collections.abc import Callable

    import msgspec


def _false(value: Any) -> bool:
    return value is False


def _empty(value: Any) -> bool:
    return value in ("", [], {})


def _text_format(value: Any) -> bool:
    return isinstance(value, dict) and value.get("type") == "text"


HARMLESS: dict[str, Callable[[Any], bool]] = {
    "use_beam_search": _false,
    "best_of": lambda value: value == 1,
    "spaces_between_special_tokens": lambda value: value is True,
    "response_format": _text_format,
    "structured_outputs": _empty,
    "guided_json": _empty,
    "guided_regex": _empty,
    "guided_choice": _empty,
    "guided_grammar": _empty,
    "prompt_embeds": _empty,
    "kv_transfer_params": _empty,
    "vllm_xargs": _empty,
    "repetition_detection": _empty,
    "truncation_side": lambda value: value == "left",
    "suffix": _empty,
    "echo": _false,  # of a chat; completions type it as a boolean of their own
    "functions": _empty,
    "function_call": lambda value: value in ("none", "auto"),
    "modalities": lambda value: value in (["text"], []),
    "audio": _empty,
    "web_search_options": lambda value: False,
    "thinking_token_budget": lambda value: value == -1,
    "return_prompt_text": _false,
    "documents": _empty,
}


def refuse_unsupported(request: msgspec.Struct) -> None:
    """Raises RequestError (400, not_supported) that names the field."""
    for field in request.__struct_fields__:
        is_harmless = HARMLESS.get(field)
        if is_harmless is None:
            continue
        value = getattr(request, field)
        if value is None or (value is True and field == "echo" and not _is_chat(request)):
            continue
        if not is_harmless(value):
            raise not_supported(field)


def refuse_tools(tools: list[dict[str, Any]] | None, tool_choice: Any) -> None:
    """Tools may be shown to the model (tool_choice "none"); calls are not parsed yet."""
    if tools is not None and not tools:
        raise InvalidRequest("tools must not be empty; leave it out", param="tools")
    if tools and tool_choice != "none":
        raise not_supported("tools", 'tool_choice "none" shows them to the model without calls')
    if not tools and tool_choice not in (None, "none", "auto"):
        raise InvalidRequest(
            "tool_choice names a tool, but tools is not given", param="tool_choice"
        )


def _is_chat(request: msgspec.Struct) -> bool:
    return hasattr(request, "messages")
