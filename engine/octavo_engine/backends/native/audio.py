"""The encoder of audio as a second program on the CPU, and the cache that decoders attend to.

A slot of the cache has the keys and values of one window in every decoder layer. The program can
run in parts, so that the sequences that decode meanwhile need not wait for a whole window.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, cast

import numpy as np

from octavo_engine import _native
from octavo_engine.backends.backend import BackendLimits
from octavo_engine.backends.encoder_step import encoder_step
from octavo_engine.backends.native.compiled import compile_forward
from octavo_engine.caches import KVSpec
from octavo_engine.config import BLOCK_SIZE
from octavo_engine.errors import ConfigError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from octavo_engine.backends.native.graph import Value
    from octavo_engine.backends.native.kv_format import KVFormat
    from octavo_engine.backends.native.recorder import Recorder
    from octavo_engine.models.config import ModelConfig
    from octavo_engine.ops import CrossOps, EncoderDecoder


def feature_shape(config: ModelConfig) -> tuple[int, int] | None:
    """Rows and columns of a window's features."""
    speech = config.speech
    return None if speech is None else (speech.num_rows, speech.feature_columns)


def slot_bytes(config: ModelConfig, kv_format: KVFormat) -> int:
    if config.speech is None:
        return 0
    layer = kv_format.bytes_of(KVSpec(config.num_heads, config.head_dim))
    return _slot_blocks(config) * config.num_layers * layer


def _slot_blocks(config: ModelConfig) -> int:
    assert config.speech is not None, "the model reads audio"
    return -(-config.speech.num_rows // BLOCK_SIZE)


class NativeAudio:
    """A compiled encoder and `cache`, which programs of the decoder read."""

    def __init__(
        self,
        config: ModelConfig,
        model: EncoderDecoder,
        team: _native.Team,
        num_slots: int,
        kv_format: KVFormat,
        *,
        is_fused: bool,
        activation_bits: int,
    ) -> None:
        speech = config.speech
        assert speech is not None, "the model reads audio"
        limits = BackendLimits(
            max_tokens=speech.num_rows,
            max_seqs=1,
            max_logit_rows=1,
            max_model_len=speech.num_rows,
        )

        def encode(recorder: Recorder) -> Value:
            return cast("Value", model.encode(cast("CrossOps", recorder)))

        self._blocks = blocks = _slot_blocks(config)
        decoder_layers = [
            (0, index, config.num_heads, config.head_dim) for index in range(config.num_layers)
        ]
        heads = speech.num_heads
        # Of one layer at a time, as nothing of it is kept.
        own_layer = (0, 0, heads, config.hidden_size // heads)
        try:
            self._program = compile_forward(
                encode, team, limits, is_fused=is_fused, activation_bits=activation_bits
            ).program
            self._kv = _native.KVCache(
                blocks, [own_layer], [0], "bf16" if kv_format.element_bytes < 4 else "f32"
            )
            self._make_cache = partial(
                _native.KVCache, num_slots * blocks, decoder_layers, [0], kv_format.name
            )
            self.cache: _native.KVCache | None = self._make_cache()
        except MemoryError as error:
            raise ConfigError(
                f"no memory for {num_slots} windows of audio; lower --max-num-seqs"
            ) from error
        self._step = encoder_step(speech.num_rows)

    def release(self) -> None:
        """Give the memory of all windows back."""
        self.cache = None

    def restore(self) -> None:
        """Have room for windows again; there are none."""
        if self.cache is None:
            self.cache = self._make_cache()

    def keys(self, slot: int, layer: int, num_rows: int) -> NDArray[np.float32]:
        """[heads, rows, head_dim] of a layer, of the first rows of a window."""
        assert self.cache is not None, "it was released"
        first = slot * self._blocks
        parts = [
            self.cache.read(layer, block)[0]
            for block in range(first, first - (-num_rows // BLOCK_SIZE))
        ]
        return np.concatenate(parts, axis=1)[:, :num_rows]

    def encode(self, slot: int, features: NDArray[np.float32], part: int, num_parts: int) -> None:
        """As `EncodesAudio.encode_audio`."""
        count = self._program.num_instructions
        step = self._step
        self._program.run(
            self._kv,
            *step.native_arrays,
            cross=self.cache,
            cross_slots=np.array([slot], np.int32),
            features=features,
            first_instruction=count * part // num_parts,
            end_instruction=count * (part + 1) // num_parts,
        )
