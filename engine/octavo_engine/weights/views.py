"""Checkpoints seen through other names: renamed, split, rearranged, and several as one."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from octavo_engine.errors import ModelError
from octavo_engine.weights.checkpoint import StoredTensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from numpy.typing import NDArray

    from octavo_engine.weights.checkpoint import Checkpoint

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


@dataclass(frozen=True, slots=True, eq=False)
class StoredPlace:
    """Where a tensor lies in a checkpoint, and what is to be done with it."""

    names: tuple[str, ...]  # several vectors make one; none: it is not there, and of ones
    shape: tuple[int, ...] | None = None  # as stored; None: as requested
    row_map: NDArray[np.int32] | None = (
        None  # of each row the stored one; of all, of some, or of some more
    )
    part: int = 0  # of so many equal ones, one below the other
    parts: int = 1
    is_transposed: bool = False
    has_unit_rows: bool = False  # each row is divided by its length
    factors: NDArray[np.float32] | None = None  # each row is multiplied


class Arranged:
    """A checkpoint whose tensors are found, cut and turned as `sources` say."""

    def __init__(self, checkpoint: Checkpoint, sources: Mapping[str, StoredPlace]) -> None:
        self._checkpoint = checkpoint
        self._sources = sources

    def names(self) -> Iterable[str]:
        return self._sources.keys()

    def read(self, name: str, shape: tuple[int, ...]) -> StoredTensor:
        source = self._sources.get(name)
        if source is None:
            return self._checkpoint.read(name, shape)  # which will say that it is missing
        if not source.names:
            ones = np.ones(math.prod(shape), np.float32)
            return StoredTensor(name, "F32", tuple(shape), ones.view(np.uint8))
        if len(source.names) > 1:
            return self._concatenated(name, source, shape)
        stored_shape = source.shape or (shape[::-1] if source.is_transposed else shape)
        stored = self._checkpoint.read(source.names[0], stored_shape)
        if source.parts > 1:
            stored = _part_of(stored, source)
        # Of the part that was cut out; the one requested may have some of them only.
        columns = math.prod(shape[1:])
        rows = math.prod(stored_shape) // source.parts // max(columns, 1)
        if source.is_transposed:
            stored = _transposed(stored, (columns, rows))
        if source.has_unit_rows:
            stored = _with_unit_rows(stored)
        if source.factors is not None:
            stored = _multiplied(stored, source.factors)
        stored = dataclasses.replace(stored, name=name, shape=tuple(shape))
        if source.row_map is None:
            return stored
        if stored.row_map is not None or stored.scales is not None:
            raise ModelError(f"tensor {source.names[0]}: its rows cannot be reordered")
        if len(source.row_map) != rows:
            some = stored.data.reshape(rows, -1)[source.row_map]
            return dataclasses.replace(stored, data=some.reshape(-1))
        return dataclasses.replace(stored, row_map=source.row_map)

    def _concatenated(self, name: str, source: StoredPlace, shape: tuple[int, ...]) -> StoredTensor:
        if shape[0] % len(source.names):
            raise ModelError(
                f"tensor {name}: {len(source.names)} parts do not make {shape[0]} values"
            )
        own = (shape[0] // len(source.names), *shape[1:])
        parts = [self._checkpoint.read(part, own) for part in source.names]
        if len({part.dtype for part in parts}) > 1:
            raise ModelError(f"tensor {name}: its parts are stored in several types")
        data = np.concatenate([part.data for part in parts])
        return dataclasses.replace(parts[0], name=name, shape=tuple(shape), data=data)

    @property
    def total_bytes(self) -> int:
        return self._checkpoint.total_bytes


def _part_of(stored: StoredTensor, source: StoredPlace) -> StoredTensor:
    _check_plain(stored, "split")
    size = len(stored.data) // source.parts
    own = stored.data[source.part * size : (source.part + 1) * size]
    return dataclasses.replace(stored, data=own)


def _transposed(stored: StoredTensor, shape: tuple[int, ...]) -> StoredTensor:
    _check_plain(stored, "transposed")
    size = len(stored.data) // math.prod(shape)
    data = np.ascontiguousarray(stored.data.reshape(*shape, size).swapaxes(0, 1))
    return dataclasses.replace(stored, data=data.reshape(-1))


def _with_unit_rows(stored: StoredTensor) -> StoredTensor:
    _check_plain(stored, "normalised")
    values = _floats(stored).reshape(stored.shape)
    length = np.maximum(np.linalg.norm(values, axis=1, keepdims=True), np.float32(1e-7))
    data = np.ascontiguousarray(values / length).view(np.uint8).reshape(-1)
    return dataclasses.replace(stored, dtype="F32", data=data)


def _multiplied(stored: StoredTensor, factors: NDArray[np.float32]) -> StoredTensor:
    _check_plain(stored, "multiplied")
    values = _floats(stored).reshape(len(factors), -1)
    data = np.ascontiguousarray(values * factors[:, None]).view(np.uint8).reshape(-1)
    return dataclasses.replace(stored, dtype="F32", data=data)


def _floats(stored: StoredTensor) -> NDArray[np.float32]:
    data = np.ascontiguousarray(stored.data)
    match stored.dtype:
        case "F32":
            return data.view(np.float32)
        case "F16":
            return data.view(np.float16).astype(np.float32)
    return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def _check_plain(stored: StoredTensor, verb: str) -> None:
    if stored.dtype not in _SPLITTABLE or stored.row_map is not None:
        raise ModelError(f"tensor {stored.name} of type {stored.dtype} cannot be {verb}")


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
