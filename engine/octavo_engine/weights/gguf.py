"""Parses a GGUF file: metadata, tensor infos, and where the tensors lie. Trusts no number in it.

magic, version, number of tensors, number of pairs
pairs           key, type, value
tensor infos    name, dimensions (innermost first), type, offset
padding to general.alignment, then the tensors
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from octavo_engine.errors import ModelError
from octavo_engine.weights.gguf_types import TENSOR_TYPES
from octavo_engine.weights.mapped_file import map_file

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

_SCALARS = {
    0: struct.Struct("<B"), 1: struct.Struct("<b"), 2: struct.Struct("<H"), 3: struct.Struct("<h"),
    4: struct.Struct("<I"), 5: struct.Struct("<i"), 6: struct.Struct("<f"), 7: struct.Struct("<?"),
    10: struct.Struct("<Q"), 11: struct.Struct("<q"), 12: struct.Struct("<d"),
}  # fmt: skip
_STRING, _ARRAY = 8, 9
_ELEMENTS: dict[int, str] = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "<u1",
    10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip
_U64 = struct.Struct("<Q")
MAX_KEY_BYTES = 65535
MAX_NAME_BYTES = 1024
MAX_DIMENSIONS = 4
MAX_ALIGNMENT = 1 << 20
MAX_ARRAY_DEPTH = 4


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """A tensor's info; the shape is outermost first, as numpy has it."""

    name: str
    type: str
    shape: tuple[int, ...]
    begin: int  # in the file
    end: int


class GGUFStrings(Sequence[str]):
    """An array of strings, found but not decoded: a vocabulary is read once, or never."""

    def __init__(self, data: memoryview, spans: list[int]) -> None:
        self._data = data
        self._spans = spans  # begin, end, begin, end, …

    def __len__(self) -> int:
        return len(self._spans) // 2

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        i = range(len(self))[index]
        return str(self._data[self._spans[2 * i] : self._spans[2 * i + 1]], "utf-8", "replace")

    def to_list(self) -> list[str]:
        """All of them, decoded; one pass over the bytes."""
        data, spans = self._data, iter(self._spans)
        return [str(data[b:e], "utf-8", "replace") for b, e in zip(spans, spans, strict=True)]


