"""Gemma 3n's text part: a residual of several streams, of which each layer computes one.

          ┌── low rank ──┐
s ── mix ── norm ── attention ── norm ──(+)── norm ── mlp ── norm ──(+)── correct all ──(+)── s
      └─────────────────────────────────┘ └─────────────────────────┘                     │
                                              the layer's own embedding of the token ── gate

The last layers have no keys and values: they attend to those of an earlier layer.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, cast

from octavo_engine.models.layers import OutputHead, Ropes
from octavo_engine.ops import AttentionSpec, layer_output

if TYPE_CHECKING:
    from octavo_engine.models.config import ModelConfig
    from octavo_engine.models.streams_config import StreamsConfig
    from octavo_engine.ops import Loader, Ops, StreamOps, Value, Vector

SMALLEST_SQUARE = 1e-5  # of a stream's mean square, where its size is matched to another's


def streams_of(config: ModelConfig) -> StreamsConfig:
    assert config.streams is not None, "the family has them"
    return config.streams


class Gemma3n:
    """Token ids to logits."""

    def __init__(self, config: ModelConfig, loader: Loader, max_model_len: int) -> None:
        ropes, size = Ropes(max_model_len), config.hidden_size
        self.config, self.streams = config, streams_of(config)
        self.embedding = loader.embedding("model.embed_tokens", config.vocab_size, size)
        self.own_embeddings = OwnEmbeddings(config, loader)
        others = range(self.streams.num_streams - 1)
        self.spread = [loader.linear(f"model.altup_projections.{i}", size, size) for i in others]
        self.gather = [
            loader.linear(f"model.altup_unembed_projections.{i}", size, size) for i in others
        ]
        self.layers: list[Gemma3nLayer] = []
        for index in range(config.num_layers):
            read = config.layers[index].reads
            source = None if read is None else self.layers[read].attention
            attention = SharingAttention(config, loader, index, ropes, source)
            self.layers.append(Gemma3nLayer(config, loader, index, attention))
        self.norm = loader.vector("model.norm.weight", size)
        self.head = OutputHead(config, loader, self.embedding)

    def forward(self, ops: Ops) -> Value:
        ops = cast("StreamOps", ops)
        x = ops.embedding(self.embedding, scale=self.config.embedding_scale)
        own = self.own_embeddings.forward(ops, x)
        spread = [ops.match_rms(ops.linear(x, w), x, SMALLEST_SQUARE) for w in self.spread]
        s = functools.reduce(ops.join, spread, x)
        kept: dict[int, Value] = {}
        columns = self.streams.layer_columns
        for index, layer in enumerate(self.layers):
            s = layer.forward(ops, s, ops.columns(own, index * columns, columns), kept)
            s = ops.keep(layer_output(index), s)
        return self.head.forward(ops, self._gathered(ops, ops.select_rows(s)))

    def _gathered(self, ops: StreamOps, s: Value) -> Value:
        """The mean of all streams, brought to the size of the first; normed."""
        size = self.config.hidden_size
        first = ops.columns(s, 0, size)
        total = first
        for index, weight in enumerate(self.gather):
            other = ops.linear(ops.columns(s, (index + 1) * size, size), weight)
            total = ops.add(total, ops.match_rms(other, first, SMALLEST_SQUARE))
        mean = ops.scale(total, 1.0 / self.streams.num_streams)
        return ops.rms_norm(mean, self.norm, self.config.norm_eps)


class OwnEmbeddings:
    """A token's embedding for each layer: looked up, and projected from the one of all."""

    def __init__(self, config: ModelConfig, loader: Loader) -> None:
        self.config, self.streams = config, streams_of(config)
        columns = self.streams.layer_columns * config.num_layers
        rows = max(self.streams.layer_vocabulary, config.vocab_size)
        self.table = loader.embedding("model.embed_tokens_per_layer", rows, columns)
        self.projection = loader.linear(
            "model.per_layer_model_projection", config.hidden_size, columns
        )
        self.norm = loader.vector(
            "model.per_layer_projection_norm.weight", self.streams.layer_columns
        )

    def forward(self, ops: StreamOps, x: Value) -> Value:
        """Those of all layers side by side."""
        columns = self.streams.layer_columns
        projected = ops.scale(ops.linear(x, self.projection), self.config.hidden_size**-0.5)
        projected = ops.group_norm(projected, self.norm, self.config.norm_eps, columns)
        looked_up = ops.embedding(self.table, scale=columns**0.5)
        return ops.scale(ops.add(projected, looked_up), math.sqrt(0.5))


