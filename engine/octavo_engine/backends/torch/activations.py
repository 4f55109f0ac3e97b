"""Activations by name, for the reference and for plain kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from torch import Tensor

    from octavo_engine.ops import Activation


def activate(x: Tensor, activation: Activation) -> Tensor:
    match activation:
        case "silu":
            return functional.silu(x)
        case "gelu":
            return functional.gelu(x)
        case "gelu_tanh":
            return functional.gelu(x, approximate="tanh")
        case "relu":
            return functional.relu(x)
        case "relu2":
            return functional.relu(x).square()
        case "tanh":
            return torch.tanh(x)
        case "sigmoid":
            return torch.sigmoid(x)
        case "swiglu_clamped":
            raise AssertionError("an activation of two halves")
