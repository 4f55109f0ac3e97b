"""Models that are split into several GGUF files, NAME-00001-of-0000N.gguf: names, and the whole.

Every part is a GGUF file of its own. The first one has the model's metadata; all say which part
they are (split.no, from 0) and of how many (split.count).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from octavo_engine.errors import ModelError
from octavo_engine.weights.gguf import GGUFFile

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from numpy import uint8
    from numpy.typing import NDArray

    from octavo_engine.weights.gguf import GGUFTensor

MAX_PARTS = 1024
_NAME = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)
_SHOWN = 5


class PartName(NamedTuple):
    """What a part's file name says."""

    stem: str  # may have folders before it
    number: int  # from 1
    total: int


def part_name(name: str) -> PartName | None:
    """None for a file that is a model by itself, and for numbers that no part has."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    part = PartName(match["stem"], int(match["number"]), int(match["count"]))
    return part if 1 <= part.number <= part.total <= MAX_PARTS else None


def all_parts(name: str) -> tuple[str, ...]:
    """The names of all parts of the model that this file belongs to, in order."""
    part = part_name(name)
    if part is None:
        return (name,)
    return tuple(
        f"{part.stem}-{number:05d}-of-{part.total:05d}.gguf" for number in range(1, part.total + 1)
    )


def models_among(names: Iterable[str]) -> list[str]:
    """One name for each model: its own, or its first part's, whether that is there or not."""
    return sorted({all_parts(name)[0] for name in names})


def without_number(name: str) -> str:
    """NAME.gguf of any part of NAME."""
    part = part_name(name)
    return name if part is None else f"{part.stem}.gguf"


def part_paths(path: Path) -> list[Path]:
    """All files of the model that this one belongs to."""
    return [path.with_name(name) for name in all_parts(path.name)]


def missing_parts(missing: Iterable[str], count: int, where: object) -> str:
    """An error's text."""
    names = list(missing)
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    verb = "is" if len(names) == 1 else "are"
    return (
        f"{', '.join(names[:_SHOWN])}{more} {verb} missing from {where}: the model is split into "
        f"{count} files, and all must be there"
    )


def open_gguf(path: Path) -> GGUFFile:
    """The model in this file, or in all the files of which this one is a part. Raises
    ModelError."""
    if part_name(path.name) is not None:
        return _SplitFile(path)
    file = GGUFFile(path)
    count = file.metadata.get("split.count", 0)
    if type(count) is not int or count > 1:
        raise ModelError(
            f"{path} is one part of a model in {count!r:.20} files: give all of them their "
            f"names back, {path.stem:.60}-00001-of-{count!r:0>5.5}.gguf and so on, in one folder"
        )
    return file


class _SplitFile(GGUFFile):
    """All parts as one file: the first one's metadata, everyone's tensors."""

    def __init__(self, path: Path) -> None:
        paths = part_paths(path)
        missing = [part.name for part in paths if not part.is_file()]
        if missing:
            raise ModelError(missing_parts(missing, len(paths), path.parent))
        super().__init__(paths[0])
        parts: list[GGUFFile] = [self, *map(GGUFFile, paths[1:])]
        self._owners: dict[str, GGUFFile] = {}  # of tensors behind the first part
        for index, part in enumerate(parts):
            _check_numbers(part, index, len(parts))
            if index > 0:
                self._take(part)
        promised = self.metadata.get("split.tensors.count", len(self.tensors))
        if promised != len(self.tensors):
            raise ModelError(
                f"{self.path} promises {promised!r:.20} tensors in all parts, which have "
                f"{len(self.tensors)}: a part is of another model, or of another conversion of it"
            )

    def data(self, tensor: GGUFTensor) -> NDArray[uint8]:
        owner = self._owners.get(tensor.name)
        return super().data(tensor) if owner is None else owner.data(tensor)

    def _take(self, part: GGUFFile) -> None:
        for name, tensor in part.tensors.items():
            if name in self.tensors:
                owner = self._owners.get(name, self)
                raise ModelError(
                    f"tensor {name} is in {owner.path} and in {part.path.name}: one of them is a "
                    "part of another model"
                )
            self.tensors[name], self._owners[name] = tensor, part


def _check_numbers(part: GGUFFile, index: int, count: int) -> None:
    """What the file says of itself must be what its name says."""
    own_count, own_index = part.metadata.get("split.count"), part.metadata.get("split.no")
    if own_count != count:
        own = "no part of a model" if own_count is None else f"one of {own_count!r:.20} parts"
        raise ModelError(
            f"{part.path} says that it is {own}, and its name says one of {count}: fetch it again"
        )
    if own_index != index:
        number = own_index + 1 if type(own_index) is int else f"{own_index!r:.20}"
        raise ModelError(
            f"{part.path} says that it is part {number} of {count}, and its name says part "
            f"{index + 1}: the same part is here twice, or names were exchanged"
        )
