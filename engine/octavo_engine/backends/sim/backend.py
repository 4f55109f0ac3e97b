"""The simulated backend: each step takes as long as the settings say, and yields seeded tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from octavo_engine.backends.sim.clock import RealClock
from octavo_engine.backends.sim.masked import keep_to_masks
from octavo_engine.backends.sim.rank_loss import RankLoss
from octavo_engine.backends.sim.ranks import rank_seconds
from octavo_engine.backends.sim.text import sim_tokens
from octavo_engine.caches import KVSpec, one_group
from octavo_engine.config import BLOCK_SIZE
from octavo_engine.sampling.batch import SAMPLED_NOTHING_ALLOWED, SAMPLED_OK, Sampled

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from octavo_engine.backends.backend import BackendLimits, BackendStep
    from octavo_engine.backends.sim.clock import Clock
    from octavo_engine.caches import CacheLayout
    from octavo_engine.config import EngineConfig, SimConfig
    from octavo_engine.sampling.batch import Ragged, SamplingBatch
    from octavo_engine.weights.adapter import AdapterFiles

KV_BYTES_PER_TOKEN = 1024  # what a block pretends to take; only sums over it are ever shown
COPIED_BYTES_PER_S = 1e10  # of blocks, from and to the host's memory
GREEDY_BELOW = np.float32(1e-5)  # a greedy request asks for no randomness: all say the same
_NO_SEEDS = np.zeros(1, np.uint64)
CHOSEN_LOGPROB = float(np.log(0.5))  # each alternative is half as likely as the one before


class SimBackend:
    """A model without weights or memory: for everything around the model, at true scheduling.

    The tokens of a request are a function of its seed and their positions, so they are the same in
    any batch, after preemption and after a resume; of the positions alone if it is greedy. They
    spell words; end of text comes only where a grammar may end.
    """

    def __init__(self, config: EngineConfig, clock: Clock | None = None) -> None:
        self._config, self._sim = config, config.sim
        self._clock = RealClock() if clock is None else clock
        self._limits: BackendLimits | None = None
        self._adapters = np.zeros(config.max_loras, np.uint64)  # by slot
        self._row_seeds = _NO_SEEDS  # of the step under way
        self._rank_loss = RankLoss(config, self._clock)

    @property
    def name(self) -> str:
        return "sim"

    @property
    def isa(self) -> str:
        return "sim"

    @property
    def vocab_size(self) -> int:
        return self._sim.vocab_size

    @property
    def cache_layout(self) -> CacheLayout:
        return one_group([KVSpec(num_kv_heads=1, head_dim=KV_BYTES_PER_TOKEN // 2)])

    @property
    def kv_bytes_per_block(self) -> int:
        return BLOCK_SIZE * KV_BYTES_PER_TOKEN

    def kv_memory(self, limits: BackendLimits, fraction: float | None) -> int | None:
        return None

    def prepare(self, limits: BackendLimits, num_blocks: int) -> None:
        self._limits = limits

    def pack_adapter(self, files: AdapterFiles) -> int:
        """What it changes: the seed of the words."""
        return int(files.digest[:15], 16)

    def set_adapter(self, slot: int, packed: int | None) -> None:
        self._adapters[slot] = packed or 0

    def execute(self, step: BackendStep, sampling: SamplingBatch) -> Sampled:
        """Take the step's time, then say what was sampled."""
        started_at = self._clock.now()
        duration_s = rank_seconds(self._config, self.seconds_alone(step, sampling))
        self._row_seeds = self._adapter_seeds(step)
        sampled = self._sample(sampling)
        self._clock.sleep(duration_s - (self._clock.now() - started_at))
        self._rank_loss.check()
        return sampled

    def seconds_alone(self, step: BackendStep, sampling: SamplingBatch) -> float:
        """How long the step takes one process."""
        limits = self._limits
        assert limits is not None, "prepare() comes first"
        assert len(step.token_ids) <= limits.max_tokens
        assert len(step.logit_rows) <= limits.max_logit_rows
        counts = np.diff(step.seq_starts)
        num_decodes = int(counts[counts == 1].sum()) + _num_verified(step, sampling, counts)
        num_prefill = int(counts.sum()) - num_decodes
        return step_seconds(self._sim, num_decodes=num_decodes, num_prefill_tokens=num_prefill)

    def poison_blocks(self, block_ids: list[int]) -> None:
        """There is no memory to spoil."""

    def save_blocks(self, block_ids: Sequence[int]) -> list[NDArray[np.uint8]]:
        self._clock.sleep(len(block_ids) * self.kv_bytes_per_block / COPIED_BYTES_PER_S)
        return [np.zeros(self.kv_bytes_per_block, np.uint8) for _ in block_ids]

    def load_blocks(self, block_ids: Sequence[int], pages: Sequence[NDArray[np.uint8]]) -> None:
        self._clock.sleep(sum(page.nbytes for page in pages) / COPIED_BYTES_PER_S)

    def close(self) -> None:
        """Nothing is held."""

    def _adapter_seeds(self, step: BackendStep) -> NDArray[np.uint64]:
        """Of each row of logits, or one for all; 0 without an adapter."""
        if step.adapters is None:
            return _NO_SEEDS
        owners = np.searchsorted(step.seq_starts, step.logit_rows, side="right") - 1
        slots = step.adapters[owners]
        return np.where(slots < 0, np.uint64(0), self._adapters[slots])

    def _sample(self, sampling: SamplingBatch) -> Sampled:
        params = sampling.table[sampling.rows]
        seeds = np.where(params["temperature"] < GREEDY_BELOW, 0, params["seed"])
        seeds = seeds.astype(np.uint64) ^ self._row_seeds
        tokens = sim_tokens(seeds, sampling.positions)
        if sampling.allowed is not None:
            _keep_to_allowed(tokens, sampling.allowed)
        if sampling.masks is not None:
            keep_to_masks(tokens, seeds, sampling.positions, sampling.masks.take())
        tokens = np.where(sampling.targets >= 0, sampling.targets, tokens).astype(np.int32)
        status = np.where(tokens < 0, SAMPLED_NOTHING_ALLOWED, SAMPLED_OK).astype(np.uint8)
        sampled = Sampled(tokens, status)
        if sampling.num_logprobs >= 0:
            self._add_logprobs(sampled, sampling)
        return sampled

    def _add_logprobs(self, sampled: Sampled, sampling: SamplingBatch) -> None:
        """The chosen token is the most likely one; those after it in the vocabulary follow."""
        num_rows, vocab = len(sampled.tokens), np.int32(self.vocab_size)
        sampled.logprobs = np.full(num_rows, CHOSEN_LOGPROB, np.float32)
        sampled.ranks = np.ones(num_rows, np.int32)
        chosen = sampled.tokens[:, None]
        places = np.arange(sampling.num_logprobs, dtype=np.int32)
        ids = np.where(places < vocab, (chosen + places) % vocab, np.int32(-1))
        if sampling.logprob_ids is not None:
            for row, ends in enumerate(zip(*_bounds(sampling.logprob_ids), strict=True)):
                wanted = sampling.logprob_ids.ids[slice(*ends)]
                if len(wanted):
                    ids[row] = -1
                    ids[row, : len(wanted)] = wanted
        falling = (CHOSEN_LOGPROB * ((ids - chosen) % vocab + 1)).astype(np.float32)
        sampled.top_ids, sampled.top_logprobs = ids, falling


def step_seconds(sim: SimConfig, *, num_decodes: int, num_prefill_tokens: int) -> float:
    """How long a step takes: a base, and so much for each token."""
    milliseconds = (
        sim.step_base_ms
        + sim.decode_token_ms * num_decodes
        + sim.prefill_token_ms * num_prefill_tokens
    )
    return milliseconds * 1e-3 * sim.time_scale


def _num_verified(step: BackendStep, sampling: SamplingBatch, counts: NDArray[np.int32]) -> int:
    """Tokens of sequences that sample at each of several: guesses that are verified."""
    if len(step.logit_rows) <= len(counts):
        return 0
    owners = np.repeat(np.arange(len(counts)), counts)[step.logit_rows[sampling.targets < 0]]
    num_sampled = np.bincount(owners, minlength=len(counts))
    return int(counts[(num_sampled == counts) & (counts > 1)].sum())


def _bounds(lists: Ragged) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    return lists.starts[:-1], lists.starts[1:]


def _keep_to_allowed(tokens: NDArray[np.int32], allowed: Ragged) -> None:
    for row, (start, end) in enumerate(zip(*_bounds(allowed), strict=True)):
        if end > start:
            tokens[row] = allowed.ids[start + tokens[row] % (end - start)]
