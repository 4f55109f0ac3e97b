"""The shape of an encoder of audio, read from config.json, and the sizes of what it is given."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

    from octavo_engine.models.block import BlockConfig
    from octavo_engine.models.fields import ConfigFields

MAX_MELS = 1024
MAX_ROWS = 1 << 14
MAX_ENCODER_LAYERS = 1024
MAX_FEATURE_WIDTH = 1 << 20

FRAMES_PER_ROW = 4  # that a row of features covers: two of its own and one on either side


class SpeechConfig(NamedTuple):
    """The encoder's shape; its hidden size is the decoder's."""

    num_mels: int
    num_rows: int  # of hidden states: one for two frames of a window
    num_layers: int
    num_heads: int
    intermediate_size: int

    @property
    def num_frames(self) -> int:
        """Of a window, in hundredths of a second."""
        return 2 * self.num_rows

    @property
    def feature_columns(self) -> int:
        return FRAMES_PER_ROW * self.num_mels


def read_speech(fields: ConfigFields, block: BlockConfig) -> Mapping[str, Any]:
    """Raises ModelError that names the field."""
    if fields.boolean("scale_embedding"):
        raise fields.error("scale_embedding", "must be false")
    hidden = fields.integer("d_model", maximum=MAX_FEATURE_WIDTH)
    heads = fields.integer("encoder_attention_heads", maximum=4096)
    if hidden % heads:
        raise fields.error("encoder_attention_heads", f"must divide d_model, {hidden}")
    speech = SpeechConfig(
        num_mels=fields.integer("num_mel_bins", maximum=MAX_MELS),
        num_rows=fields.integer("max_source_positions", maximum=MAX_ROWS),
        num_layers=fields.integer("encoder_layers", maximum=MAX_ENCODER_LAYERS),
        num_heads=heads,
        intermediate_size=fields.integer("encoder_ffn_dim", maximum=MAX_FEATURE_WIDTH),
    )
    return {"speech": speech}
