"""What `LLM` takes as a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias, TypedDict


class PromptDict(TypedDict, total=False):
    """One of the two at least; the tokens count, the text is for the reader."""

    prompt: str
    prompt_token_ids: Sequence[int]


Prompt: TypeAlias = str | Sequence[int] | PromptDict
