"""What `LLM` takes as a prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, TypedDict


class PromptDict(TypedDict, total=False):
    """Text or tokens at least; of both the tokens count, the text is for the reader."""

    prompt: str
    prompt_token_ids: Sequence[int]
    # {"image": picture or list}: PIL images, bytes of files, paths, data: URLs; each belongs to one
    # placeholder of the prompt, in order. {"audio": sound or list}: the same files, or tuples of
    # samples and their rate
    multi_modal_data: Mapping[str, Any]


Prompt: TypeAlias = str | Sequence[int] | PromptDict
