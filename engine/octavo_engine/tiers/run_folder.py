"""Where files of KV blocks lie, as their store sees it: a folder of this machine, or a bucket.

No reader may see half of a file: a folder's are written under another name and renamed when they
are whole, a bucket's are put as one object.
"""

from __future__ import annotations

import os
import time
from contextlib import contextmanager
from io import FileIO
from typing import TYPE_CHECKING, NamedTuple, Protocol

from octavo_engine.tiers.run_format import TierFileError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path
    from typing import BinaryIO

    import numpy as np
    from numpy.typing import NDArray

    from octavo_engine.tiers.run_format import RunBytes

SUFFIX = ".kv"
PARTIAL = ".part"
STALE_S = 3600.0  # a file that is still being written after so long was left behind
RESCAN_S = 5.0  # after which files of other engines are found


class FileSpan(NamedTuple):
    """A part of a file that is about to be read."""

    offset: int
    num_bytes: int


class RunDraft(Protocol):
    """A file that nobody finds yet."""

    def open(self) -> AbstractContextManager[RunBytes]:
        """What was written, to be checked. Raises OSError."""

    def publish(self) -> None:
        """From now on it is found, whole. Raises OSError."""

    def discard(self) -> None:
        """Never raises."""


class RunFolder(Protocol):
    """The files of one engine's key. All but `is_read_only` may wait, and raise OSError;
    FileNotFoundError where a file is gone."""

    place: str  # for people
    is_read_only: bool
    rescan_s: float  # after which files of other engines are found
    num_readers: int  # files that are best read at once

    def names(self) -> set[str]:
        """Of the files that are whole."""

    def open(self, name: str, spans: Sequence[FileSpan] = ()) -> AbstractContextManager[RunBytes]:
        """`spans`: all that will be read of it, where that is known."""

    def draft(self, name: str, write: Callable[[BinaryIO], int]) -> RunDraft: ...

    def used(self, name: str) -> None:
        """It was read: of several engines each sees what the others use."""

    def remove(self, name: str) -> None:
        """It may be gone already."""

    def make_room(self, num_bytes: int, max_bytes: int) -> list[str]:
        """Delete the files, of any key, that were not used for longest, so that so much more
        fits. Returns those of this key."""


class _FileBytes:
    def __init__(self, file: FileIO) -> None:
        self._file = file
        self.num_bytes = os.fstat(file.fileno()).st_size

    def read_into(self, target: NDArray[np.uint8], offset: int) -> None:
        if os.preadv(self._file.fileno(), [target.data], offset) != target.nbytes:
            raise TierFileError("blocks are cut off")


@contextmanager
def _opened(path: Path) -> Iterator[RunBytes]:
    with FileIO(path) as file:
        yield _FileBytes(file)


class _FileDraft:
    def __init__(self, partial: Path, path: Path) -> None:
        self._partial, self._path = partial, path

    def open(self) -> AbstractContextManager[RunBytes]:
        return _opened(self._partial)

    def publish(self) -> None:
        self._partial.rename(self._path)

    def discard(self) -> None:
        try:
            self._partial.unlink(missing_ok=True)
        except OSError:
            return  # found again when it is stale


class LocalFolder:
    """A RunFolder on a file system, which several engines may share."""

    num_readers = 1

    def __init__(self, root: Path, key: bytes) -> None:
        """Raises OSError if it cannot be made."""
        self._root, self._folder = root, root / key.hex()
        self.place = str(self._folder)
        self.rescan_s = RESCAN_S
        self._folder.mkdir(parents=True, exist_ok=True)
        self.is_read_only = not os.access(self._folder, os.W_OK)

    def names(self) -> set[str]:
        present = set()
        with os.scandir(self._folder) as entries:
            for entry in entries:
                if entry.name.endswith(SUFFIX):
                    present.add(entry.name)
                elif entry.name.endswith(PARTIAL):
                    _remove_stale(self._folder / entry.name)
        return present

    def open(self, name: str, spans: Sequence[FileSpan] = ()) -> AbstractContextManager[RunBytes]:
        return _opened(self._folder / name)

    def draft(self, name: str, write: Callable[[BinaryIO], int]) -> RunDraft:
        path = self._folder / name
        draft = _FileDraft(path.with_suffix(PARTIAL), path)
        try:
            with path.with_suffix(PARTIAL).open("xb") as file:
                write(file)
        except BaseException:
            draft.discard()
            raise
        return draft

    def used(self, name: str) -> None:
        if not self.is_read_only:
            os.utime(self._folder / name)

    def remove(self, name: str) -> None:
        (self._folder / name).unlink(missing_ok=True)

    def make_room(self, num_bytes: int, max_bytes: int) -> list[str]:
        files = []
        for path in self._root.glob(f"*/*{SUFFIX}"):
            try:
                state = path.stat()
            except FileNotFoundError:
                continue
            files.append((state.st_mtime, state.st_size, path))
        total = num_bytes + sum(size for _, size, _ in files)
        removed = []
        for _, size, path in sorted(files):
            if total <= max_bytes:
                break
            path.unlink(missing_ok=True)
            if path.parent == self._folder:
                removed.append(path.name)
            total -= size
        return removed


def _remove_stale(path: Path) -> None:
    try:
        if time.time() - path.stat().st_mtime > STALE_S:
            path.unlink(missing_ok=True)
    except OSError:
        return  # its writer renamed it, or it is another's to delete
