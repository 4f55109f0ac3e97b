"""Weights that leave the device for a while: their memory goes, the tensors stay.

Everybody who holds a tensor, or a view of one, keeps it; only the storage below becomes empty and
is filled again. Its address may be another then: what was captured with the old one is void.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import Tensor, UntypedStorage


class Parking:
    """Weights of one model, as the loader handed them out."""

    def __init__(self, weights: Iterable[object]) -> None:
        self._storages: dict[int, UntypedStorage] = {}  # what several share is there once
        for weight in weights:
            for tensor in tensors_of(weight):
                storage = tensor.untyped_storage()
                if storage.nbytes():
                    self._storages[storage.data_ptr()] = storage
        self._parked: list[tuple[UntypedStorage, Tensor]] = []

    @property
    def num_bytes(self) -> int:
        """That parking frees."""
        return sum(storage.nbytes() for storage in self._storages.values())

    def park(self) -> None:
        """To the host's memory, pinned where there is a device to speak of."""
        for storage in self._storages.values():
            is_pinned = storage.device.type == "cuda"
            kept = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=is_pinned)
            kept.copy_(_bytes(storage), non_blocking=True)
            self._parked.append((storage, kept))
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        for storage, _ in self._parked:
            storage.resize_(0)

    def unpark(self) -> None:
        """Back, in parts: what fails for want of memory can be requested again."""
        while self._parked:
            storage, kept = self._parked[-1]
            storage.resize_(kept.nbytes)
            _bytes(storage).copy_(kept)
            self._parked.pop()


def tensors_of(weight: object) -> Iterator[Tensor]:
    """A tensor, or those that a packed weight or a linear layer is made of."""
    if isinstance(weight, torch.Tensor):
        yield weight
    elif dataclasses.is_dataclass(weight):
        for field in dataclasses.fields(weight):
            yield from tensors_of(getattr(weight, field.name))


def _bytes(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
