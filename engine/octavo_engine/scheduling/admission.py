"""Whether memory lets one more sequence run: optimistic, and corrected by preemptions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo_engine.kv.needs import KVNeeds

if TYPE_CHECKING:
    from collections.abc import Sequence as List

    from octavo_engine.state.sequence import Sequence

FIRST_RATIO = 0.7
LEAST_RATIO = 0.1
DECAY = (FIRST_RATIO - LEAST_RATIO) / 600  # per step without a preemption
MAX_EXPECTED_TOKENS = 4096  # of further output, however many were allowed
CAUTION = 0.25  # a sequence that was preempted counts with so much more, each time


class AdmissionControl:
    """Reserves memory for output that is still to come.

    Few requests use all of their max_tokens, so only a share of it is reserved, `ratio`. It decays
    while all goes well and jumps up when a sequence had to be preempted. A sequence that was
    preempted is let in with a larger share each time, in the end with all of it: it cannot be
    thrown out forever.
    """

    def __init__(self, needs: KVNeeds | None = None) -> None:
        self._needs = needs or KVNeeds()
        self.ratio = FIRST_RATIO

    def reserve(self, sequence: Sequence) -> float:
        """Blocks to keep free for the output that this sequence is expected to add."""
        still = min(sequence.max_num_tokens - len(sequence.token_ids), MAX_EXPECTED_TOKENS)
        ratio = min(1.0, self.ratio + CAUTION * sequence.num_preemptions)
        return self._needs.growth(len(sequence.token_ids), ratio * still)

    def after_step(self) -> None:
        self.ratio = max(LEAST_RATIO, self.ratio - DECAY)

    def after_preemption(self, running: List[Sequence]) -> None:
        """Learn from what the sequences that still run have really used of their allowance."""
        used = sum(s.num_output_tokens + 20 for s in running)
        allowed = sum(s.max_num_tokens - s.num_prompt_tokens for s in running) + 1
        self.ratio = min(1.0, max(self.ratio + DECAY * 20, used / allowed))
