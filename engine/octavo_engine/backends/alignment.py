"""How much heads of a decoder attend to each row of a window of audio."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray


def aligned_attention(
    heads: Sequence[tuple[int, int]],
    queries: Callable[[int], NDArray[np.float32]],
    keys: Callable[[int], NDArray[np.float32]],
    scale: float,
) -> NDArray[np.float32]:
    """[tokens, heads, rows]: softmax weights of (layer, head) pairs. `queries` of a layer are
    [tokens, all heads' columns], `keys` are [heads, rows, columns]."""
    found = []
    of_layer: dict[int, tuple[NDArray[np.float32], NDArray[np.float32]]] = {}
    for layer, head in heads:
        if layer not in of_layer:
            of_layer[layer] = queries(layer), keys(layer)
        q, k = of_layer[layer]
        size = k.shape[2]
        scores = q[:, head * size : (head + 1) * size] @ k[head].T * np.float32(scale)
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        found.append(weights / weights.sum(axis=1, keepdims=True))
    return np.stack(found, axis=1)
