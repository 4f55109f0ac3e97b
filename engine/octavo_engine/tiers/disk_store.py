"""KV blocks on disk: an index of the files in a folder that several engines may share.

Files are written under another name and renamed when they are whole, so no reader sees half of
one. What is wrong with a file is logged, and its blocks are forgotten: they are computed again.
A file of another encryption key is left alone, since an engine that has the key may use it.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import uuid
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, NamedTuple

from octavo_engine.tiers.disk_format import (
    NoKeyForFile,
    TierFileError,
    read_header,
    read_page,
    write_run,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from octavo_engine.encryption import EncryptionKeys, FileCipher
    from octavo_engine.tiers.disk_format import BlockPlace
    from octavo_engine.tiers.page import BlockName, OnChange, Page

logger = logging.getLogger(__name__)

MAX_PENDING_BYTES = 256 << 20  # that wait to be written; more is not saved
MAX_RUN_BYTES = 32 << 20  # of pages in one file
RESCAN_S = 5.0  # after which files of other engines are found
STALE_S = 3600.0  # a file that is still being written after so long was left behind
_SUFFIX, _PARTIAL = ".kv", ".part"


class StoredRun(NamedTuple):
    """A file of this engine's key."""

    path: Path
    num_bytes: int
    places: dict[BlockName, BlockPlace]
    cipher: FileCipher | None


