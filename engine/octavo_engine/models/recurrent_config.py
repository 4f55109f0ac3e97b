"""The layers of a model that are not attention, as families' config.json say them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

from octavo_engine.caches import StateSpec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from octavo_engine.models.block import BlockConfig
    from octavo_engine.models.fields import ConfigFields

# What mixes the tokens in a layer; both: attention and the recurrent one side by side.
Mixer = Literal["attention", "conv", "mamba2", "delta", "both", "none"]

MAX_KERNEL = 16  # the extension's own bounds
MAX_SIZE = 1 << 20


class ConvConfig(NamedTuple):
    """A short convolution between two gates, as wide as the model."""

    kernel: int
    bias: bool

    def state(self, hidden_size: int) -> StateSpec:
        return StateSpec((self.kernel - 1, hidden_size))


RecurrentConfig: TypeAlias = ConvConfig


def read_lfm2(fields: ConfigFields, block: BlockConfig) -> Mapping[str, Any]:
    num_layers = fields.integer("num_hidden_layers", maximum=1024)
    if fields.raw("layer_types") is None and fields.raw("full_attn_idxs") is not None:
        attended = fields.integers("full_attn_idxs", maximum=1024)
        mixers: list[Mixer] = ["attention" if i in attended else "conv" for i in range(num_layers)]
    else:
        mixers = _mixers(fields, num_layers, {"full_attention": "attention", "conv": "conv"})
    width = fields.integer("intermediate_size", maximum=MAX_SIZE)
    if fields.boolean("block_auto_adjust_ff_dim"):
        multiple = fields.integer("block_multiple_of", maximum=MAX_SIZE)
        width = int(2 * width / 3)
        factor = fields.optional_positive("block_ffn_dim_multiplier")
        if factor is not None:
            width = -(-int(factor * width) // multiple) * multiple
    kernel = fields.integer("conv_L_cache", minimum=2, maximum=MAX_KERNEL)
    return {
        "intermediate_size": width,
        "mixers": mixers,
        "recurrent": ConvConfig(kernel, fields.boolean("conv_bias")),
    }


def _mixers(fields: ConfigFields, num_layers: int, known: Mapping[str, Mixer]) -> list[Mixer]:
    """Of each layer, by the names in `layer_types`; without them all are attention."""
    given = fields.per_layer("layer_types", num_layers)
    if given is None:
        return ["attention"] * num_layers
    if any(entry not in known for entry in given):
        raise fields.error("layer_types", f"must hold {' and '.join(known)} only")
    return [known[entry] for entry in given]
