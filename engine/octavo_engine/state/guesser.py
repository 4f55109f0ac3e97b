"""What guesses the next tokens of a sequence, as its sequence sees it."""

from __future__ import annotations

from typing import Protocol


class Guesser(Protocol):
    """Says how one sequence may go on. A sequence has one for its whole life."""

    rate: float  # of guesses that are right, given that those before them were

    def guess(self, tokens: list[int], /) -> list[int]:
        """What could follow all tokens that there are. Called at most once a step; between calls
        there may be several tokens."""
