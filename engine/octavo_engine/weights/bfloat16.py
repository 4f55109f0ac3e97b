"""float32 rounded to bf16, in numpy, which has no such type."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


def to_bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The bits, rounded to the nearest, ties to even; the values are finite."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
