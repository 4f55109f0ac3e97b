"""Weights straight from the mapped file to the device, in the backend's dtype."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn import functional

from octavo_engine.backends.dequantize import to_float32
from octavo_engine.backends.ledger import WeightLedger

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from octavo_engine.backends.torch.upload import Uploader
    from octavo_engine.weights.checkpoint import Checkpoint, StoredTensor

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True, eq=False)
class DeviceLinear:
    """A weight [out, in] with its bias. `is_head`: the result stays float32, as logits must."""

    weight: Tensor
    bias: Tensor | None = None
    is_head: bool = False

    def apply(self, x: Tensor) -> Tensor:
        if not self.is_head or x.dtype == torch.float32:
            return functional.linear(x, self.weight, self.bias)
        # Two logits that differ must not be rounded into a tie.
        if x.is_cuda and _has_wide_product():
            y = torch.mm(x, self.weight.t(), out_dtype=torch.float32)
        elif x.is_cuda:
            y = functional.linear(x, self.weight).float()
        else:
            y = functional.linear(x.float(), self.weight.float())
        return y if self.bias is None else y + self.bias


@functools.cache
def _has_wide_product() -> bool:
    """Whether torch gives a product of 16-bit matrices in float32: since 2.8, on NVIDIA alone."""
    major, minor = torch.__version__.split(".")[:2]
    return (int(major), int(minor)) >= (2, 8) and torch.version.hip is None


class CudaLoader:
    """The Loader of a device. Nothing is held twice: a tensor's place is made, then filled."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        uploader: Uploader,
        dtype: torch.dtype,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self._ledger = WeightLedger(checkpoint, progress)
        self._uploader = uploader
        self._dtype = dtype

    def embedding(self, name: str, rows: int, columns: int) -> Tensor:
        return self._matrix([f"{name}.weight"], [rows], columns)

    def linear(
        self,
        names: str | Sequence[str],
        in_features: int,
        out_features: int | Sequence[int],
        *,
        bias: bool = False,
    ) -> DeviceLinear:
        names = [names] if isinstance(names, str) else list(names)
        sizes = [out_features] if isinstance(out_features, int) else list(out_features)
        weight = self._matrix([f"{name}.weight" for name in names], sizes, in_features)
        total = self._matrix([f"{name}.bias" for name in names], sizes) if bias else None
        return DeviceLinear(weight, total, is_head=names == ["lm_head"])

    def tied(self, embedding: Tensor) -> DeviceLinear:
        return DeviceLinear(embedding, is_head=True)

    def vector(self, name: str, size: int, *, offset: float = 0.0) -> Tensor:
        stored = self._ledger.take(name, (size,))
        if stored is None:
            return torch.zeros(size)
        values = torch.from_numpy(to_float32(stored)).add_(offset)
        self._ledger.account(stored)
        return values.to(self._uploader.device)

    def finish(self) -> None:
        """Wait for what is under way. Raises ModelError that lists what was missing."""
        self._uploader.finish()
        self._ledger.finish()

    def _matrix(self, names: list[str], sizes: list[int], columns: int | None = None) -> Tensor:
        """The stored tensors behind one another along their first dimension."""
        tail = () if columns is None else (columns,)
        parts = [self._ledger.take(name, (n, *tail)) for name, n in zip(names, sizes, strict=True)]
        if not self._ledger.is_complete:  # the load fails in the end: spare the device
            return torch.empty((0, *tail), dtype=self._dtype)
        shape = (sum(sizes), *tail)
        whole = torch.empty(shape, dtype=self._dtype, device=self._uploader.device)
        for place, stored in zip(torch.split(whole, sizes), parts, strict=True):
            if stored is not None:
                self._fill(place, stored)
                self._ledger.account(stored)
        return whole

    def _fill(self, place: Tensor, stored: StoredTensor) -> None:
        dtype = _DTYPES.get(stored.dtype)
        if dtype is None or stored.row_map is not None or stored.offset:
            values = torch.from_numpy(np.ascontiguousarray(to_float32(stored)))
            place.copy_(values)
        elif dtype == self._dtype:
            self._uploader.copy(place, stored.data)
        else:
            raw = torch.empty(stored.shape, dtype=dtype, device=place.device)
            self._uploader.copy(raw, stored.data)
            self._uploader.finish()
            place.copy_(raw)
