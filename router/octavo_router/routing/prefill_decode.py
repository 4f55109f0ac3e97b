"""Prefill and decode apart: an engine of its own computes a long prompt, another one answers.

The answering engine is chosen by prefix-load. Where it lacks much of the prompt, an engine of role
`prefill` computes that first and hands its KV cache over, so that no running answer has to wait
for a prompt. Short prompts are not worth the way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo_router.routing.prefix_load import PrefixLoad

if TYPE_CHECKING:
    from octavo_engine.protocol.sides import SideTargets
    from octavo_router.residency.api import Underway

_SMOOTHING = 0.05  # weight of the newest prompt


class PrefillDecode(PrefixLoad):
    """A pool's policy. Who computes a prompt is for `Dispatcher.place_prompt` to say."""

    name = "prefill-decode"

    def __init__(
        self,
        underway: Underway,
        *,
        min_tokens: int,
        balance_factor: float,
        balance_slack: int,
        targets: SideTargets | None = None,
    ) -> None:
        super().__init__(underway, balance_factor=balance_factor, balance_slack=balance_slack)
        self.min_tokens = min_tokens  # uncached ones that are worth the way
        self.targets = targets  # by which engines change sides; None: they stay
        self.prompt_tokens = 0.0  # uncached ones of a prompt that is worth the way, on average

    def is_worth_it(self, uncached_tokens: int) -> bool:
        """Whether so much is computed elsewhere, if an engine is there for it."""
        if uncached_tokens < self.min_tokens:
            return False
        before = self.prompt_tokens or uncached_tokens
        self.prompt_tokens = before + _SMOOTHING * (uncached_tokens - before)
        return True
