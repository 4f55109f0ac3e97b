"""Towers that hear: Whisper's encoder, whose rows a projector makes rows of a language model's
input."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from octavo_engine.models.speech_config import SpeechConfig
from octavo_engine.models.vision import VisionTower
from octavo_engine.models.whisper import WhisperEncoder

if TYPE_CHECKING:
    from octavo_engine.models.vision_config import MediaConfig, VisionConfig
    from octavo_engine.ops import Activation, Loader, Value, Vector, VisionOps


class _Shape(NamedTuple):
    """As Whisper's page wants it."""

    hidden_size: int
    activation: Activation
    norm_eps: float
    speech: SpeechConfig


class HearingTower:
    """Rows of a spectrogram to hidden states, without the norm, which is of their means."""

    stretched: Vector | None = None  # positions are those of a table

    def __init__(self, config: VisionConfig, loader: Loader) -> None:
        assert config.activation != "quick_gelu", "the family reads it"
        speech = SpeechConfig(
            num_mels=config.num_mels,
            num_rows=config.num_tokens,
            num_layers=config.num_layers,
            num_heads=config.num_heads,
            intermediate_size=config.intermediate_size,
        )
        shape = _Shape(config.hidden_size, config.activation, config.norm_eps, speech)
        self.encoder = WhisperEncoder(shape, loader, has_norm=False)

    def forward(self, ops: VisionOps) -> Value:
        return self.encoder.forward(ops, ops.input(self.encoder.columns))


def media_tower(config: MediaConfig, loader: Loader) -> VisionTower | HearingTower:
    kind = HearingTower if config.kind == "audio" else VisionTower
    return kind(config.vision, loader)