class Gemma3nLayer:
    """Predicts all streams, computes the active one, corrects all by what came of it."""

    def __init__(
        self, config: ModelConfig, loader: Loader, index: int, attention: SharingAttention
    ) -> None:
        prefix, size = f"model.layers.{index}", config.hidden_size

        def norm(name: str) -> Vector:
            return loader.vector(f"{prefix}.{name}.weight", size)

        self.eps = config.norm_eps
        self.exchange = StreamExchange(config, loader, index)
        self.before_attention = norm("input_layernorm")
        self.attention = attention
        self.after_attention = norm("post_attention_layernorm")
        self.before_mlp = norm("pre_feedforward_layernorm")
        self.mlp = SparseMlp(config, loader, index)
        self.after_mlp = norm("post_feedforward_layernorm")
        rank = streams_of(config).rank
        self.narrow = loader.linear(f"{prefix}.laurel.linear_left", size, rank)
        self.widen = loader.linear(f"{prefix}.laurel.linear_right", rank, size)
        self.after_widening = norm("laurel.post_laurel_norm")

    def forward(self, ops: StreamOps, s: Value, own: Value, kept: dict[int, Value]) -> Value:
        predicted = self.exchange.predict(ops, s)
        x = self.exchange.active(ops, predicted)
        normed = ops.rms_norm(x, self.before_attention, self.eps)
        low_rank = ops.linear(ops.linear(normed, self.narrow), self.widen)
        beside = ops.add(normed, ops.rms_norm(low_rank, self.after_widening, self.eps))
        h = self.attention.forward(ops, normed, kept)
        x = ops.add(x, ops.rms_norm(h, self.after_attention, self.eps))
        x = ops.scale(ops.add(x, beside), math.sqrt(0.5))
        h = self.mlp.forward(ops, ops.rms_norm(x, self.before_mlp, self.eps))
        x = ops.add(x, ops.rms_norm(h, self.after_mlp, self.eps))
        return self.exchange.correct(ops, predicted, x, own)


class StreamExchange:
    """How the streams are mixed before a layer, and corrected behind it."""

    def __init__(self, config: ModelConfig, loader: Loader, index: int) -> None:
        prefix, size = f"model.layers.{index}", config.hidden_size
        self.size, self.eps, self.activation = size, config.norm_eps, config.activation
        self.streams = streams = streams_of(config)
        count = streams.num_streams
        self.norm = loader.vector(f"{prefix}.altup.router_norm.weight", size)
        self.router = loader.linear(f"{prefix}.altup.modality_router", size, count)
        self.prediction = loader.linear(f"{prefix}.altup.prediction_coefs", count, count * count)
        self.correction = loader.linear(f"{prefix}.altup.correction_coefs", count, count)
        self.scale = None
        if streams.scales_active:
            self.scale = loader.vector(f"{prefix}.altup.correct_output_scale", size)
        self.gate = loader.linear(f"{prefix}.per_layer_input_gate", size, streams.layer_columns)
        self.projection = loader.linear(
            f"{prefix}.per_layer_projection", streams.layer_columns, size
        )
        self.after_projection = loader.vector(f"{prefix}.post_per_layer_input_norm.weight", size)

    def active(self, ops: StreamOps, s: Value) -> Value:
        return ops.columns(s, self.streams.active * self.size, self.size)

    def predict(self, ops: StreamOps, s: Value) -> Value:
        weights = ops.linear(self._routed(ops, self.active(ops, s)), self.prediction)
        return ops.add(s, ops.mix(s, weights, self.streams.num_streams))

    def correct(self, ops: StreamOps, predicted: Value, x: Value, own: Value) -> Value:
        """By what the layer made of the active stream; all but the first get the layer's own
        embedding of the token besides."""
        weights = ops.linear(self._routed(ops, x), self.correction)
        change = ops.add(x, self.active(ops, predicted), scale=-1.0)
        s = ops.add(predicted, ops.mix(change, weights, 1, offset=1.0))
        h = self.active(ops, s)
        h = h if self.scale is None else ops.scale_columns(h, self.scale)
        h = ops.multiply(own, ops.linear(h, self.gate), self.activation)
        h = ops.rms_norm(ops.linear(h, self.projection), self.after_projection, self.eps)
        first = ops.columns(s, 0, self.size)
        others = ops.columns(s, self.size, (self.streams.num_streams - 1) * self.size)
        repeated = functools.reduce(ops.join, [h] * (self.streams.num_streams - 1))
        return ops.join(first, ops.add(others, repeated))

    def _routed(self, ops: StreamOps, x: Value) -> Value:
        x = ops.scale(ops.rms_norm(x, self.norm, self.eps), 1.0 / self.size)
        return ops.activation(ops.linear(x, self.router), "tanh")


