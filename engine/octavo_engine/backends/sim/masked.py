"""What the simulator says under a grammar: its own words where they fit, and an end before long."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from octavo_engine.backends.sim.text import mix

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from octavo_engine.sampling.batch import MaskRows

_END = 257  # the byte vocabulary's end of text
_CLOSING = b'"]}>'
_OWN_WORD = 6  # of 8: how often its own token is kept where it is allowed


def keep_to_masks(
    tokens: NDArray[np.int32],
    seeds: NDArray[np.uint64],
    positions: NDArray[np.int32],
    masks: MaskRows,
) -> None:
    """Replace what a mask forbids, by a function of seed and position alone. -1: all is forbidden.

    A text that may end does, and what can be closed often is: a model would not go on for ever.
    """
    seeds = np.asarray(seeds, np.uint64)
    for row in np.flatnonzero(masks.rows >= 0):
        bits = masks.bits[masks.rows[row]]
        dice = int(mix(seeds[row : row + 1] ^ mix(positions[row : row + 1].astype(np.uint64)))[0])
        tokens[row] = _choose(int(tokens[row]), bits, dice)


def _choose(own: int, bits: NDArray[np.uint32], dice: int) -> int:
    if _is_set(bits, _END):
        return _END
    is_free_text = _is_set(bits, 0)  # where even NUL may stand, nothing waits to be closed
    if _is_set(bits, own) and (is_free_text or dice % 8 < _OWN_WORD):
        return own
    closing = [byte for byte in _CLOSING if _is_set(bits, byte)]
    if closing:
        return closing[dice // 8 % len(closing)]
    allowed = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))
    return int(allowed[dice // 8 % len(allowed)]) if len(allowed) else -1


def _is_set(bits: NDArray[np.uint32], token: int) -> bool:
    return token >> 5 < len(bits) and bool(int(bits[token >> 5]) >> (token & 31) & 1)
