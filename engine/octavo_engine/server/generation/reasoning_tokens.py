"""How many of an answer's tokens are reasoning."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence, Set

    from octavo_engine.dialects.reasoning import Splitter
    from octavo_engine.tokenization.tokenizer import Tokenizer


class ReasoningTokens:
    """Of one answer: those up to and with the mark that closes its reasoning.

    Counted by the tokens' own bytes, so that it does not matter in what pieces they came.
    """

    def __init__(self, tokenizer: Tokenizer, hidden_ids: Set[int]) -> None:
        self.count = 0
        self._bytes_of = tokenizer.token_bytes
        self._hidden = hidden_ids
        self._ids: list[int] = []
        self._texts: list[str] = []
        self._is_settled = False

    def add(self, ids: Sequence[int], text: str, reasoning: Splitter) -> None:
        """After the parser has read `text`, which came of `ids`. Hot path until it is settled."""
        if self._is_settled:
            return
        self._ids += ids
        self._texts.append(text)
        if reasoning.ends_at is not None:
            self.count = self._up_to(reasoning.ends_at)
            self._is_settled = True
            self._ids, self._texts = [], []
        elif not reasoning.is_undecided:
            self.count = len(self._ids)

    def _up_to(self, num_chars: int) -> int:
        left = len("".join(self._texts)[:num_chars].encode())
        count = 0
        for token in self._ids:
            if left <= 0:
                break
            count += 1
            if token not in self._hidden:
                left -= len(self._bytes_of(token))
        return count