class SharingAttention:
    """Attention over keys and values of its own, or those of an earlier layer. Those are written
    where they lie a second time, the same bits: so a cache's memory is that layer's alone."""

    def __init__(
        self, config: ModelConfig, loader: Loader, index: int, ropes: Ropes,
        source: SharingAttention | None,
    ) -> None:  # fmt: skip
        prefix = f"model.layers.{index}.self_attn"
        size, dim, bias = config.hidden_size, config.head_dim, config.qkv_bias
        self.q_size, self.kv_size = config.num_heads * dim, config.num_kv_heads * dim
        self.source, self.dim, self.eps = source, dim, config.norm_eps
        names, sizes = [f"{prefix}.q_proj"], [self.q_size]
        if source is None:
            names += [f"{prefix}.k_proj", f"{prefix}.v_proj"]
            sizes += [self.kv_size, self.kv_size]
            k_norm = loader.vector(f"{prefix}.k_norm.weight", dim)
            self.v_norm = loader.vector(f"{prefix}.v_norm.weight", dim)  # ones: there is no weight
        else:
            k_norm = source.spec.k_norm
        self.qkv = loader.linear(names, size, sizes, bias=bias)
        self.output = loader.linear(f"{prefix}.o_proj", self.q_size, size, bias=config.output_bias)
        layer = config.layers[index]
        self.spec: AttentionSpec = AttentionSpec(
            layer=config.cache_index(index),
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=dim,
            scale=config.attention_scale,
            rope=ropes.get(layer.rope),
            window=layer.window,
            q_norm=loader.vector(f"{prefix}.q_norm.weight", dim),
            k_norm=k_norm,
            norm_eps=config.norm_eps,
        )

    def forward(self, ops: StreamOps, x: Value, kept: dict[int, Value]) -> Value:
        """`kept`: by the cache's layer, keys before their norm and values behind theirs."""
        projected = ops.linear(x, self.qkv)
        if self.source is None:
            values = ops.columns(projected, self.q_size + self.kv_size, self.kv_size)
            values = ops.group_norm(values, self.v_norm, self.eps, self.dim)
            keys = ops.columns(projected, self.q_size, self.kv_size)
            kept[self.spec.layer] = ops.join(keys, values)
            projected = ops.columns(projected, 0, self.q_size)
        qkv = ops.join(projected, kept[self.spec.layer])
        return ops.linear(ops.attention(qkv, self.spec), self.output)


class SparseMlp:
    """A gated MLP of the layer's own width, of which some layers keep the highest gates only."""

    def __init__(self, config: ModelConfig, loader: Loader, index: int) -> None:
        streams, size, bias = streams_of(config), config.hidden_size, config.mlp_bias
        prefix, width = f"model.layers.{index}.mlp", streams.widths[index]
        self.deviations, self.activation = streams.deviations[index], config.activation
        self.width = width
        self.gate_up = loader.linear(
            [f"{prefix}.gate_proj", f"{prefix}.up_proj"], size, [width, width], bias=bias
        )
        self.down = loader.linear(f"{prefix}.down_proj", width, size, bias=bias)

    def forward(self, ops: StreamOps, x: Value) -> Value:
        both = ops.linear(x, self.gate_up)
        if self.deviations is None:
            return ops.linear(ops.glu(both, self.activation), self.down)
        gate = ops.sparsify(ops.columns(both, 0, self.width), self.deviations)
        up = ops.columns(both, self.width, self.width)
        return ops.linear(ops.multiply(up, gate, self.activation), self.down)
