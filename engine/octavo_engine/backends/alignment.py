"""Heads of a decoder that follow the sound, and how much they attend to each row of a window."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from octavo_engine.models.config import ModelConfig
    from octavo_engine.weights.source import ModelFiles


def alignment_heads(files: ModelFiles, model: ModelConfig) -> tuple[tuple[int, int], ...]:
    """Layers and heads of the decoder that follow the sound, as the model's makers say in
    generation_config.json; else all of the latter half. None where the model reads no audio."""
    if model.speech is None:
        return ()
    given = (files.generation_config or {}).get("alignment_heads")
    if isinstance(given, list) and given:
        heads = [tuple(pair) for pair in given if isinstance(pair, list) and len(pair) == 2]
        known = [
            (layer, head)
            for layer, head in heads
            if layer in range(model.num_layers) and head in range(model.num_heads)
        ]
        if len(known) == len(given):
            return tuple(known)
    layers = range(model.num_layers // 2, model.num_layers)
    return tuple((layer, head) for layer in layers for head in range(model.num_heads))


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
