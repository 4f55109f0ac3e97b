"""A draft model, or a head with layers, beside the model that it drafts for: its layers lie behind
the model's in the cache."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

from octavo_engine.caches import group_layers

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from octavo_engine.caches import CacheLayout
    from octavo_engine.config import Quantization
    from octavo_engine.models.config import ModelConfig
    from octavo_engine.models.draft_head import DraftHeadConfig
    from octavo_engine.ops import (
        AttentionSpec,
        Heads,
        LatentAttentionSpec,
        LatentOps,
        Model,
        Ops,
        Value,
    )
    from octavo_engine.weights.checkpoint import Checkpoint


_Spec = TypeVar("_Spec", "AttentionSpec", "LatentAttentionSpec")


class DraftPart(NamedTuple):
    """What a backend loads a draft model from."""

    config: ModelConfig
    checkpoint: Checkpoint
    quantization: Quantization = "auto"


class DraftHeadPart(NamedTuple):
    """What a backend loads a head with layers from."""

    config: DraftHeadConfig
    checkpoint: Checkpoint
    token_ids: NDArray[np.int32] | None = None  # that it has logits for; None: all
    quantization: Quantization = "auto"

    @property
    def vocab_size(self) -> int:
        """The model's."""
        return self.config.model.vocab_size


class LaterLayers:
    """Ops for a model whose layers are not the first ones of the cache.

    What writes to a cache must be named here, or a draft layer takes the place of the model's own.
    """

    def __init__(self, ops: Ops, first_layer: int) -> None:
        self._ops = ops
        self._first_layer = first_layer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def attention(self, qkv: Value, spec: AttentionSpec) -> Value:
        return self._ops.attention(qkv, self._moved(spec))

    def latent_attention(
        self, q: Value, kv: Value, key_up: Heads, value_up: Heads, spec: LatentAttentionSpec
    ) -> Value:
        ops = cast("LatentOps", self._ops)
        return ops.latent_attention(q, kv, key_up, value_up, self._moved(spec))

    def _moved(self, spec: _Spec) -> _Spec:
        return dataclasses.replace(spec, layer=self._first_layer + spec.layer)


def forward_later(model: Model, ops: Ops, first_layer: int) -> Value:
    """The logits of a model whose first layer is layer `first_layer` of the cache."""
    return model.forward(cast("Ops", LaterLayers(ops, first_layer)))


def layout_with(
    config: ModelConfig, draft: DraftPart | None, draft_head: DraftHeadPart | None = None
) -> CacheLayout:
    """Of the model's layers, and behind them those of its draft model or head."""
    own = draft.config if draft else draft_head.config.layers if draft_head else None
    return group_layers([*config.caches(), *(own.caches() if own else ())])
