"""From a model's rows to the answer: cut, normalised, or as probabilities. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from octavo_engine.models.pooling_config import PoolingConfig, ScoreActivation
    from octavo_engine.state.pooling import PoolingParams

_SMALLEST_NORM = 1e-12  # a vector of zeros stays one


def finish(
    rows: NDArray[np.float32], params: PoolingParams, config: PoolingConfig
) -> NDArray[np.float32]:
    """Each row for itself: the bits of one never depend on the others."""
    if config.is_classifier:
        return _activated(rows, _activation(params, config))
    if config.is_sparse:
        rows = np.log1p(np.maximum(rows, 0.0))
    rows = rows[:, : params.dimensions]
    normalize = config.normalize if params.activate is None else params.activate
    return _normalized(rows) if normalize else rows


def _activation(params: PoolingParams, config: PoolingConfig) -> ScoreActivation:
    if params.activate is None or config.score_activation != "none":
        return "none" if params.activate is False else config.score_activation
    if not params.activate:
        return "none"
    return "sigmoid" if len(config.labels) == 1 else "softmax"


def _normalized(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    wide = rows.astype(np.float64)
    norms = np.sqrt(np.square(wide).sum(axis=1, keepdims=True))
    return np.asarray(wide / np.maximum(norms, _SMALLEST_NORM), dtype=np.float32)


def _activated(rows: NDArray[np.float32], activation: ScoreActivation) -> NDArray[np.float32]:
    wide = rows.astype(np.float64)
    match activation:
        case "none":
            return rows
        case "sigmoid":
            return np.asarray(_sigmoid(wide), dtype=np.float32)
        case "softmax":
            weights = np.exp(wide - wide.max(axis=1, keepdims=True))
            return np.asarray(weights / weights.sum(axis=1, keepdims=True), dtype=np.float32)


def _sigmoid(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Without overflow on either side."""
    tail = np.exp(-np.abs(x))
    return np.where(x >= 0, 1.0, tail) / (1.0 + tail)
