"""Whisper: an encoder of audio, run once for a window, and a decoder that attends to it.

features ── conv ── conv ──(+ positions)── layers ── norm ──┬── k, v of each decoder layer ── cache
                                                            └── (nothing else is kept)
tokens ──(+ positions)── [ attention · cross-attention · mlp ] … ── norm ── logits
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from octavo_engine.ops import AttentionSpec, CrossSpec, cross_queries

if TYPE_CHECKING:
    from octavo_engine.models.config import ModelConfig
    from octavo_engine.models.speech_config import SpeechConfig
    from octavo_engine.ops import Activation, CrossOps, Loader, ShiftOps, Value


class EncoderShape(Protocol):
    """What an encoder of audio is made by."""

    @property
    def hidden_size(self) -> int: ...

    @property
    def activation(self) -> Activation: ...

    @property
    def norm_eps(self) -> float: ...

    @property
    def speech(self) -> SpeechConfig | None: ...


class Whisper:
    """Token ids to logits, over what `encode` left of a window of audio."""

    def __init__(self, config: ModelConfig, loader: Loader, max_model_len: int) -> None:
        size = config.hidden_size
        self.encoder = WhisperEncoder(config, loader)
        self.embedding = loader.embedding("model.decoder.embed_tokens", config.vocab_size, size)
        self.positions = loader.embedding(
            "model.decoder.embed_positions", config.max_position_embeddings, size
        )
        self.layers = [DecoderLayer(config, loader, index) for index in range(config.num_layers)]
        self.norm = WhisperNorm(config, loader, "model.decoder.layer_norm")
        self.head = loader.tied(self.embedding)

    def encode(self, ops: CrossOps) -> Value:
        x = self.encoder.forward(ops, ops.features(self.encoder.columns))
        for layer in self.layers:
            layer.cross.store(ops, x)
        return x

    def forward(self, ops: CrossOps) -> Value:
        x = ops.add(ops.embedding(self.embedding), ops.table(self.positions, "positions"))
        for layer in self.layers:
            x = layer.forward(ops, x)
        return ops.linear(self.norm.forward(ops, ops.select_rows(x)), self.head)


class WhisperEncoder:
    """Frames of a log-mel spectrogram to hidden states."""

    def __init__(self, config: EncoderShape, loader: Loader, *, has_norm: bool = True) -> None:
        """`has_norm`: of its output."""
        speech, size = config.speech, config.hidden_size
        assert speech is not None, "the family reads it"
        prefix = "model.encoder"
        self.columns = speech.feature_columns
        self.even, self.odd = (
            loader.linear(f"{prefix}.conv1.{part}", self.columns, size, bias=True)
            for part in ("even", "odd")
        )
        self.from_even, self.from_odd, self.from_previous = (
            loader.linear(f"{prefix}.conv2.{part}", size, size, bias=part == "even")
            for part in ("even", "odd", "previous")
        )
        self.positions = loader.embedding(f"{prefix}.embed_positions", speech.num_rows, size)
        self.layers = [EncoderLayer(config, loader, index) for index in range(speech.num_layers)]
        self.norm = WhisperNorm(config, loader, f"{prefix}.layer_norm") if has_norm else None

    def forward(self, ops: ShiftOps, frames: Value) -> Value:
        even = ops.activation(ops.linear(frames, self.even), "gelu")
        odd = ops.activation(ops.linear(frames, self.odd), "gelu")
        x = ops.linear(even, self.from_even)
        x = ops.add(x, ops.linear(odd, self.from_odd))
        x = ops.add(x, ops.linear(ops.shift_rows(odd), self.from_previous))
        x = ops.add(ops.activation(x, "gelu"), ops.table(self.positions, "positions"))
        for layer in self.layers:
            x = layer.forward(ops, x)
        return x if self.norm is None else self.norm.forward(ops, x)


class EncoderLayer:
    """Attention to the whole window, then an MLP, each normed before."""

    def __init__(self, config: EncoderShape, loader: Loader, index: int) -> None:
        speech = config.speech
        assert speech is not None, "the family reads it"
        prefix = f"model.encoder.layers.{index}"
        self.attention = SelfAttention(
            config, loader, prefix, index, speech.num_heads, is_causal=False
        )
        self.mlp = WhisperMlp(config, loader, prefix, speech.intermediate_size)

    def forward(self, ops: ShiftOps, x: Value) -> Value:
        return self.mlp.forward(ops, self.attention.forward(ops, x))


class DecoderLayer:
    """Attention to the tokens so far, attention to the audio, and an MLP."""

    def __init__(self, config: ModelConfig, loader: Loader, index: int) -> None:
        prefix = f"model.decoder.layers.{index}"
        self.attention = SelfAttention(
            config, loader, prefix, index, config.num_heads, is_causal=True
        )
        self.cross = CrossAttention(config, loader, prefix, index)
        self.mlp = WhisperMlp(config, loader, prefix, config.intermediate_size)

    def forward(self, ops: CrossOps, x: Value) -> Value:
        x = self.attention.forward(ops, x)
        return self.mlp.forward(ops, self.cross.forward(ops, x))


class SelfAttention:
    """x + o · attention(norm(x)), causal over the cache or over all that is in the step."""

    def __init__(
        self,
        config: EncoderShape,
        loader: Loader,
        prefix: str,
        index: int,
        num_heads: int,
        *,
        is_causal: bool,
    ) -> None:
        size = config.hidden_size
        self.norm = WhisperNorm(config, loader, f"{prefix}.self_attn_layer_norm")
        self.qkv = loader.linear(
            [f"{prefix}.self_attn.{part}_proj" for part in "qkv"], size, [size] * 3, bias=True
        )
        self.output = loader.linear(f"{prefix}.self_attn.out_proj", size, size, bias=True)
        self.spec = AttentionSpec(
            layer=index,
            num_heads=num_heads,
            num_kv_heads=num_heads,
            head_dim=size // num_heads,
            scale=(size // num_heads) ** -0.5,
            is_causal=is_causal,
        )

    def forward(self, ops: ShiftOps, x: Value) -> Value:
        qkv = ops.linear(self.norm.forward(ops, x), self.qkv)
        attend = ops.attention if self.spec.is_causal else ops.encoder_attention
        return ops.add(x, ops.linear(attend(qkv, self.spec), self.output))


class CrossAttention:
    """x + o · attention(norm(x)) over the keys and values that `store` made of the encoder's."""

    def __init__(self, config: ModelConfig, loader: Loader, prefix: str, index: int) -> None:
        speech, size = config.speech, config.hidden_size
        assert speech is not None, "the family reads it"
        self.norm = WhisperNorm(config, loader, f"{prefix}.encoder_attn_layer_norm")
        self.query = loader.linear(f"{prefix}.encoder_attn.q_proj", size, size, bias=True)
        self.key_value = loader.linear(
            [f"{prefix}.encoder_attn.{part}_proj" for part in "kv"], size, [size] * 2, bias=True
        )
        self.output = loader.linear(f"{prefix}.encoder_attn.out_proj", size, size, bias=True)
        self.spec = CrossSpec(
            layer=index,
            num_heads=config.num_heads,
            head_dim=config.head_dim,
            length=speech.num_rows,
            scale=config.attention_scale,
        )

    def store(self, ops: CrossOps, x: Value) -> None:
        ops.store_cross(ops.linear(x, self.key_value), self.spec)

    def forward(self, ops: CrossOps, x: Value) -> Value:
        q = ops.linear(self.norm.forward(ops, x), self.query)
        q = ops.keep(cross_queries(self.spec.layer), q)
        return ops.add(x, ops.linear(ops.cross_attention(q, self.spec), self.output))


class WhisperMlp:
    """x + down · activation(up · norm(x))."""

    def __init__(self, config: EncoderShape, loader: Loader, prefix: str, width: int) -> None:
        size = config.hidden_size
        self.norm = WhisperNorm(config, loader, f"{prefix}.final_layer_norm")
        self.up = loader.linear(f"{prefix}.fc1", size, width, bias=True)
        self.down = loader.linear(f"{prefix}.fc2", width, size, bias=True)
        self.activation = config.activation

    def forward(self, ops: ShiftOps, x: Value) -> Value:
        h = ops.linear(self.norm.forward(ops, x), self.up)
        return ops.add(x, ops.linear(ops.activation(h, self.activation), self.down))


class WhisperNorm:
    """A layer norm with its weights."""

    def __init__(self, config: EncoderShape, loader: Loader, name: str) -> None:
        self.weight = loader.vector(f"{name}.weight", config.hidden_size)
        self.bias = loader.vector(f"{name}.bias", config.hidden_size)
        self.eps = config.norm_eps

    def forward(self, ops: ShiftOps, x: Value) -> Value:
        return ops.layer_norm(x, self.weight, self.bias, self.eps)
