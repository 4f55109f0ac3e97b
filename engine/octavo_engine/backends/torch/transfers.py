"""Arrays on their way to the device beside a step's own buffer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor


def send(values: NDArray[Any], device: torch.device) -> Tensor:
    """On the device once it comes to it. From memory that is not pinned the host would wait."""
    tensor = torch.from_numpy(np.ascontiguousarray(values))
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
