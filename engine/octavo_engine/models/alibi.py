"""Attention with linear biases: how steeply each head forgets."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from octavo_engine.models.config import ModelConfig


def alibi_slopes(config: ModelConfig) -> NDArray[np.float32]:
    """[num_heads]: powers of 2^(-8 / heads), and where the heads are no power of two, some of those
    that twice as many would have."""
    heads = config.num_heads
    whole = 1 << (heads.bit_length() - 1)  # the power of two that is not above it
    slopes = _powers(whole)
    if whole != heads:
        finer = _powers(2 * whole)
        if config.block.alibi_order == "strided":
            slopes = np.concatenate([finer[1::2], finer[::2]])[:heads]
        else:
            slopes = np.concatenate([slopes, finer[::2][: heads - whole]])
    return np.asarray(slopes * config.block.alibi_scale, dtype=np.float32)


def _powers(count: int) -> NDArray[np.float64]:
    return 2.0 ** (-8.0 / count * np.arange(1, count + 1, dtype=np.float64))
