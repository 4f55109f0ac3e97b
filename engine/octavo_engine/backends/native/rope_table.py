"""What depends on positions alone, computed once and shared by layers: cosines and sines of ropes,
and temperatures of queries."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from octavo_engine.ops import QueryTemperature, Rope


class RopeTables:
    """One table a rope, by identity: a model makes each of its ropes once."""

    def __init__(self, num_positions: int) -> None:
        self._num_positions = num_positions
        self._tables: dict[int, tuple[Rope, NDArray[np.float32]]] = {}
        self._scales: dict[QueryTemperature, NDArray[np.float32]] = {}

    def get(self, rope: Rope) -> NDArray[np.float32]:
        if id(rope) not in self._tables:  # the rope is kept too, so that its id stays its own
            self._tables[id(rope)] = (rope, cos_sin(rope, self._num_positions))
        return self._tables[id(rope)][1]

    def scales(self, temperature: QueryTemperature) -> NDArray[np.float32]:
        """Of the queries at each position."""
        if temperature not in self._scales:
            self._scales[temperature] = query_scales(temperature, self._num_positions)
        return self._scales[temperature]


def query_scales(temperature: QueryTemperature, num_positions: int) -> NDArray[np.float32]:
    steps = np.floor((np.arange(num_positions) + 1) / temperature.floor)
    return (1 + temperature.scale * np.log1p(steps)).astype(np.float32)


def cos_sin(rope: Rope, num_positions: int) -> NDArray[np.float32]:
    """[num_positions, rotary_dim]: the cosines of each pair, then the sines."""
    # The angle is a float32, as transformers has it; its cosine is then exact to the last place.
    angles = np.arange(num_positions, dtype=np.float32)[:, None] * rope.inv_freq
    exact = angles.astype(np.float64)
    factor = np.float32(rope.attention_factor)
    cos, sin = np.cos(exact).astype(np.float32), np.sin(exact).astype(np.float32)
    return np.ascontiguousarray(np.concatenate([cos, sin], axis=1) * factor)
