"""Steps in which each sequence has a few tokens: those that verify drafts, and a draft model's
first pass over what was accepted.

Their contexts are walked as those of single tokens are, so a step of 16 sequences with four drafts
each has no tiles of 128 rows for five; and they have graphs, by the number of tokens alone: whoever
owns them, programs without work end at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from octavo_engine.backends.torch.device_step import StepSizes
from octavo_engine.backends.torch.graphs import choose_bucket
from octavo_engine.config import MAX_SPECULATION

if TYPE_CHECKING:
    from octavo_engine.backends.backend import BackendLimits, BackendStep
    from octavo_engine.backends.torch.kernels import Kernels

LADDER = (4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)


class FewSteps(NamedTuple):
    """What counts as a few tokens, and the sizes that such steps are padded to."""

    width: int = 0  # tokens of a sequence at most; 0: there are no such steps
    buckets: tuple[int, ...] = ()  # of tokens, ascending
    is_walked: bool = False  # else attention takes them in tiles, as those of prompts

    @property
    def max_tokens(self) -> int:
        return self.buckets[-1] if self.buckets else 0

    def holds(self, step: BackendStep) -> bool:
        """Whether it is laid out as such a step."""
        if not self.width or not len(step.seq_lens):
            return False
        most = int(np.diff(step.seq_starts).max())
        return most <= self.width and len(step.token_ids) <= self.max_tokens

    def sizes(self, step: BackendStep, kernels: Kernels) -> StepSizes | None:
        """The bucket; None: it has no rows of logits, or there is no such bucket."""
        tokens = choose_bucket(self.buckets, len(step.token_ids))
        if tokens is None or not 0 < len(step.logit_rows) <= tokens:
            return None
        if self.is_walked:
            return StepSizes(tokens, tokens, tokens, tokens + kernels.walks.spare_parts)
        # One sequence is padding, which owns the tokens that are.
        tiles = tokens // kernels.tokens_per_tile + tokens + 1
        return StepSizes(tokens, tokens + 1, tokens, tiles)


def plan_few(limits: BackendLimits, kernels: Kernels, num_drafts: int) -> FewSteps:
    """For steps with up to `num_drafts` drafts of a sequence, and MAX_SPECULATION of all."""
    if not num_drafts or not kernels.can_capture:
        return FewSteps()
    width = num_drafts + 1
    most = min(limits.max_seqs * width, limits.max_seqs + MAX_SPECULATION, limits.max_tokens)
    buckets = (*(size for size in LADDER if size < most), most)
    return FewSteps(width, buckets, kernels.walks_few(width))
