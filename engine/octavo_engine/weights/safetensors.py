"""Reads safetensors: one file, or shards behind an index. Trusts no number in the header."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from octavo_engine.errors import ModelError
from octavo_engine.weights.checkpoint import StoredTensor
from octavo_engine.weights.json_file import read_json_object
from octavo_engine.weights.mapped_file import map_file

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

INDEX_NAME = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100 * 2**20
MAX_DIMENSIONS = 8
READABLE = ("F32", "F16", "BF16")
_BITS = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "C64": 64, "BOOL": 8,
    "I64": 64, "I32": 32, "I16": 16, "I8": 8, "U64": 64, "U32": 32, "U16": 16, "U8": 8,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4,
}  # fmt: skip

_NUMPY = {
    "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "I32": "<i4", "I8": "i1",
    "U8": "u1", "F8_E4M3": "u1", "F8_E8M0": "u1",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a header: where its bytes lie, counted from the end of the header."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class SafetensorsFile:
    """One mapped file whose header has been checked whole."""

    def __init__(self, path: Path) -> None:
        self.path = path
        data = map_file(path)
        size = len(data)
        if size < 8:
            raise ModelError(f"{path} has {size} bytes; a safetensors file starts with 8")
        header_bytes = int.from_bytes(data[:8].tobytes(), "little")
        if header_bytes > MAX_HEADER_BYTES:
            raise ModelError(
                f"{path} is not a safetensors file, or hostile: its header would have "
                f"{header_bytes} bytes; at most {MAX_HEADER_BYTES} are read"
            )
        if 8 + header_bytes > size:
            raise ModelError(
                f"{path} is truncated: the header has {header_bytes} bytes, the file only {size}"
            )
        self.entries = _entries(path, data[8 : 8 + header_bytes].tobytes())
        self.body = data[8 + header_bytes :]  # all tensors' bytes
        _check_layout(path, self.entries, len(self.body))

    def data(self, name: str) -> NDArray[np.uint8]:
        entry = self.entries[name]
        return self.body[entry.begin : entry.end]


class SafetensorsCheckpoint:
    """The tensors of a folder's safetensors files."""

    def __init__(self, files: Sequence[SafetensorsFile], where: Path) -> None:
        self._where = where
        self._owner: dict[str, SafetensorsFile] = {}
        for file in files:
            for name in file.entries:
                if name in self._owner:
                    raise ModelError(
                        f"tensor {name} is in both {self._owner[name].path.name} and "
                        f"{file.path.name} of {where}"
                    )
                self._owner[name] = file

    @classmethod
    def open(cls, folder: Path) -> SafetensorsCheckpoint:
        """All shards the folder's index names, or its safetensors files where it has none."""
        paths = weight_files(folder)
        files = {path.name: SafetensorsFile(path) for path in paths}
        index = folder / INDEX_NAME
        weight_map = _weight_map(index) if index.exists() else {}
        for name, shard in weight_map.items():
            if name not in files[shard].entries:
                raise ModelError(
                    f"tensor {name} is missing from {folder / shard}; {index.name} puts it there"
                )
        return cls(list(files.values()), folder)

    def names(self) -> Iterable[str]:
        return self._owner.keys()

    def read(self, name: str, shape: tuple[int, ...]) -> StoredTensor:
        file = self._owner.get(name)
        if file is None:
            raise ModelError(f"tensor {name} is missing from {self._where}")
        entry = file.entries[name]
        if entry.dtype not in READABLE:
            raise ModelError(
                f"tensor {name} in {file.path} has dtype {entry.dtype}; "
                f"readable are {', '.join(READABLE)}"
            )
        if entry.shape != tuple(shape):
            raise ModelError(
                f"tensor {name} in {file.path} has shape {list(entry.shape)}; "
                f"the model's config asks for {list(shape)}"
            )
        return StoredTensor(name, entry.dtype, entry.shape, file.data(name))

    def entry(self, name: str) -> TensorEntry:
        return self._file_of(name).entries[name]

    def _file_of(self, name: str) -> SafetensorsFile:
        file = self._owner.get(name)
        if file is None:
            raise ModelError(f"tensor {name} is missing from {self._where}")
        return file

    def data(self, name: str) -> NDArray[np.uint8]:
        return self._owner[name].data(name)

    def array(self, name: str, dtypes: tuple[str, ...], num_dims: int) -> NDArray[Any]:
        """A tensor of one of these dtypes as it is; bf16 as the words that hold it."""
        file = self._file_of(name)
        entry = file.entries[name]
        if entry.dtype not in dtypes:
            raise self.error(name, f"has dtype {entry.dtype}; it must be {' or '.join(dtypes)}")
        if len(entry.shape) != num_dims or 0 in entry.shape:
            raise self.error(
                name, f"has shape {list(entry.shape)}; it must have {num_dims} sizes above 0"
            )
        # A copy: the file may put it at any address.
        return file.data(name).copy().view(_NUMPY[entry.dtype]).reshape(entry.shape)

    def numbers(self, name: str, num_dims: int) -> NDArray[np.float32]:
        """A small tensor of floats, such as scales."""
        values = self.array(name, READABLE, num_dims)
        if values.dtype == np.uint16:
            return (values.astype(np.uint32) << 16).view(np.float32)
        return values.astype(np.float32)

    def error(self, name: str, problem: str) -> ModelError:
        """Of a tensor that can be read but not be used."""
        return ModelError(f"tensor {name} in {self._where} {problem}")

    @property
    def total_bytes(self) -> int:
        return sum(f.entries[name].end - f.entries[name].begin for name, f in self._owner.items())


