"""From what a client calls a prompt to token ids: texts and lists of ids."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo_engine.errors import InvalidRequest
from octavo_engine.tokenization.threads import off_loop
from octavo_engine.tokenization.tokenizer import check_length

if TYPE_CHECKING:
    from octavo_engine.server.limits import RequestLimits
    from octavo_engine.tokenization.tokenizer import Tokenizer

# Texts are counted beyond what the model can read, but a text that surely has so many times as many
# tokens is refused.
COUNTED = 4


def split_prompts(
    prompt: str | list[int | str | list[int]], limits: RequestLimits
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


async def encode(
    tokenizer: Tokenizer, text: str, *, add_special_tokens: bool, most: int | None = None
) -> list[int]:
    """Raises ContextLengthExceeded, unread, for a text that surely has more than `most` tokens."""

    def work() -> list[int]:
        if most is not None:
            check_length(tokenizer, text, most, "prompt")
        return tokenizer.encode(text, add_special_tokens=add_special_tokens)

    return await off_loop(work, len(text))


def truncate(
    ids: list[int], keep: int | None, max_model_len: int, side: str | None = None
) -> list[int]:
    """The last `keep` tokens, or the first where the right side is cut off.

    -1 keeps what leaves room for one answer token.
    """
    if keep is None:
        return ids
    if keep < -1 or keep == 0:
        raise InvalidRequest(
            f"truncate_prompt_tokens must be -1 or at least 1; got {keep}",
            param="truncate_prompt_tokens",
        )
    count = max_model_len - 1 if keep == -1 else keep
    return ids[:count] if side == "right" else ids[-count:]


def _check_not_empty(prompt: str | list[int]) -> None:
    if not prompt:
        raise InvalidRequest("prompt is empty; it needs at least one token", param="prompt")
