"""How often each row's sequence has each token, on the device: what penalties look at.

A word for each row and token: its lowest bit says that the prompt has the token, the others count
how often it was generated. A step adds the tokens that are new since the row's last one, so a long
history is sent once, when its sequence comes into the row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from octavo_engine.backends.torch.transfers import send

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from octavo_engine.backends.torch.device_step import DrawParams
    from octavo_engine.sampling.batch import SamplingBatch

OUTPUT = 2  # what a generated token adds to its word


class _Spans(NamedTuple):
    """Tokens to add: of each entry those of a runner's row from `starts` to `ends`. The last one
    may be known to the device alone, and then is the one that its row of logits awaits."""

    targets: NDArray[np.int64]  # rows of words that are added to
    rows: NDArray[np.int64]  # the runner's
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]
    awaiting: NDArray[np.bool_]
    logits_rows: NDArray[np.int64]


class TokenCounts:
    """Of all rows. `row_counts` is called once for each step that has penalties."""

    def __init__(self, num_rows: int, vocab: int, device: torch.device) -> None:
        self._shape = num_rows, vocab
        self._device = device
        self._words: Tensor | None = None  # once something is counted
        self._fills = np.full(num_rows, -1, np.int64)  # whose tokens are counted; -1: nobody's
        self._lengths = np.zeros(num_rows, np.int64)  # how many

    def forget(self) -> None:
        """Let go of the memory."""
        self._words = None
        self._fills[:] = -1

    def row_counts(
        self, logits_rows: NDArray[np.int64], sampling: SamplingBatch, params: DrawParams
    ) -> Tensor:
        """The words of each of these rows of logits, int32 [n, vocabulary]. Where a sequence has
        several rows of them, tokens behind the first are guesses, which are not remembered."""
        if self._words is None:
            self._words = torch.zeros(self._shape, dtype=torch.int32, device=self._device)
        owners = sampling.rows[logits_rows].astype(np.int64)
        ends = sampling.positions[logits_rows].astype(np.int64)
        awaiting = np.zeros(len(owners), bool)
        if sampling.awaited is not None:
            awaiting = sampling.awaited[logits_rows]
        by_end = np.lexsort((ends, owners))
        rows, firsts = np.unique(owners[by_end], return_index=True)
        firsts = by_end[firsts]  # each sequence's first row of logits
        base = _Spans(
            rows, rows, self._starts(rows, ends[firsts], sampling), ends[firsts],
            awaiting[firsts], logits_rows[firsts],
        )  # fmt: skip
        self._fills[rows] = -1  # unless all of it is added
        self._words.index_fill_(0, send(rows[base.starts == 0], self._device), 0)
        self._add(self._words, base, sampling, params)
        if sampling.fills is not None:
            self._fills[rows], self._lengths[rows] = sampling.fills[rows], base.ends
        words = self._words.index_select(0, send(owners, self._device))
        starts = base.ends[np.searchsorted(rows, owners)]
        behind = np.flatnonzero(ends > starts)
        if len(behind):
            guesses = _Spans(
                behind, owners[behind], starts[behind], ends[behind], awaiting[behind],
                logits_rows[behind],
            )  # fmt: skip
            self._add(words, guesses, sampling, params)
        return words

    def _starts(
        self, rows: NDArray[np.int64], ends: NDArray[np.int64], sampling: SamplingBatch
    ) -> NDArray[np.int64]:
        """How many tokens of each row are counted already; 0: it has another sequence now."""
        if sampling.fills is None:
            return np.zeros(len(rows), np.int64)
        lengths = self._lengths[rows]
        is_same = (self._fills[rows] == sampling.fills[rows]) & (lengths <= ends)
        return np.where(is_same, lengths, 0)

    def _add(
        self, words: Tensor, spans: _Spans, sampling: SamplingBatch, params: DrawParams
    ) -> None:
        vocab, flat = self._shape[1], words.view(-1)
        # What is awaited, unless it was counted when it was so before.
        latest = spans.awaiting & (spans.starts < spans.ends)
        counts = np.maximum(spans.ends - spans.awaiting - spans.starts, 0)
        entries = np.repeat(np.arange(len(counts)), counts)
        indices = np.arange(len(entries)) - np.repeat(np.cumsum(counts) - counts, counts)
        indices += spans.starts[entries]
        tokens = sampling.history[spans.rows[entries], indices]
        is_known = (tokens >= 0) & (tokens < vocab)
        places = spans.targets[entries] * vocab + tokens
        num_prompt_tokens = sampling.table["num_prompt_tokens"][spans.rows[entries]]
        is_output = indices >= num_prompt_tokens
        if len(prompt := places[is_known & ~is_output]):
            at = send(prompt, self._device)
            flat.index_copy_(0, at, flat.index_select(0, at) | 1)
        at = send(places[is_known & is_output], self._device)
        if latest.any():
            kept_at = send(spans.logits_rows[latest], self._device)
            kept = params.kept.index_select(0, params.kept_at.index_select(0, kept_at)).long()
            at = torch.cat([at, send(spans.targets[latest] * vocab, self._device) + kept])
        if len(at):
            flat.scatter_add_(0, at, torch.full_like(at, OUTPUT, dtype=torch.int32))
