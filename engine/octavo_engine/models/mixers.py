"""What mixes a layer's tokens where it is not attention: parts that remember by a state."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from octavo_engine.models.recurrent_config import ConvConfig
from octavo_engine.ops import ConvSpec

if TYPE_CHECKING:
    from octavo_engine.models.config import ModelConfig
    from octavo_engine.ops import Loader, Ops, RecurrentLoader, RecurrentOps, Value, Vector


class GatedConv:
    """out(c * convolution(b * x)), where b, c and x come from one projection."""

    def __init__(self, config: ModelConfig, loader: Loader, index: int) -> None:
        conv = config.recurrent
        assert isinstance(conv, ConvConfig), "the layer is such a convolution"
        prefix = f"model.layers.{index}.conv"
        size = self.size = config.hidden_size
        self.input = loader.linear(f"{prefix}.in_proj", size, 3 * size, bias=conv.bias)
        self.output = loader.linear(f"{prefix}.out_proj", size, size, bias=conv.bias)
        self.spec = ConvSpec(
            layer=config.cache_index(index),
            kernel=conv.kernel,
            weight=cast("RecurrentLoader", loader).array(
                f"{prefix}.conv.weight", (size, 1, conv.kernel)
            ),
            bias=loader.vector(f"{prefix}.conv.bias", size) if conv.bias else None,
        )

    def forward(self, ops: Ops, x: Value) -> Value:
        ops = cast("RecurrentOps", ops)
        parts = ops.linear(x, self.input)
        b, c, x = (ops.columns(parts, place * self.size, self.size) for place in range(3))
        x = ops.short_conv(ops.multiply(b, x), self.spec)
        return ops.linear(ops.multiply(c, x), self.output)


def _array(loader: Loader, name: str, shape: tuple[int, ...]) -> Vector:
    return cast("RecurrentLoader", loader).array(name, shape)
