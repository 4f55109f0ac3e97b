"""Guesses how a sequence goes on: as it did when its last few tokens stood there before."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

from octavo_engine.scheduling.ngram_table import NgramTable

if TYPE_CHECKING:
    from octavo_engine.config import SpeculationConfig

FIRST_RATE = 0.5  # how often a guess is right, before any was seen
WEIGHT = 1 / 16  # of a new guess in that: about the last sixteen count


class NgramGuesser:
    """Belongs to one sequence, and survives its preemptions.

    The longest run of at most `prompt_lookup_max` last tokens that came before counts; of its
    places, the latest. There is one table of bounded size: a token costs the same however long the
    sequence is, and what does not fit any more is forgotten.

    Each guess is compared with what came, whether the engine made use of it or not, so `rate`
    costs no computing and is true while nothing is speculated.
    """

    __slots__ = ("_guess", "_length", "_num_tokens", "_table", "rate")

    def __init__(self, config: SpeculationConfig) -> None:
        self.rate = FIRST_RATE  # of guesses that are right, given that those before them were
        self._table = NgramTable(config.prompt_lookup_min, config.prompt_lookup_max)
        self._num_tokens = config.num_speculative_tokens
        self._length = 0  # tokens taken in
        self._guess: list[int] = []  # of what follows them

    def rates(self, count: int) -> list[float]:
        return [self.rate] * count

    def guess(self, tokens: list[int]) -> list[int]:
        """What could follow; empty if nothing like it was seen. Tokens may only be added between
        calls. Hot path: once a step and sequence."""
        length = len(tokens)
        if length == self._length:
            return self._guess
        self.rate = rate_after(self.rate, self._guess, self._length, tokens)
        start = self._table.find_and_enter(tokens)
        self._length = length
        self._guess = _go_on(tokens, start, self._num_tokens) if start else []
        return self._guess


def rate_after(rate: float, guess: list[int], length: int, tokens: list[int]) -> float:
    """How often guesses are right, once what followed the first `length` tokens is known."""
    for place, guessed in enumerate(guess, length):
        if place == len(tokens):
            break
        is_right = guessed == tokens[place]
        rate += (is_right - rate) * WEIGHT
        if not is_right:
            break
    return rate


def _go_on(tokens: list[int], start: int, count: int) -> list[int]:
    """What stands at `start`. Where it meets the end it runs on into itself: a text that repeats
    a short pattern is guessed to go on with it."""
    found = tokens[start : start + count]
    missing = count - len(found)
    if missing == 0:
        return found
    return list(chain(found, *[found] * (missing // len(found) + 1)))[:count]
