"""A backend without a model: its next token is a pure function of the token prefix.

The "KV cache" holds one number a slot: a digest of the token there and of the number of the slot
before it, read through the block table. The next token is a hash of all numbers from the first slot
to the token's own. So a wrong slot, table, position or copy, a block shared by mistake, or one read
after it was freed, all give a wrong token, and the truth is computable from the token ids alone.
"""

from __future__ import annotations

import hashlib
from dataclasses import MISSING, fields
from typing import TYPE_CHECKING

import numpy as np

from octavo_engine.caches import CacheGroup, CacheLayout, KVSpec
from octavo_engine.config import BLOCK_SIZE
from octavo_engine.sampling.processors import apply_processors
from tests.kernels import sampling_reference

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from octavo_engine.backends.backend import BackendLimits, BackendStep
    from octavo_engine.sampling.batch import Sampled, SamplingBatch

MASK = 2**64 - 1
POISON = 0  # no digest is ever 0


class FakeBackend:
    """Computes digests instead of attention. A broken promise of `BackendStep` is an error.

    There is a group of layers for each of `windows`, and a number for each; the next token depends
    on what each of them sees.

    With `peak` at its default the true token is chosen at any ordinary temperature too; lower it to
    see real sampling. `fail_after(prefix)` makes the logits after that prefix NaN; `on_execute` is
    called with each step before it is computed, and may raise or wait.
    """

    name = "fake"
    kv_bytes_per_block = 2 * BLOCK_SIZE

    def __init__(
        self,
        num_blocks: int,
        vocab_size: int = 512,
        *,
        peak: float = 40.0,
        windows: Sequence[int | None] = (None,),
    ) -> None:
        self.num_blocks = num_blocks
        specs = [KVSpec(num_kv_heads=1, head_dim=1, window=window) for window in windows]
        self.cache_layout = CacheLayout(
            tuple(specs), tuple(CacheGroup(w, (i,)) for i, w in enumerate(windows))
        )
        self.vocab_size = vocab_size
        self.peak = peak
        self.kv = np.full(num_blocks * BLOCK_SIZE, POISON, np.uint64)
        self.limits: BackendLimits | None = None
        self._versions: dict[int, tuple[int, list[list[int]]]] = {}  # of block tables, as last seen
        self.num_steps = 0
        self.num_tokens = 0  # computed, recomputed ones included
        self.is_closed = False
        self.on_execute: Callable[[BackendStep], None] | None = None
        self._nan_digests: set[int] = set()

    def truth(self, token_ids: Sequence[int]) -> int:
        """The token that comes after `token_ids`."""
        return self._next_token(self._seen(self._digests(token_ids)))

    def continuation(self, token_ids: Sequence[int], num_tokens: int) -> list[int]:
        """The next `num_tokens` tokens, each the truth of all before it."""
        digests: list[int] = self._digests(token_ids).tolist()
        tokens: list[int] = []
        for _ in range(num_tokens):
            tokens.append(self._next_token(self._seen(np.array(digests, np.uint64))))
            digests.append(_digest(digests[-1], tokens[-1], len(digests)))
        return tokens

    def fail_after(self, token_ids: Sequence[int]) -> None:
        """From now on the logits after exactly these tokens are NaN."""
        self._nan_digests.add(int(self._digests(token_ids)[-1]))

    def logits(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """The row of logits after `token_ids`; the truth is its greatest."""
        return self._logits(self._seen(self._digests(token_ids)))

    def kv_memory(self, limits: BackendLimits, fraction: float | None) -> int | None:
        return None

    def prepare(self, limits: BackendLimits, num_blocks: int) -> None:
        assert self.limits is None, "prepare is called once"
        assert num_blocks <= self.num_blocks
        self.limits = limits

    def execute(self, step: BackendStep, sampling: SamplingBatch) -> Sampled:
        if self.on_execute is not None:
            self.on_execute(step)
        self._check(step, sampling)
        self.num_steps += 1
        self.num_tokens += len(step.token_ids)
        for source, target, num_tokens in step.copies.tolist():
            assert source != target and 0 < num_tokens <= BLOCK_SIZE
            blocks = self.kv.reshape(-1, BLOCK_SIZE)
            blocks[target, :num_tokens] = blocks[source, :num_tokens]
            blocks[target, num_tokens:] = POISON
        for token, position, slots, tables in self._tokens(step):
            for slot, table in zip(slots, tables, strict=True):
                before = int(self.kv[_slot(table, position - 1)]) if position else 1
                # A token computed upon poison is poison, as NaN would be.
                self.kv[slot] = POISON if before == POISON else _digest(before, token, position)
        logits = self._all_logits(step)
        apply_processors(sampling.processed, logits)
        return sampling_reference.sample(logits, sampling)

    def poison_blocks(self, block_ids: list[int]) -> None:
        self.kv.reshape(-1, BLOCK_SIZE)[block_ids] = POISON

    def close(self) -> None:
        self.is_closed = True

    def _tokens(self, step: BackendStep) -> list[tuple[int, int, list[int], NDArray[np.int32]]]:
        """(token, position, slots, block tables) of each token of the step."""
        owner = np.repeat(np.arange(len(step.rows)), np.diff(step.seq_starts))
        tables = step.block_tables[:, step.rows]
        return [
            (token, position, slots, tables[:, b])
            for token, position, slots, b in zip(
                step.token_ids.tolist(),
                step.positions.tolist(),
                step.slots.T.tolist(),
                owner.tolist(),
                strict=True,
            )
        ]

    def _all_logits(self, step: BackendStep) -> NDArray[np.float32]:
        logits = np.empty((len(step.logit_rows), self.vocab_size), np.float32)
        tokens = self._tokens(step)
        for s, t in enumerate(step.logit_rows.tolist()):
            _, position, _, tables = tokens[t]
            seen = []
            for table, window in zip(tables, self.cache_layout.windows, strict=True):
                slots = np.arange(_seen_from(position, window), position + 1)
                seen.append(table[slots // BLOCK_SIZE] * BLOCK_SIZE + slots % BLOCK_SIZE)
            logits[s] = self._logits(self.kv[np.concatenate(seen)])
        return logits

    def _logits(self, digests: NDArray[np.uint64]) -> NDArray[np.float32]:
        if (digests == POISON).any() or int(digests[-1]) in self._nan_digests:
            return np.full(self.vocab_size, np.nan, np.float32)
        noise = np.random.default_rng(int(digests[-1])).random(self.vocab_size, np.float32)
        noise[self._next_token(digests)] += np.float32(self.peak)
        return noise

    def _next_token(self, digests: NDArray[np.uint64]) -> int:
        hashed = hashlib.blake2b(digests.tobytes(), digest_size=8).digest()
        return int.from_bytes(hashed, "little") % self.vocab_size

    def _seen(self, digests: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """What all groups see of a prefix, from its last token."""
        last = len(digests) - 1
        firsts = (_seen_from(last, window) for window in self.cache_layout.windows)
        return np.concatenate([digests[first:] for first in firsts])

    def _digests(self, token_ids: Sequence[int]) -> NDArray[np.uint64]:
        assert len(token_ids), "a prefix has at least one token"
        digests = np.empty(len(token_ids), np.uint64)
        before = 1
        for position, token in enumerate(token_ids):
            digests[position] = before = _digest(before, token, position)
        return digests

    def _check(self, step: BackendStep, sampling: SamplingBatch) -> None:
        """The promises that `BackendStep` and `SamplingBatch` make."""
        assert step.awaited is None, "this backend waits for each step"
        for name in (each.name for each in fields(step) if each.default is MISSING):
            assert getattr(step, name).dtype == np.int32, name
        self._check_versions(step)
        num_tokens, num_seqs, num_logits = len(step.token_ids), len(step.rows), len(step.logit_rows)
        counts = np.diff(step.seq_starts)
        num_groups = len(self.cache_layout.groups)
        assert step.slots.shape == (num_groups, num_tokens)
        assert len(step.positions) == num_tokens > 0
        assert step.block_tables.ndim == 3 and len(step.block_tables) == num_groups
        assert len(step.seq_starts) == num_seqs + 1 and len(step.seq_lens) == num_seqs
        assert step.seq_starts[0] == 0 and step.seq_starts[-1] == num_tokens
        assert (counts > 0).all()
        assert len(set(step.rows.tolist())) == num_seqs, "a row is scheduled twice"
        assert (step.token_ids >= 0).all() and (step.token_ids < self.vocab_size).all()
        assert step.copies.shape[1:] == (3,)
        assert (np.diff(step.logit_rows) > 0).all(), "logit rows ascend"
        assert (step.logit_rows >= 0).all() and (step.logit_rows < num_tokens).all()
        assert len(sampling.rows) == len(sampling.positions) == len(sampling.targets) == num_logits
        slots = []
        for b, (first, end) in enumerate(zip(step.seq_starts, step.seq_starts[1:], strict=False)):
            positions = np.arange(step.seq_lens[b] - counts[b], step.seq_lens[b])
            assert (step.positions[first:end] == positions).all(), "a sequence's last tokens"
            for group, table in enumerate(step.block_tables[:, step.rows[b]]):
                expected = table[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
                assert (step.slots[group, first:end] == expected).all(), "slots follow the table"
                slots += expected.tolist()
        assert len(set(slots)) == num_groups * num_tokens, "two tokens of one step share a slot"
        assert all(0 <= slot < len(self.kv) for slot in slots)
        owner = np.repeat(step.rows, counts)[step.logit_rows]
        assert (sampling.rows == owner).all()
        assert (sampling.positions == step.positions[step.logit_rows] + 1).all()
        if self.limits is not None:
            assert num_tokens <= self.limits.max_tokens
            assert num_seqs <= self.limits.max_seqs
            assert num_logits <= self.limits.max_logit_rows
            assert (step.seq_lens <= self.limits.max_model_len).all()

    def _check_versions(self, step: BackendStep) -> None:
        """A table that was written to has another version."""
        assert step.table_versions is not None
        for row, length in zip(step.rows.tolist(), step.seq_lens.tolist(), strict=True):
            blocks = step.block_tables[:, row, : -(-length // BLOCK_SIZE)].T.tolist()
            version, seen = self._versions.get(row, (-1, []))
            if version == step.table_versions[row]:
                both = min(len(seen), len(blocks))
                assert seen[:both] == blocks[:both], "a table changed and its version did not"
            self._versions[row] = int(step.table_versions[row]), blocks


def _seen_from(position: int, window: int | None) -> int:
    """The first position that the one at `position` sees."""
    return 0 if window is None else max(0, position - window + 1)


def _slot(table: NDArray[np.int32], position: int) -> int:
    return int(table[position // BLOCK_SIZE]) * BLOCK_SIZE + position % BLOCK_SIZE


def _digest(before: int, token: int, position: int) -> int:
    """What the slot of `token` holds; never POISON."""
    mixed = ((before ^ token + 1) * 0x9E3779B97F4A7C15 + position) & MASK
    return (mixed ^ mixed >> 29) * 0xBF58476D1CE4E5B9 & MASK | 1
