"""In which numbers the reference computes, and which it rounds as the native backend does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Precision:
    """All arithmetic is in `dtype`; weights, inputs of linears, k and v pass through `storage`.

    Queries and the softmax's exponentials pass through `products`: instruction sets that multiply
    bf16 round them as well.
    """

    dtype: torch.dtype = torch.float32
    storage: torch.dtype | None = None  # None: they stay as they are
    products: torch.dtype | None = None

    def stored(self, x: Tensor) -> Tensor:
        """The value after it was stored and read back."""
        return self._through(self.storage, x)

    def multiplied(self, x: Tensor) -> Tensor:
        """The value that meets keys or values."""
        return self._through(self.products, x)

    def _through(self, dtype: torch.dtype | None, x: Tensor) -> Tensor:
        return x if dtype is None else x.to(dtype).to(self.dtype)
