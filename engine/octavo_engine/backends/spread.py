"""Logits over some of a model's tokens as logits over all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


def spread(
    logits: NDArray[np.float32], token_ids: NDArray[np.int32] | None, vocab_size: int
) -> NDArray[np.float32]:
    """`token_ids` are those of the columns; None: all, in their order. Others are not drawn."""
    if token_ids is None:
        return logits
    whole = np.full((len(logits), vocab_size), -np.inf, np.float32)
    whole[:, token_ids] = logits
    return whole