def weight_files(folder: Path) -> list[Path]:
    """All shards the folder's index names, or its safetensors files where it has none. Raises
    ModelError that names those that are missing."""
    index = folder / INDEX_NAME
    if not index.exists():
        return _plain_files(folder)
    shards = sorted(set(_weight_map(index).values()))
    missing = [shard for shard in shards if not (folder / shard).is_file()]
    if len(missing) == 1:
        raise ModelError(f"{folder / missing[0]} is missing; {index.name} names it")
    if missing:
        more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        raise ModelError(
            f"{folder} lacks {len(missing)} of the {len(shards)} files that {index.name} "
            f"names: {', '.join(missing[:5])}{more}; was the download cut off?"
        )
    return [folder / shard for shard in shards]


def _plain_files(folder: Path) -> list[Path]:
    whole = folder / "model.safetensors"
    if whole.exists():
        return [whole]
    # Mistral's repositories carry the same weights a second time, under other names.
    found = sorted(p for p in folder.glob("*.safetensors") if not p.name.startswith("consolidated"))
    if found:
        return found
    pickled = sorted(p.name for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".pth"))
    if pickled:
        raise ModelError(
            f"{folder} holds its weights only as pickle ({pickled[0]}), which can run code and is "
            "never read: convert them to safetensors "
            "(transformers: model.save_pretrained(FOLDER, safe_serialization=True))"
        )
    raise ModelError(f"{folder} has no weights: no *.safetensors and no {INDEX_NAME}")


def _weight_map(index: Path) -> dict[str, str]:
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index} has no weight_map")
    for name, shard in weight_map.items():
        plain = isinstance(shard, str) and shard.endswith(".safetensors")
        if not plain or any(c in shard for c in "/\\\0") or shard.startswith("."):
            raise ModelError(
                f"{index} puts tensor {name} into {shard!r}, which is not the plain name of a "
                ".safetensors file in the same folder"
            )
    return weight_map


def _entries(path: Path, header: bytes) -> dict[str, TensorEntry]:
    def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]  # set.add as the else
            raise ModelError(f"{path} names {twice} twice in its header")
        return found

    try:
        fields = json.loads(header, object_pairs_hook=no_duplicates)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not a safetensors file: header: {error}") from None
    if not isinstance(fields, dict):
        raise ModelError(f"{path} is not a safetensors file: its header is not an object")
    return {k: _entry(path, k, v) for k, v in fields.items() if k != "__metadata__"}


def _entry(path: Path, name: str, fields: Any) -> TensorEntry:
    def refuse(problem: str) -> ModelError:
        return ModelError(f"tensor {name} in {path}: {problem}")

    if not isinstance(fields, dict):
        raise refuse("its header entry is not an object")
    dtype, shape, offsets = (fields.get(k) for k in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise refuse(f"unknown dtype {dtype!r:.40}")
    if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape):
        raise refuse(f"shape {shape!r:.80} is not a list of sizes")
    if len(shape) > MAX_DIMENSIONS:
        raise refuse(f"{len(shape)} dimensions; at most {MAX_DIMENSIONS} are read")
    if (
        not isinstance(offsets, list)
        or len(offsets) != 2
        or not all(type(n) is int for n in offsets)
        or not 0 <= offsets[0] <= offsets[1]
    ):
        raise refuse(f"data_offsets {offsets!r:.80} are not [begin, end]")
    begin, end = offsets
    bits = math.prod(shape) * _BITS[dtype]
    if bits != (end - begin) * 8:
        raise refuse(
            f"shape {shape} of {dtype} takes {bits // 8} bytes; its range has {end - begin}"
        )
    return TensorEntry(dtype, tuple(shape), begin, end)


def _check_layout(path: Path, entries: dict[str, TensorEntry], body_bytes: int) -> None:
    """Tensors must fill the body without gap or overlap, as the format demands."""
    position = 0
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.end > body_bytes:
            raise ModelError(
                f"{path} is truncated: tensor {name} ends at byte {entry.end} of the data, "
                f"the file holds {body_bytes}"
            )
        if entry.begin != position:
            kind = "overlaps" if entry.begin < position else "leaves a gap after"
            raise ModelError(f"tensor {name} in {path} {kind} the tensor before it")
        position = entry.end
    if position != body_bytes:
        raise ModelError(f"{path} has {body_bytes - position} bytes that belong to no tensor")
