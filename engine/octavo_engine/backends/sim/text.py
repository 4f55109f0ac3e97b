"""What the simulator says: words chosen by seed and position, spelled one byte a token."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

# 64 words of five letters: with a space each takes six positions, so a position knows its letter.
WORD_SPAN = 6
SPELLED = (
    b"amber apple april arrow bloom brave bread brook cabin candy cedar chalk cloud "
    b"coral crisp dance delta eagle early earth ember fable field flame fresh frost "
    b"ghost giant glass grain grape grove happy heart honey house ivory jolly kayak "
    b"lemon light lilac linen maple march night ocean olive pearl piano plain quiet "
    b"raven river sandy seven shore spark stone storm sugar table tiger water "
)


def sim_tokens(seeds: ArrayLike, positions: ArrayLike) -> NDArray[np.int32]:
    """The token at each position of a sequence with that seed. A pure function of the two."""
    position = np.asarray(positions, np.uint64)
    span = np.uint64(WORD_SPAN)
    num_words = np.uint64(len(SPELLED) // WORD_SPAN)
    word = mix(np.asarray(seeds, np.uint64) ^ mix(position // span)) % num_words
    letters = np.frombuffer(SPELLED, np.uint8)
    return letters[(word * span + position % span).astype(np.intp)].astype(np.int32)


def mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """splitmix64: neighbours come out unlike. Wrapping round is meant."""
    mixed = np.atleast_1d(values) + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