class GGUFFile:
    """A parsed file. `metadata` has Python scalars, numpy arrays and GGUFStrings."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._bytes = map_file(path)
        reader = _Reader(path, self._bytes.data)
        reader.magic()
        self.version = reader.version()
        num_tensors = reader.count("tensors", smallest=8 + 4 + 8 + 4 + 8)
        num_pairs = reader.count("metadata pairs", smallest=8 + 4 + 1)
        self.metadata = self._read_metadata(reader, num_pairs)
        self.tensors = self._read_infos(reader, num_tensors)
        self._check_overlap()

    def data(self, tensor: GGUFTensor) -> NDArray[np.uint8]:
        return self._bytes[tensor.begin : tensor.end]

    def _read_metadata(self, reader: _Reader, count: int) -> dict[str, Any]:
        metadata: dict[str, Any] = {}
        for _ in range(count):
            key = reader.string("a metadata key", MAX_KEY_BYTES)
            if key in metadata:
                raise reader.error(f"metadata key {key!r} appears twice")
            metadata[key] = reader.value(key)
        return metadata

    def _read_infos(self, reader: _Reader, count: int) -> dict[str, GGUFTensor]:
        alignment = self.metadata.get("general.alignment", 32)
        if (
            type(alignment) is not int
            or not 8 <= alignment <= MAX_ALIGNMENT
            or alignment & (alignment - 1)
        ):
            raise reader.error(f"general.alignment {alignment!r:.40} is not a power of two from 8")
        infos = [reader.tensor_info(alignment) for _ in range(count)]
        start = -(-reader.position // alignment) * alignment
        size = len(self._bytes)
        tensors: dict[str, GGUFTensor] = {}
        for name, kind, shape, offset, num_bytes in infos:
            if name in tensors:
                raise reader.error(f"tensor {name} appears twice")
            end = start + offset + num_bytes
            if end > size:
                raise ModelError(
                    f"{self.path} is truncated: tensor {name} ends at byte {end}, "
                    f"the file has {size}"
                )
            tensors[name] = GGUFTensor(name, kind, shape, start + offset, end)
        return tensors

    def _check_overlap(self) -> None:
        position = 0
        for tensor in sorted(self.tensors.values(), key=lambda t: t.begin):
            if tensor.begin < position:
                raise ModelError(f"tensor {tensor.name} in {self.path} overlaps the one before it")
            position = tensor.end


class _Reader:
    """A position in the file; every step checks what is left."""

    def __init__(self, path: Path, data: memoryview) -> None:
        self._path = path
        self._data = data
        self._size = len(data)
        self.position = 0

    def error(self, problem: str) -> ModelError:
        return ModelError(f"{self._path} is not a usable GGUF file: {problem}")

    def magic(self) -> None:
        if bytes(self._data[:4]) != b"GGUF":
            raise self.error(f"it starts with {bytes(self._data[:4])!r} instead of b'GGUF'")
        self.position = 4

    def version(self) -> int:
        version: int = self._scalar(4, "the version")
        if version & 0xFFFF == 0:
            raise self.error("it is big-endian; convert it to little-endian")
        if version not in (2, 3):
            raise self.error(f"its version is {version}; 2 and 3 are read")
        return version

    def count(self, what: str, *, smallest: int) -> int:
        """A number of things that take at least `smallest` bytes each."""
        count: int = self._scalar(10, f"the number of {what}")
        if count * smallest > self._size - self.position:
            raise self.error(
                f"it promises {count} {what} but has {self._size} bytes (truncated or hostile)"
            )
        return count

    def string(self, what: str, limit: int) -> str:
        length: int = self._scalar(10, what)
        if length > limit:
            raise self.error(f"{what} has {length} bytes; at most {limit} are read")
        raw = self._take(length, what)
        try:
            return str(raw, "utf-8")
        except UnicodeDecodeError:
            raise self.error(f"{what} is not UTF-8") from None

    def value(self, key: str) -> Any:
        return self._value(self._scalar(4, f"the type of {key}"), key, 0)

    def tensor_info(self, alignment: int) -> tuple[str, str, tuple[int, ...], int, int]:
        name = self.string("a tensor's name", MAX_NAME_BYTES)
        num_dims: int = self._scalar(4, f"tensor {name}")
        if num_dims > MAX_DIMENSIONS:
            raise self.error(f"tensor {name} has {num_dims} dimensions")
        dims: list[int] = [self._scalar(10, f"tensor {name}") for _ in range(num_dims)]
        type_id: int = self._scalar(4, f"tensor {name}")
        offset: int = self._scalar(10, f"tensor {name}")
        kind = TENSOR_TYPES.get(type_id)
        if kind is None:
            raise self.error(f"tensor {name} has the unknown type {type_id}")
        if any(n == 0 for n in dims):
            raise self.error(f"tensor {name} has an empty dimension: {dims}")
        row = dims[0] if dims else 1
        if row % kind.block:
            raise self.error(
                f"tensor {name} has rows of {row} values; {kind.name} packs them by {kind.block}"
            )
        if offset % alignment:
            raise self.error(f"tensor {name} lies at {offset}, not a multiple of {alignment}")
        num_bytes = math.prod(dims) // kind.block * kind.bytes
        return name, kind.name, tuple(reversed(dims)), offset, num_bytes

    def _value(self, kind: int, key: str, depth: int) -> Any:
        if kind in _SCALARS:
            return self._scalar(kind, key)
        if kind == _STRING:
            return self.string(key, self._size)
        if kind != _ARRAY:
            raise self.error(f"{key} has the unknown type {kind}")
        if depth == MAX_ARRAY_DEPTH:
            raise self.error(f"{key} nests arrays more than {MAX_ARRAY_DEPTH} deep")
        element: int = self._scalar(4, key)
        if element == _STRING:
            return self._strings(key)
        if element == _ARRAY:
            count = self.count(f"arrays in {key}", smallest=12)
            return [self._value(_ARRAY, key, depth + 1) for _ in range(count)]
        if element not in _ELEMENTS:
            raise self.error(f"{key} is an array of the unknown type {element}")
        dtype = np.dtype(_ELEMENTS[element])
        count = self.count(f"values in {key}", smallest=dtype.itemsize)
        return np.frombuffer(self._take(count * dtype.itemsize, key), dtype=dtype)

    def _strings(self, key: str) -> GGUFStrings:
        count = self.count(f"strings in {key}", smallest=8)
        spans: list[int] = []
        data, size, position, unpack = self._data, self._size, self.position, _U64.unpack_from
        try:
            for _ in range(count):  # once per token of a vocabulary
                begin = position + 8
                position = begin + unpack(data, position)[0]
                spans += (begin, position)
        except (struct.error, OverflowError):
            position = size + 1
        # One check for all: positions only grow, so the last one is the furthest.
        if position > size:
            raise self.error(f"{key} runs past the end (truncated or hostile)")
        self.position = position
        return GGUFStrings(data, spans)

    def _scalar(self, kind: int, what: str) -> Any:
        layout = _SCALARS[kind]
        if self.position + layout.size > self._size:
            raise self.error(f"it ends within {what} (truncated at {self._size} bytes)")
        (value,) = layout.unpack_from(self._data, self.position)
        self.position += layout.size
        return value

    def _take(self, num_bytes: int, what: str) -> memoryview:
        if num_bytes > self._size - self.position:
            raise self.error(f"it ends within {what} (truncated at {self._size} bytes)")
        self.position += num_bytes
        return self._data[self.position - num_bytes : self.position]
