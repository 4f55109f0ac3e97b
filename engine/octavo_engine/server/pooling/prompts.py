"""Which of a model's own prompts goes before a text, by what the client says the text is for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo_engine.errors import InvalidRequest

if TYPE_CHECKING:
    from octavo_engine.core.info import ModelInfo

# Cohere's kinds of input, and the names that models have for them, the most usual first.
KINDS: dict[str, tuple[str, ...]] = {
    "search_query": ("query", "search_query", "s2p_query"),
    "search_document": ("document", "search_document", "passage", "corpus"),
    "classification": ("classification",),
    "clustering": ("clustering",),
}


def prompt_of(info: ModelInfo, input_type: str | None) -> str:
    """The text to put in front, empty where the model knows none. Raises InvalidRequest."""
    prompts = info.prompts
    if input_type is None:
        return prompts.get(info.default_prompt or "", "")
    names = (*KINDS.get(input_type, ()), input_type)
    if input_type not in KINDS and input_type not in prompts:
        known = ", ".join(sorted({*KINDS, *prompts}))
        raise InvalidRequest(
            f"input_type must be one of {known}; got {input_type[:50]!r}", param="input_type"
        )
    return next((prompts[name] for name in names if name in prompts), "")
