"""A backend that says what a model would: one of some texts, with a slip of the tongue at times.

Its logits are a function of all tokens before them, read through the block table, so that a wrong
slot shows as a wrong text; which of the texts is said is up to the sampler, so to the seed. The
sampler is the real one, so every wish of a request is honoured. Speaks `ByteTokenizer`'s bytes.
"""

from __future__ import annotations

import hashlib
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from octavo_engine import _native
from octavo_engine.caches import KVSpec, one_group
from octavo_engine.config import BLOCK_SIZE
from octavo_engine.sampling.sampler import sample
from octavo_engine.tokenization.bytes_tokenizer import EOS, ByteTokenizer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from octavo_engine.backends.backend import BackendLimits, BackendStep
    from octavo_engine.sampling.batch import Sampled, SamplingBatch

VOCAB = 512
# Behind the first of these an answer begins: a chat's, gpt-oss', a text's.
BEGINS = (b"<|assistant|>\n", b"<|start|>assistant", b"\x03")
_PEAKS = (8.0, 11.0, 14.0, 30.0)  # of 512 tokens: a slip every three tokens, hundred, or never
_NOBODY = -1  # has written to a slot


class TalkativeBackend:
    """How often it slips depends on the prompt."""

    name = "talkative"
    vocab_size = VOCAB
    kv_bytes_per_block = 2 * BLOCK_SIZE
    cache_layout = one_group([KVSpec(num_kv_heads=1, head_dim=1)])

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts = [text.encode() for text in texts]
        self._team = _native.Team(1)
        self._tokens: NDArray[np.int32] = np.empty(0, np.int32)  # by slot
        tokenizer = ByteTokenizer(VOCAB)
        self._bytes = [tokenizer.token_bytes(token) for token in range(VOCAB)]
        self._row = cache(self._logits)

    def kv_memory(self, limits: BackendLimits, fraction: float | None) -> int | None:
        return None

    def prepare(self, limits: BackendLimits, num_blocks: int) -> None:
        self._tokens = np.full(num_blocks * BLOCK_SIZE, _NOBODY, np.int32)

    def execute(self, step: BackendStep, sampling: SamplingBatch) -> Sampled:
        blocks = self._tokens.reshape(-1, BLOCK_SIZE)
        for source, target, num_tokens in step.copies.tolist():
            blocks[target, :num_tokens] = blocks[source, :num_tokens]
            blocks[target, num_tokens:] = _NOBODY
        self._tokens[step.slots[0]] = step.token_ids
        owners = np.repeat(step.rows, np.diff(step.seq_starts))
        logits = np.empty((len(step.logit_rows), VOCAB), np.float32)
        for row, token in enumerate(step.logit_rows.tolist()):
            at = np.arange(int(step.positions[token]) + 1)
            table = step.block_tables[0, owners[token]]
            said = self._tokens[table[at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE]
            assert (said != _NOBODY).all(), "a slot is read that nobody wrote"
            logits[row] = self._row(said.tobytes())
        return sample(self._team, logits, sampling)

    def poison_blocks(self, block_ids: list[int]) -> None:
        self._tokens.reshape(-1, BLOCK_SIZE)[block_ids] = _NOBODY

    def close(self) -> None:
        self._row.cache_clear()

    def _logits(self, tokens: bytes) -> NDArray[np.float32]:
        """After these, as 32-bit numbers."""
        text = b"".join([self._bytes[token] for token in np.frombuffer(tokens, np.int32)])
        places = [(place, mark) for mark in BEGINS if (place := text.find(mark)) >= 0]
        begin = min(places)[0] + len(min(places)[1]) if places else 0
        digest = hashlib.blake2b(text, digest_size=8).digest()
        row = np.random.default_rng(int.from_bytes(digest)).random(VOCAB, np.float32)
        peak = _PEAKS[hashlib.blake2b(text[:begin]).digest()[0] % len(_PEAKS)]
        for token in self._next(text[begin:]):
            row[token] += peak
        return row

    def _next(self, said: bytes) -> set[int]:
        """How the texts go on that begin so; after a slip, the text whose turn it is."""
        texts = [text for text in self._texts if text.startswith(said)]
        if not texts:
            texts = [self._texts[sum(said[:1]) % len(self._texts)]]
        return {text[len(said)] if len(said) < len(text) else EOS for text in texts}
