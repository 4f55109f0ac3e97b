"""What guesses the next tokens of a sequence, as its sequence sees it, and how sure it is."""

from __future__ import annotations

from typing import Protocol

SURENESS_LEVELS = 8  # of the probability that a head gives what it proposes, evenly


def level_of(probability: float) -> int:
    return min(int(probability * SURENESS_LEVELS), SURENESS_LEVELS - 1)


class Guesser(Protocol):
    """Says how one sequence may go on. A sequence has one for its whole life."""

    rate: float  # of guesses that are right, given that those before them were

    def guess(self, tokens: list[int], /) -> list[int]:
        """What could follow all tokens that there are. Called at most once a step; between calls
        there may be several tokens."""

    def rates(self, count: int, /) -> list[float]:
        """Of the first tokens of the guess made last: how often such ones are right, given that
        those before them were."""
