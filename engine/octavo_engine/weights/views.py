"""Checkpoints seen through other names: renamed, split, and several as one."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, NamedTuple

from octavo_engine.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from octavo_engine.weights.checkpoint import Checkpoint, StoredTensor

_SPLITTABLE = ("F32", "F16", "BF16")


class _Part(NamedTuple):
    name: str  # as stored
    place: int
    parts: int  # of equal size, one below the other


class Renamed:
    """A checkpoint whose names go through `rename`: to none, one, or several for equal parts."""

    def __init__(self, checkpoint: Checkpoint, rename: Callable[[str], list[str]]) -> None:
        self._checkpoint = checkpoint
        self._parts: dict[str, _Part] = {}
        for stored in checkpoint.names():
            names = rename(stored)
            for index, name in enumerate(names):
                self._parts.setdefault(name, _Part(stored, index, len(names)))

    def names(self) -> Iterable[str]:
        return self._parts

    def read(self, name: str, shape: tuple[int, ...]) -> StoredTensor:
        part = self._parts.get(name)
        if part is None:
            return self._checkpoint.read(name, shape)  # which will say that it is missing
        if part.parts == 1:
            return self._checkpoint.read(part.name, shape)
        whole = self._checkpoint.read(part.name, (shape[0] * part.parts, *shape[1:]))
        if whole.dtype not in _SPLITTABLE or whole.row_map is not None:
            raise ModelError(f"tensor {part.name} of type {whole.dtype} cannot be split")
        size = len(whole.data) // part.parts
        own = whole.data[part.place * size : (part.place + 1) * size]
        return dataclasses.replace(whole, name=name, shape=tuple(shape), data=own)

    @property
    def total_bytes(self) -> int:
        return self._checkpoint.total_bytes


class Joined:
    """A checkpoint and others whose names begin with a prefix and a dot."""

    def __init__(self, main: Checkpoint, others: Mapping[str, Checkpoint]) -> None:
        self._main = main
        self._others = others

    def names(self) -> Iterable[str]:
        yield from self._main.names()
        for prefix, other in self._others.items():
            for name in other.names():
                yield f"{prefix}.{name}"

    def read(self, name: str, shape: tuple[int, ...]) -> StoredTensor:
        for prefix, other in self._others.items():
            if name.startswith(f"{prefix}."):
                return other.read(name.removeprefix(f"{prefix}."), shape)
        return self._main.read(name, shape)

    @property
    def total_bytes(self) -> int:
        return self._main.total_bytes + sum(o.total_bytes for o in self._others.values())
