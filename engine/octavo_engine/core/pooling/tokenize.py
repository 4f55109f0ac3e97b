"""From texts to what a model that pools reads: special tokens, pairs, cutting, prompts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo_engine.core.pooling.async_pooling import PoolingItem
from octavo_engine.errors import ContextLengthExceeded, InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from octavo_engine.core.info import ModelInfo
    from octavo_engine.tokenization.tokenizer import Tokenizer


def single(tokenizer: Tokenizer, text: str, max_len: int, truncate: bool) -> PoolingItem:
    """Raises ContextLengthExceeded with both numbers unless it is to be cut."""
    return batch(tokenizer, [text], max_len, truncate)[0]


def batch(
    tokenizer: Tokenizer, texts: Sequence[str], max_len: int, truncate: bool
) -> list[PoolingItem]:
    """Several at once: `tokenizers` uses all cores for them."""
    items = []
    for index, ids in enumerate(tokenizer.encode_batch(texts)):
        if len(ids) > max_len:
            if not truncate:
                where = f"input {index}" if len(texts) > 1 else "the input"
                raise _too_long(where, len(ids), max_len)
            ids = tokenizer.encode_parts(texts[index], max_length=max_len)[0]
        items.append(PoolingItem(ids))
    return items


def pair(tokenizer: Tokenizer, a: str, b: str, max_len: int | None) -> PoolingItem:
    """Two texts as a cross-encoder reads them; cut to `max_len` tokens, the longer one first."""
    ids, types = tokenizer.encode_parts(a, b, max_length=max_len)
    return PoolingItem(ids, types)


def whole_pair(tokenizer: Tokenizer, a: str, b: str, max_len: int) -> PoolingItem:
    """The same uncut. Raises ContextLengthExceeded with both numbers."""
    item = pair(tokenizer, a, b, None)
    if len(item.token_ids) > max_len:
        raise _too_long("the pair", len(item.token_ids), max_len)
    return item


def prompt_of(info: ModelInfo, name: str | None) -> str:
    """What the model wants before a text: the prompt of that name, or its default one."""
    if name is None:
        name = info.default_prompt
    if name is None:
        return ""
    if name not in info.prompts:
        known = ", ".join(sorted(info.prompts)) or "none"
        raise InvalidRequest(
            f"the model has no prompt {name!r:.80}; there is: {known}", param="prompt_name"
        )
    return info.prompts[name]


def _too_long(where: str, length: int, max_len: int) -> ContextLengthExceeded:
    return ContextLengthExceeded(
        f"{where} has {length} tokens, but the model takes at most {max_len}; "
        "shorten it, or ask for truncation",
        param="input",
    )
