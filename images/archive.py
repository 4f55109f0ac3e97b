"""Reads an image's files out of an archive, as `docker save`, buildah and kaniko write it."""

from __future__ import annotations

import json
import tarfile
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_WHITEOUT = ".wh."


@dataclass(frozen=True, slots=True)
class Entry:
    """One file of the final file system."""

    name: str  # without a leading slash
    layer: int
    info: tarfile.TarInfo


class Image:
    """What a container would see: its configuration, and the layers' files over each other."""

    def __init__(self, archive: tarfile.TarFile) -> None:
        self._archive = archive
        (manifest,) = json.loads(self._file("manifest.json"))
        described = json.loads(self._file(manifest["Config"]))
        self.config: dict[str, Any] = described["config"]
        self.tags: list[str] = manifest.get("RepoTags") or []
        self._layers = [self._layer(name) for name in manifest["Layers"]]
        self.layers: list[str] = described["rootfs"]["diff_ids"]  # digests, the base's first
        self.files: dict[str, Entry] = {}
        for number, layer in enumerate(self._layers):
            self._lay(number, layer)

    def read(self, name: str) -> bytes:
        """A regular file's bytes; a hard link's are those of the file it names."""
        entry = self.files[name]
        file = self._layers[entry.layer].extractfile(entry.info)
        if file is None:
            raise IsADirectoryError(name)
        return file.read()

    def size(self, under: str = "") -> int:
        """Bytes of the files whose names begin so, unpacked."""
        return sum(e.info.size for name, e in self.files.items() if name.startswith(under))

    def _lay(self, number: int, layer: tarfile.TarFile) -> None:
        for info in layer:
            path = PurePosixPath(info.name.lstrip("./"))
            if path.name.startswith(_WHITEOUT):
                self._erase(path)
            elif path.name:
                self.files[str(path)] = Entry(str(path), number, info)

    def _erase(self, mark: PurePosixPath) -> None:
        if mark.name == f"{_WHITEOUT}{_WHITEOUT}.opq":
            gone, keeps_folder = mark.parent, True
        else:
            gone, keeps_folder = mark.with_name(mark.name.removeprefix(_WHITEOUT)), False
        for name in [n for n in self.files if n == str(gone) or n.startswith(f"{gone}/")]:
            if not (keeps_folder and name == str(gone)):
                del self.files[name]

    def _file(self, name: str) -> bytes:
        return self._open(name).read()

    def _layer(self, name: str) -> tarfile.TarFile:
        return tarfile.open(fileobj=self._open(name))

    def _open(self, name: str) -> IO[bytes]:
        member = self._archive.getmember(name)
        if member.issym():  # buildah names one layer twice
            member = self._archive.getmember(
                str(PurePosixPath(name).parent.joinpath(member.linkname)).replace("../", "")
            )
        file = self._archive.extractfile(member)
        if file is None:
            raise IsADirectoryError(name)
        return file


@contextmanager
def opened(path: Path) -> Iterator[Image]:
    with tarfile.open(path) as archive:
        yield Image(archive)
