"""What a step runs on the device: the model, or what drafts for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from octavo_engine.backends.torch.device_step import DeviceStep
    from octavo_engine.backends.torch.few_steps import FewSteps
    from octavo_engine.backends.torch.graphs import Buckets, GraphCache
    from octavo_engine.backends.torch.kernels import Kernels


@dataclass(frozen=True, slots=True)
class Program:
    """A forward pass, the kernels it is made of, and the graphs that hold it."""

    forward: Callable[[DeviceStep], Tensor]  # logits of the wanted rows, in float32
    kernels: Kernels
    buckets: Buckets
    few: FewSteps
    graphs: GraphCache[tuple[Tensor, Tensor]]
