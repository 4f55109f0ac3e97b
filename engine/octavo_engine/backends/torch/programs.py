"""What a step runs on the device, the model or what drafts for it, and rows between two of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from octavo_engine.backends.torch.device_step import DeviceStep
    from octavo_engine.backends.torch.few_steps import FewSteps
    from octavo_engine.backends.torch.graphs import Buckets, GraphCache
    from octavo_engine.backends.torch.kernels import Kernels

MAIN = "main"  # the model's own


@dataclass(frozen=True, slots=True)
class Program:
    """A forward pass, the kernels it is made of, and the graphs that hold it."""

    forward: Callable[[DeviceStep], Tensor]  # logits of the wanted rows, in float32
    kernels: Kernels
    buckets: Buckets
    few: FewSteps
    graphs: GraphCache[tuple[Tensor, Tensor]]
    name: str | int = MAIN  # among those that share graphs


class StateRows:
    """Hidden states that one program leaves and another takes: of captured steps at an address that
    stays, of others wherever they are."""

    def __init__(
        self, num_rows: int, columns: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._fixed = torch.zeros((num_rows, columns), dtype=dtype, device=device)
        self._loose: Tensor | None = None

    def begin(self) -> None:
        """What comes is left by a graph, unless `leave` says otherwise."""
        self._loose = None

    def leave(self, rows: Tensor, *, is_captured: bool) -> None:
        if is_captured:
            self._fixed[: len(rows)].copy_(rows)
        else:
            self._loose = rows

    def last(self) -> Tensor:
        return self._fixed if self._loose is None else self._loose

    def give(self, rows: Tensor) -> None:
        """For `taken`, whichever way the step is run."""
        self._loose = rows
        if len(rows) <= len(self._fixed):
            self._fixed[: len(rows)].copy_(rows)

    def taken(self, num_rows: int, *, is_captured: bool) -> Tensor:
        """Of a captured step padding, too."""
        if is_captured:
            return self._fixed[:num_rows]
        assert self._loose is not None and len(self._loose) == num_rows, "no states were given"
        return self._loose

    def anything(self, num_rows: int) -> Tensor:
        return self._fixed.new_zeros((num_rows, self._fixed.shape[1]))
