"""Random weights of whatever shape is requested: to measure and test without a checkpoint."""

from __future__ import annotations

import hashlib
import math
from typing import TYPE_CHECKING

import numpy as np

from octavo_engine.weights.bfloat16 import to_bfloat16
from octavo_engine.weights.checkpoint import StoredTensor

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

SCALE = 0.02
# Values of a tensor that are drawn; a larger one repeats them. A prime number, so that no two rows
# of a matrix are equal.
DRAWN = 4_194_301


class DummyCheckpoint:
    """The same seed and name give the same bf16 values, in any order of asking."""

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed
        self._requested: dict[str, int] = {}  # name → bytes

    def names(self) -> Iterable[str]:
        """What was requested so far; anything else would be given too."""
        return self._requested.keys()

    def read(self, name: str, shape: tuple[int, ...]) -> StoredTensor:
        data = np.resize(to_bfloat16(self._values(name, shape)), math.prod(shape)).view(np.uint8)
        self._requested[name] = len(data)
        return StoredTensor(name, "BF16", tuple(shape), data)

    @property
    def total_bytes(self) -> int:
        return sum(self._requested.values())

    def _values(self, name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
        """Those that are repeated."""
        count = min(math.prod(shape), DRAWN)
        if name.endswith(".bias"):
            return np.zeros(count, np.float32)
        if name.endswith("norm.weight"):
            return np.ones(count, np.float32)
        digest = hashlib.blake2b(f"{self._seed}:{name}".encode(), digest_size=16).digest()
        rng = np.random.Generator(np.random.SFC64(int.from_bytes(digest, "little")))
        return rng.standard_normal(count, dtype=np.float32) * np.float32(SCALE)