class DiskStore:
    """`put` and `contains` never wait for the disk; two threads do."""

    def __init__(
        self,
        folder: Path,
        key: bytes,
        *,
        page_bytes: int,
        max_bytes: int,
        encryption: EncryptionKeys | None = None,
    ) -> None:
        """With `encryption`, files are encrypted. Raises OSError if the folder cannot be made or
        listed."""
        self._encryption = encryption
        self._root, self._folder = folder, folder / key.hex()
        self._key, self._page_bytes, self._max_bytes = key, page_bytes, max_bytes
        self._lock = threading.Lock()  # of the five below
        self._runs: dict[str, StoredRun] = {}  # by file name
        self._index: dict[BlockName, str] = {}  # the file that has it
        self._pending: dict[BlockName, Page] = {}  # waits to be written
        self._dropped: set[BlockName] = set()  # spoiled while it was being written
        self._unreadable: set[str] = set()  # files of other encryption keys
        self.listeners: list[OnChange] = []  # called on its threads, and by `drop`
        self.num_unsaved = 0  # blocks that were not written: too slow, no room or an error
        self._is_closed = False
        self._jobs: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._to_write: SimpleQueue[BlockName | None] = SimpleQueue()
        self._folder.mkdir(parents=True, exist_ok=True)
        self._is_read_only = not os.access(self._folder, os.W_OK)
        if self._is_read_only:
            logger.warning("%s is not writable: KV blocks are read from it only", self._folder)
        self._scan()
        self._threads = [
            threading.Thread(target=target, name=name, daemon=True)
            for target, name in (
                (self._write_all, "kv-disk-write"),
                (self._read_all, "kv-disk-read"),
            )
        ]
        for thread in self._threads:
            thread.start()

    def __contains__(self, name: object) -> bool:
        return name in self._index or name in self._pending

    @property
    def num_blocks(self) -> int:
        return len(self._index)

    @property
    def num_bytes(self) -> int:
        with self._lock:
            return sum(run.num_bytes for run in self._runs.values())

    def put(self, name: BlockName, page: Page) -> None:
        """Have it written, unless too much waits for that already."""
        with self._lock:
            if name in self:
                return
            if self._is_read_only or (
                (len(self._pending) + 1) * self._page_bytes > MAX_PENDING_BYTES
            ):
                self.num_unsaved += 1
                return
            self._pending[name] = page
            self._dropped.discard(name)
        self._to_write.put(name)

    def fetch(self, names: Sequence[BlockName], done: Callable[[list[Page | None]], None]) -> None:
        """Read pages, None where one is not to be had; `done` is called on the reading thread."""
        self._jobs.put(lambda: done(self._read(names)))

    def drop(self, names: Iterable[BlockName]) -> None:
        """Forget blocks that must never be found again, and the files they are in."""
        with self._lock:
            names = list(names)
            files = {self._index[name] for name in names if name in self._index}
            for name in names:
                if self._pending.pop(name, None) is not None:
                    self._dropped.add(name)
                    self._report(name, is_there=name in self._index)
        for file in files:
            self._remove(file)

    def flush(self, timeout_s: float = 10.0) -> bool:
        """Wait until all is written; whether it is. For a clean end and for tests."""
        end = time.monotonic() + timeout_s
        while self._pending and time.monotonic() < end:
            time.sleep(0.005)
        return not self._pending

    def close(self) -> None:
        self.flush()
        self._is_closed = True
        self._to_write.put(None)
        self._jobs.put(lambda: None)
        for thread in self._threads:
            thread.join(timeout=2.0)  # a hanging disk does not keep the process

    # -- the reading thread ------------------------------------------------------------------------

    def _read_all(self) -> None:
        while not self._is_closed:
            job = self._jobs.get()
            try:
                job()
            except Exception:
                logger.exception("Unhandled error while KV blocks were read")

    def _read(self, names: Sequence[BlockName]) -> list[Page | None]:
        with self._lock:
            found: dict[BlockName, Page] = {
                n: self._pending[n] for n in names if n in self._pending
            }
            by_file: dict[str, list[BlockName]] = {}
            for name in names:
                if name not in found and name in self._index:
                    by_file.setdefault(self._index[name], []).append(name)
            runs = {file: self._runs[file] for file in by_file}
        for file, wanted in by_file.items():
            found |= self._read_run(runs[file], wanted)
        return [found.get(name) for name in names]

    def _read_run(self, run: StoredRun, names: list[BlockName]) -> dict[BlockName, Page]:
        try:
            with run.path.open("rb", buffering=0) as file:
                pages = {
                    n: read_page(file, run.places[n], self._page_bytes, run.cipher) for n in names
                }
            if not self._is_read_only:
                os.utime(run.path)  # of several engines each sees what the others use
        except FileNotFoundError:
            self._forget(run.path.name)  # another engine made room
            return {}
        except (OSError, TierFileError) as error:
            logger.warning("Dropped %s: %s", run.path, error)
            self._remove(run.path.name)
            return {}
        return pages

    # -- the writing thread ------------------------------------------------------------------------

    def _write_all(self) -> None:
        scanned_at = time.monotonic()
        while not self._is_closed:
            try:
                names = self._next_run()
                if names:
                    self._write(names)
                if time.monotonic() - scanned_at >= RESCAN_S:
                    self._scan()
                    scanned_at = time.monotonic()
            except Exception:
                logger.exception("Unhandled error while KV blocks were written")

    def _next_run(self) -> list[BlockName]:
        """Blocks that wait, as many as go into one file; empty after a while without any."""
        names: list[BlockName] = []
        try:
            while len(names) * self._page_bytes < MAX_RUN_BYTES:
                name = (
                    self._to_write.get_nowait() if names else self._to_write.get(timeout=RESCAN_S)
                )
                if name is None:
                    break
                names.append(name)
        except Empty:
            pass
        return names

    def _write(self, names: list[BlockName]) -> None:
        with self._lock:
            pages = {name: self._pending[name] for name in names if name in self._pending}
        if not pages:
            return
        path = self._folder / f"{uuid.uuid4().hex}{_SUFFIX}"
        partial = path.with_suffix(_PARTIAL)
        try:
            self._make_room(len(pages) * self._page_bytes)
            with partial.open("xb") as file:
                num_bytes = write_run(
                    file, self._key, list(pages), list(pages.values()), self._encryption
                )
            with partial.open("rb") as file:
                header = read_header(file, self._key, self._page_bytes, self._encryption)
            self._publish(partial, StoredRun(path, num_bytes, *header))
        except (OSError, TierFileError) as error:
            self.num_unsaved += len(pages)
            logger.warning("Could not write KV blocks to %s: %s", self._folder, error)
            partial.unlink(missing_ok=True)
        finally:
            with self._lock:
                for name in pages:
                    self._pending.pop(name, None)
                    if name not in self._index:
                        self._report(name, is_there=False)

    def _publish(self, partial: Path, run: StoredRun) -> None:
        with self._lock:
            if self._dropped.isdisjoint(run.places):
                partial.rename(run.path)
                self._add(run)
                return
            self._dropped.difference_update(run.places)
        partial.unlink(missing_ok=True)

    def _make_room(self, num_bytes: int) -> None:
        """Delete files, of any model, that were not used for longest. Raises OSError."""
        if num_bytes > self._max_bytes:
            raise OSError("a run of blocks is larger than --kv-disk-size")
        files = []
        for path in self._root.glob(f"*/*{_SUFFIX}"):
            try:
                state = path.stat()
            except FileNotFoundError:
                continue
            files.append((state.st_mtime, state.st_size, path))
        total = num_bytes + 4096 + sum(size for _, size, _ in files)
        for _, size, path in sorted(files):
            if total <= self._max_bytes:
                break
            path.unlink(missing_ok=True)
            if path.parent == self._folder:
                self._forget(path.name)
            total -= size

    # -- the index ---------------------------------------------------------------------------------

    def _scan(self) -> None:
        """Find files that came, and forget those that went. Raises OSError."""
        present = set()
        with os.scandir(self._folder) as entries:
            for entry in entries:
                if entry.name.endswith(_SUFFIX):
                    present.add(entry.name)
                elif entry.name.endswith(_PARTIAL):
                    self._remove_stale(self._folder / entry.name)
        for file in self._runs.keys() - present:
            self._forget(file)
        self._unreadable &= present
        for file in present - self._runs.keys() - self._unreadable:
            self._take_in(self._folder / file)

    def _take_in(self, path: Path) -> None:
        try:
            with path.open("rb") as file:
                header = read_header(file, self._key, self._page_bytes, self._encryption)
                num_bytes = os.fstat(file.fileno()).st_size
        except FileNotFoundError:
            return
        except NoKeyForFile as error:
            if not self._unreadable:
                logger.warning("Ignored %s and others like it: %s", path, error)
            self._unreadable.add(path.name)
            return
        except (OSError, TierFileError) as error:
            logger.warning("Dropped %s: %s", path, error)
            self._remove(path.name)
            return
        with self._lock:
            self._add(StoredRun(path, num_bytes, *header))

    def _add(self, run: StoredRun) -> None:
        self._runs[run.path.name] = run
        for name in run.places:
            self._index[name] = run.path.name
            self._report(name, is_there=True)

    def _forget(self, file: str) -> None:
        with self._lock:
            run = self._runs.pop(file, None)
            for name in () if run is None else run.places:
                if self._index.get(name) == file:
                    del self._index[name]
                    self._report(name, is_there=False)

    def _report(self, name: BlockName, *, is_there: bool) -> None:
        for listener in self.listeners:
            listener(name, is_there)

    def _remove(self, file: str) -> None:
        self._forget(file)
        try:
            (self._folder / file).unlink(missing_ok=True)
        except OSError as error:
            logger.warning("Could not delete %s: %s", self._folder / file, error)

    def _remove_stale(self, path: Path) -> None:
        try:
            if time.time() - path.stat().st_mtime > STALE_S:
                path.unlink(missing_ok=True)
        except OSError:
            return  # its writer renamed it, or it is another's to delete
