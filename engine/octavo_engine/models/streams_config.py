"""A residual of several streams, and what else of Gemma 3n its config.json says."""

from __future__ import annotations

from statistics import NormalDist
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

    from octavo_engine.models.block import BlockConfig
    from octavo_engine.models.fields import ConfigFields

MAX_STREAMS = 16
MAX_SIZE = 1 << 20
MAX_LAYERS = 1024
MAX_VOCABULARY = 1 << 22


class StreamsConfig(NamedTuple):
    """Streams that take turns: a layer computes the active one, and what it adds corrects all."""

    num_streams: int
    active: int
    scales_active: bool  # by a weight, for the gate of the layer's own embeddings
    layer_columns: int  # of a token's embedding for each layer
    layer_vocabulary: int  # tokens that have one; others have the first one's
    rank: int  # of the addition beside attention
    widths: tuple[int, ...]  # of each layer's MLP
    # Of each layer: gates so many standard deviations above their mean are kept; None: all are.
    deviations: tuple[float | None, ...]


def read_gemma3n(fields: ConfigFields, block: BlockConfig) -> Mapping[str, Any]:
    num_layers = fields.integer("num_hidden_layers", maximum=MAX_LAYERS)
    num_streams = fields.integer("altup_num_inputs", minimum=2, maximum=MAX_STREAMS)
    widths = fields.integers("intermediate_size", maximum=MAX_SIZE)
    if len(widths) not in (1, num_layers) or 0 in widths:
        raise fields.error("intermediate_size", f"must be one size, or {num_layers}, above 0")
    streams = StreamsConfig(
        num_streams=num_streams,
        active=fields.integer("altup_active_idx", minimum=0, maximum=num_streams - 1),
        scales_active=fields.boolean("altup_correct_scale"),
        layer_columns=fields.integer("hidden_size_per_layer_input", maximum=MAX_SIZE),
        layer_vocabulary=fields.integer("vocab_size_per_layer_input", maximum=MAX_VOCABULARY),
        rank=fields.integer("laurel_rank", maximum=MAX_SIZE),
        widths=widths if len(widths) == num_layers else widths * num_layers,
        deviations=_deviations(fields, num_layers),
    )
    return {"streams": streams, "readers": _readers(fields, num_layers)}


def _deviations(fields: ConfigFields, num_layers: int) -> tuple[float | None, ...]:
    """From the share of gates that become zero, were they normally distributed."""
    given = fields.raw("activation_sparsity_pattern")
    if given is None:
        count = 10 if num_layers > 10 else 0
        given = [0.95] * count + [0.0] * (num_layers - count)
    shares = given if isinstance(given, list) else [given] * num_layers
    if len(shares) != num_layers or not all(
        isinstance(share, int | float) and not isinstance(share, bool) and 0 <= share < 1
        for share in shares
    ):
        raise fields.error(
            "activation_sparsity_pattern", f"must hold {num_layers} numbers from 0, below 1"
        )
    return tuple(NormalDist().inv_cdf(share) if share else None for share in shares)


def _readers(fields: ConfigFields, num_layers: int) -> dict[int, int]:
    """Of the last layers, which attend to what earlier ones cached: the last of the same kind that
    has keys and values of its own."""
    count = fields.integer("num_kv_shared_layers", minimum=0, maximum=MAX_LAYERS)
    if count >= num_layers:
        raise fields.error("num_kv_shared_layers", f"must be below {num_layers}, the layers")
    kinds = fields.per_layer("layer_types", num_layers)
    if kinds is None:
        every = fields.integer("sliding_window_pattern", maximum=MAX_LAYERS)
        kinds = [(index + 1) % every != 0 for index in range(num_layers)]
    first = num_layers - count
    last_of = {kind: index for index, kind in enumerate(kinds[:first])}
    readers = {}
    for index in range(first, num_layers):
        if kinds[index] not in last_of:
            raise fields.error(
                "num_kv_shared_layers", f"leaves layer {index} no earlier one of its kind to read"
            )
        readers[index] = last_of[kinds[index]]
    return readers
