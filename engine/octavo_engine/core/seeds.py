"""Seeds: from what a caller gives to one 64-bit key a sequence."""

from __future__ import annotations

import secrets
from itertools import count

_MASK = 2**64 - 1


def key(seed: int, index: int) -> int:
    """The key of answer `index`. Mixed, so that seeds 1 and 2 share no answer (splitmix64)."""
    z = (seed + (index + 1) * 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def prompt_seed(seed: int, prompt_index: int) -> int:
    """The seed of one of several prompts, where the caller gave none: equal prompts of one request
    must not get equal answers. The first prompt keeps the seed. Signed, as callers' seeds are."""
    mixed = seed & _MASK if prompt_index == 0 else key(~seed, prompt_index)
    return mixed - (mixed >> 63 << 64)


class Seeds:
    """Seeds of requests that bring none.

    With the engine's own seed at 0 they are drawn from the system. Above 0 they follow from it and
    the number of such requests before, so that the same requests in the same order, after the same
    start, give the same answers.
    """

    def __init__(self, engine_seed: int) -> None:
        self._engine_seed = engine_seed
        self._numbers = count()

    def settle(self, seed: int | None) -> int:
        if seed is not None:
            return seed
        if self._engine_seed == 0:
            return secrets.randbits(64)
        return key(self._engine_seed, next(self._numbers))
