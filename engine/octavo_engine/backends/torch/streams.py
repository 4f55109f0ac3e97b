"""What takes columns apart, and residuals of several streams, in plain torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from octavo_engine.backends.torch.reference import ReferenceOps

if TYPE_CHECKING:
    from torch import Tensor


class ReferenceStreamOps(ReferenceOps):
    """StreamOps over one step, but for what has states."""

    def columns(self, x: Tensor, first: int, count: int) -> Tensor:
        return x[:, first : first + count]

    def join(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.cat((x, y), dim=1)

    def group_norm(self, x: Tensor, weight: Tensor, eps: float, size: int) -> Tensor:
        groups = x.view(len(x), -1, size)
        return self.rms_norm(groups, weight.view(-1, size), eps).flatten(1)

    def mix(self, x: Tensor, weights: Tensor, num_inputs: int, *, offset: float = 0.0) -> Tensor:
        streams = x.view(len(x), num_inputs, -1)
        own = weights.view(len(x), -1, num_inputs) + offset
        return torch.einsum("toi,tiw->tow", own, streams).flatten(1)

    def match_rms(self, x: Tensor, like: Tensor, floor: float) -> Tensor:
        own = x.square().mean(-1, keepdim=True).clamp(min=floor)
        return x * (like.square().mean(-1, keepdim=True) / own).sqrt()

    def sparsify(self, x: Tensor, deviations: float) -> Tensor:
        deviation = x.std(-1, keepdim=True, unbiased=False)
        return torch.relu(x - (x.mean(-1, keepdim=True) + deviations * deviation))

    def scale_columns(self, x: Tensor, factors: Tensor) -> Tensor:
        return x * factors
