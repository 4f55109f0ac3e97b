"""A model's tokens as the grammar compiler wants them: bytes, control tokens, ends of text."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from llguidance import LLTokenizer, TokenizerWrapper

from octavo_engine.tokenization.tokenizer import ends_of_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from octavo_engine.tokenization.tokenizer import Tokenizer


class Vocabulary:
    """Made once a model; costs a third of a second for 50,000 tokens. Safe to share."""

    def __init__(
        self, tokenizer: Tokenizer, *, vocab_size: int, eos_token_ids: Sequence[int] = ()
    ) -> None:
        """`vocab_size` is the model's: ids that only its table has are never allowed."""
        known = min(tokenizer.vocab_size, vocab_size)
        self.words = [tokenizer.token_bytes(i) for i in range(known)]
        self.words += [b""] * (vocab_size - known)
        ends = ends_of_text(tokenizer, eos_token_ids)
        self.eos_token_ids = tuple(i for i in ends if 0 <= i < vocab_size)
        special = {i for i in tokenizer.special_ids if i < vocab_size}.union(self.eos_token_ids)
        self.special_ids = frozenset(special)
        self.specials = {  # by their text, for structural tags
            tokenizer.token_text(i): i
            for i in sorted(tokenizer.special_ids)
            if i < vocab_size and i not in self.eos_token_ids and self.words[i]
        }
        # A model without an end of text still needs one for the compiler: an id that is no token.
        self._end = self.eos_token_ids or (vocab_size,)
        tokens = [*self.words, b""] if not self.eos_token_ids else self.words
        self.compiler_tokenizer = LLTokenizer(
            TokenizerWrapper(_Words(tokens, sorted(special), self._end[0], tokenizer)),
            n_vocab=len(tokens),
            eos_token=list(self._end),
        )
        self.mask_words = -(-len(tokens) // 32)  # 32 tokens each
        self.ends = self.mask_of(self.eos_token_ids)
        self._allowed_before = self._all_words()

    def row(self) -> NDArray[np.uint32]:
        """A mask to be filled."""
        return np.zeros(self.mask_words, np.uint32)

    def may_end(self, mask: NDArray[np.uint32]) -> bool:
        """Whether the end of text is allowed."""
        return any(int(mask[token >> 5]) >> (token & 31) & 1 for token in self.eos_token_ids)

    def mask_of(self, ids: Sequence[int]) -> NDArray[np.uint32]:
        """A mask that allows these only."""
        mask = self.row()
        for token in ids:
            mask[token >> 5] |= np.uint32(1 << (token & 31))
        return mask

    def mask_before(self, after: bytes, state: int) -> NDArray[np.uint32]:
        """What may follow while a text is waited for of which `state` bytes are there already.

        Anything but the end of text, and tokens that would go beyond that text: what follows it
        belongs to the grammar from its first byte on.
        """
        mask = self._allowed_before.copy()
        tails = [after[n:] for n in borders(after, state)]
        for token, word in enumerate(self.words):
            if len(word) < 2:
                continue
            if any(len(word) > len(t) and word.startswith(t) for t in tails) or (
                0 <= word.find(after) < len(word) - len(after)
            ):
                mask[token >> 5] &= ~np.uint32(1 << (token & 31))
        return mask

    def _all_words(self) -> NDArray[np.uint32]:
        ends = set(self.eos_token_ids)
        return self.mask_of([i for i, word in enumerate(self.words) if word and i not in ends])


def borders(text: bytes, length: int) -> list[int]:
    """Lengths of the beginnings of `text` that its first `length` bytes end with, longest first;
    without the empty one."""
    head = text[:length]
    return [n for n in range(length, 0, -1) if head.endswith(text[:n])]


class _Words:
    """What the library asks of a tokenizer."""

    def __init__(
        self, tokens: list[bytes], special: list[int], end: int, tokenizer: Tokenizer
    ) -> None:
        self.tokens = tokens
        self.special_token_ids = special
        self.eos_token_id = end
        self.bos_token_id = tokenizer.bos_token_id
        self._tokenizer = tokenizer

    def __call__(self, text: str | bytes) -> list[int]:
        if isinstance(text, bytes):
            text = text.decode("utf-8", "replace")
        return self._tokenizer.encode(text, add_special_tokens=False, allow_special=False)
