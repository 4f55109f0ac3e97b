"""Brings files into a folder one by one, checks each, and only then gives it its name."""

from __future__ import annotations

import hashlib
import os
from typing import TYPE_CHECKING

from octavo.fetch.errors import Changed, FetchError, FetchReason, of_disk
from octavo.fetch.parts import FileParts, StoredPart, digests
from octavo.fetch.transfer import Missing, Transfer

if TYPE_CHECKING:
    from pathlib import Path

    from octavo.fetch.source import RemoteFile
    from octavo.fetch.transfer import Means

_COPY_BYTES = 2**20
_RESTARTS = 2  # from the first byte, where the source changed under us


class Downloader:
    """Into `folder`."""

    def __init__(self, folder: Path, means: Means) -> None:
        self._folder = folder
        self._means = means

    def fetch(self, file: RemoteFile) -> StoredPart | None:
        """Whole and checked, under its name. None where it does not exist and need not.
        Raises FetchError."""
        try:
            parts = FileParts(self._folder, file)
            if (stored := self._stored(file, parts)) is not None:
                return stored
            if file.path is not None:
                return self._copy(file, file.path, parts)
            return self._download(file, parts)
        except OSError as error:
            raise of_disk(error, self._folder) from error

    def _stored(self, file: RemoteFile, parts: FileParts) -> StoredPart | None:
        """Of an earlier attempt, or put there by hand: it is checked in any case."""
        target = self._folder / file.name
        if not target.is_file():
            return None
        size = target.stat().st_size
        if file.size not in (None, size):
            return None
        sha256, md5 = digests(target, with_md5=bool(file.md5))
        if not (sha256 == (file.sha256 or parts.noted_sha256) or (file.md5 and file.md5 == md5)):
            return None
        if file.size is None:
            self._means.progress.grow(size)
        self._means.progress.add(size)
        return StoredPart(file.name, size, sha256)

    def _copy(self, file: RemoteFile, source: Path, parts: FileParts) -> StoredPart:
        digest = hashlib.sha256()
        with source.open("rb") as reader, parts.path.open("wb") as writer:
            while block := reader.read(_COPY_BYTES):
                writer.write(block)
                digest.update(block)
                self._means.progress.add(len(block))
            size = writer.tell()
            writer.flush()
            os.fsync(writer.fileno())
        stored = StoredPart(file.name, size, digest.hexdigest())
        parts.finish(stored)
        return stored

    def _download(self, file: RemoteFile, parts: FileParts) -> StoredPart | None:
        for attempt in range(_RESTARTS + 1):
            transfer = Transfer(file, parts, self._means)
            try:
                transfer.run()
            except Missing:
                return None
            except Changed:
                parts.forget()
                transfer.take_back()
                if attempt == _RESTARTS:
                    raise
                continue
            size = parts.path.stat().st_size
            sha256, md5 = digests(parts.path, with_md5=bool(file.md5))
            problem = _mismatch(file, size, sha256, md5 if transfer.is_md5_known else "")
            if not problem:
                stored = StoredPart(file.name, size, sha256)
                parts.finish(stored)
                return stored
            parts.forget()
            transfer.take_back()
            # The part that was there before may be to blame: once more, from the first byte.
            if not transfer.was_resumed:
                raise FetchError(
                    FetchReason.DIGEST_MISMATCH,
                    f"{file.name} is not what its source promises: {problem}; fetch it again, and "
                    "if that does not help, the copy at the source is broken",
                )
        raise Changed(file.name)


def _mismatch(file: RemoteFile, size: int, sha256: str, md5: str) -> str:
    if file.size is not None and file.size != size:
        return f"{size} bytes instead of {file.size}"
    if file.sha256 and file.sha256 != sha256:
        return f"SHA-256 {sha256} instead of {file.sha256}"
    if file.md5 and md5 and file.md5 != md5:
        return f"MD5 {md5} instead of {file.md5}"
    return ""
