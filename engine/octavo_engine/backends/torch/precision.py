"""In which numbers the reference computes, and which it rounds as the native backend does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Precision:
    """All arithmetic is in `dtype`; weights, inputs of linears, k and v pass through `storage`."""

    dtype: torch.dtype = torch.float32
    storage: torch.dtype | None = None  # None: they stay as they are

    def stored(self, x: Tensor) -> Tensor:
        """The value after it was stored and read back."""
        return x if self.storage is None else x.to(self.storage).to(self.dtype)
