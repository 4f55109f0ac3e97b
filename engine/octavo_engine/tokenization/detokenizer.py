"""Token ids to text as they arrive: never half a character, each token looked at once."""

from __future__ import annotations

import codecs
from itertools import accumulate
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from octavo_engine.tokenization.tokenizer import Tokenizer

# A character has at most four bytes, so no token further back can have begun the one that is open.
PROMPT_TAIL = 8


class Detokenizer:
    """One sequence's text. All pushes and the flush together are what `decode` gives.

    With `prompt_token_ids` the text is a continuation: the space before its first word is kept, and
    a character that the prompt left open is completed.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        shown_special_ids: Sequence[int] = (),
        prompt_token_ids: Sequence[int] = (),
    ) -> None:
        self._bytes_of = tokenizer.token_bytes
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        if shown_special_ids:
            self._skipped = self._skipped.difference(shown_special_ids)
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip = tokenizer.strips_first_space
        self.push(prompt_token_ids[-PROMPT_TAIL:])

    def push(self, token_ids: Sequence[int]) -> str:
        """The new text, without a character whose bytes have not all come. Hot path."""
        raw = b"".join([self._bytes_of(i) for i in token_ids if i not in self._skipped])
        if self._strip and raw:
            self._strip = False
            raw = raw.removeprefix(b" ")
        return self._utf8.decode(raw)

    def flush(self) -> str:
        """The end: a character that was never completed becomes U+FFFD."""
        return self._utf8.decode(b"", True)


def offsets(tokenizer: Tokenizer, token_ids: Sequence[int]) -> list[int]:
    """How many characters of their text are complete before each of them."""
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=False)
    lengths = [len(detokenizer.push([token])) for token in token_ids]
    return list(accumulate(lengths, initial=0))[:-1]
