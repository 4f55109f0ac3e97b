"""Some tensors of a checkpoint, by names of ours."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from octavo_engine.weights.checkpoint import Checkpoint, StoredTensor


class RenamedTensors:
    """Others are not visible; a name that is missing is refused as the checkpoint refuses it."""

    def __init__(self, checkpoint: Checkpoint, stored_names: Mapping[str, str]) -> None:
        self._checkpoint = checkpoint
        self._stored_names = stored_names

    def names(self) -> Iterable[str]:
        return self._stored_names

    def read(self, name: str, shape: tuple[int, ...]) -> StoredTensor:
        return self._checkpoint.read(self._stored_names.get(name, name), shape)

    @property
    def total_bytes(self) -> int:
        return self._checkpoint.total_bytes
