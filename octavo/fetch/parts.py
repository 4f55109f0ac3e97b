"""What is there of a file that is not whole yet, kept across restarts.

    NAME.part      the bytes, written where they belong
    NAME.json      which ranges are whole, of which state of the source (its ETag and size)
    NAME.done      the SHA-256 of a file that has got its name

A range counts as whole only after its bytes were given to the disk.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from pathlib import Path

    from octavo.fetch.source import RemoteFile

FOLDER = ".octavo-parts"
_HASH_BYTES = 2**20


class StoredPart(NamedTuple):
    """A file that is whole."""

    name: str
    size: int
    sha256: str


@dataclass(slots=True)
class Journal:
    """Of one file: its source's metadata, and the ranges that are stored."""

    size: int
    etag: str
    range_bytes: int
    done: set[int] = field(default_factory=set)
    begun: dict[int, int] = field(default_factory=dict)  # range → where to go on; not kept

    @property
    def num_ranges(self) -> int:
        return -(-self.size // self.range_bytes)

    @property
    def left(self) -> list[int]:
        return [index for index in range(self.num_ranges) if index not in self.done]

    @property
    def num_bytes_done(self) -> int:
        return sum(end - start for start, end in map(self.bounds, self.done))

    def bounds(self, index: int) -> tuple[int, int]:
        start = index * self.range_bytes
        return start, min(self.size, start + self.range_bytes)


class FileParts:
    """Of one file in `folder`. Ranges may be marked from many threads."""

    def __init__(self, folder: Path, file: RemoteFile) -> None:
        self._file = file
        self._origin = file.url or str(file.path)
        self._folder = folder / FOLDER
        self._folder.mkdir(exist_ok=True)
        self._target = folder / file.name
        self._journal = self._folder / f"{file.name}.json"
        self._note = self._folder / f"{file.name}.done"
        self._lock = threading.Lock()
        self.path = self._folder / f"{file.name}.part"

    def read(self) -> Journal | None:
        """None where nothing of use is there."""
        file = self._file
        try:
            fields = json.loads(self._journal.read_text())
            journal = Journal(
                int(fields["size"]),
                str(fields["etag"]),
                int(fields["range_bytes"]),
                set(fields["done"]),
            )
            is_same = fields["url"] == self._origin and file.size in (None, journal.size)
            is_sound = (
                journal.range_bytes > 0
                and all(0 <= index < journal.num_ranges for index in journal.done)
                and self.path.is_file()
                and bool(journal.etag or file.sha256)  # else a change would go unnoticed
            )
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None
        return journal if is_same and is_sound else None

    def write(self, journal: Journal) -> None:
        fields = {
            "url": self._origin, "size": journal.size, "etag": journal.etag,
            "range_bytes": journal.range_bytes, "done": sorted(journal.done),
        }  # fmt: skip
        temporary = self._journal.with_suffix(".new")
        temporary.write_text(json.dumps(fields))
        temporary.replace(self._journal)

    def mark(self, journal: Journal, index: int, out: int) -> None:
        os.fdatasync(out)
        with self._lock:
            journal.done.add(index)
            self.write(journal)

    def forget(self) -> None:
        self._journal.unlink(missing_ok=True)
        self.path.unlink(missing_ok=True)

    def finish(self, stored: StoredPart) -> None:
        """Gives it its name. First its digest is noted: the source may provide
        none."""
        self._note.write_text(json.dumps({"url": self._origin, "sha256": stored.sha256}))
        self.path.replace(self._target)
        self._journal.unlink(missing_ok=True)

    @property
    def noted_sha256(self) -> str:
        """Of the file under its name, from an earlier attempt; or ''."""
        try:
            fields = json.loads(self._note.read_text())
            return str(fields["sha256"]) if fields["url"] == self._origin else ""
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return ""


def remove(folder: Path) -> None:
    """Of a fetch that is whole."""
    parts = folder / FOLDER
    if parts.is_dir():
        for each in parts.iterdir():
            each.unlink(missing_ok=True)
        with suppress(OSError):
            parts.rmdir()


def digests(path: Path, *, with_md5: bool) -> tuple[str, str]:
    """SHA-256, and the MD5 or ''."""
    sha256 = hashlib.sha256()
    md5 = hashlib.md5(usedforsecurity=False)
    with path.open("rb") as file:
        while block := file.read(_HASH_BYTES):
            sha256.update(block)
            if with_md5:
                md5.update(block)
    return sha256.hexdigest(), md5.hexdigest() if with_md5 else ""
