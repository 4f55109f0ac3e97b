"""KV blocks in files that outlive the engine: an index of those in a folder, on disk or shared.

What is wrong with a file is logged, and its blocks are forgotten: they are computed again. A file
of another encryption key is left alone, since an engine that has the key may use it. A shared store
that fails is left alone for a while, and its files are never deleted for that.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, NamedTuple

from octavo_engine.tiers.page import is_state
from octavo_engine.tiers.run_folder import SUFFIX, FileSpan
from octavo_engine.tiers.run_format import (
    NoKeyForFile,
    TierFileError,
    read_header,
    read_page,
    stored_bytes,
    write_run,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from typing import BinaryIO

    from octavo_engine.encryption import EncryptionKeys, FileCipher
    from octavo_engine.tiers.page import BlockName, OnChange, Page, PageSizes
    from octavo_engine.tiers.run_folder import RunDraft, RunFolder
    from octavo_engine.tiers.run_format import BlockPlace

logger = logging.getLogger(__name__)

MAX_PENDING_BYTES = 256 << 20  # that wait to be written; more is not saved
MAX_RUN_BYTES = 32 << 20  # of pages in one file
HEAD_BYTES = 4096  # for the header of a file, beside its pages
FIRST_SCAN_S = 5.0  # that a start waits for a shared store to say what it has
RETRY_S, MAX_RETRY_S = 5.0, 60.0  # after a shared store failed; doubled each time


class StoredRun(NamedTuple):
    """A file of this engine's key."""

    file: str
    num_bytes: int
    page_bytes: int
    places: dict[BlockName, BlockPlace]
    cipher: FileCipher | None


class _Pauses:
    """After failures of a shared store: neither it nor those who wait for it gain by more."""

    def __init__(self) -> None:
        self._wait_s = RETRY_S
        self._until = 0.0

    @property
    def is_on(self) -> bool:
        return time.monotonic() < self._until

    def begin(self) -> float:
        """Returns for how long."""
        wait_s, self._wait_s = self._wait_s, min(2 * self._wait_s, MAX_RETRY_S)
        self._until = time.monotonic() + wait_s
        return wait_s

    def end(self) -> None:
        self._wait_s = RETRY_S


class RunStore:
    """`put` and `contains` never wait for the folder; its own threads do."""

    def __init__(
        self,
        folder: RunFolder,
        key: bytes,
        *,
        sizes: PageSizes,
        max_bytes: int,
        encryption: EncryptionKeys | None = None,
        is_shared: bool = False,
    ) -> None:
        """With `encryption`, files are encrypted. Raises OSError if a folder that is not shared
        cannot be listed."""
        self._encryption, self._is_shared = encryption, is_shared
        self.folder = folder
        self._key, self._sizes, self._max_bytes = key, sizes, max_bytes
        self._lock = threading.Lock()  # of the six below
        self._runs: dict[str, StoredRun] = {}  # by file name
        self._index: dict[BlockName, str] = {}  # the file that has it
        self._pending: dict[BlockName, Page] = {}  # waits to be written
        self._pending_bytes = 0
        self._dropped: set[BlockName] = set()  # spoiled while it was being written
        self._unreadable: set[str] = set()  # files of other encryption keys
        self._reading, self._writing = _Pauses(), _Pauses()
        self.listeners: list[OnChange] = []  # called on its threads, and by `drop`
        self.num_unsaved = 0  # blocks that were not written: too slow, no room or an error
        self._closed = threading.Event()
        self._jobs: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._to_write: SimpleQueue[BlockName | None] = SimpleQueue()
        if folder.is_read_only:
            logger.warning("%s is not writable: KV blocks are read from it only", folder.place)
        self._scanned = threading.Event()
        if not is_shared:
            self._scan()
            self._scanned.set()
        self._readers = ThreadPoolExecutor(folder.num_readers, "kv-read")
        self._threads = [
            threading.Thread(target=target, name=name, daemon=True)
            for target, name in (
                (self._write_all, "kv-write"),
                (self._read_all, "kv-read-jobs"),
                (self._scan_all, "kv-scan"),
            )
        ]
        for thread in self._threads:
            thread.start()
        self._scanned.wait(FIRST_SCAN_S)

    def __contains__(self, name: object) -> bool:
        if name in self._pending:
            return True
        return name in self._index and not self._reading.is_on

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
            if name in self._index or name in self._pending:
                return
            num_bytes = self._pending_bytes + page.nbytes
            is_full = bool(self._pending) and num_bytes > MAX_PENDING_BYTES
            if self.folder.is_read_only or self._writing.is_on or is_full:
                self.num_unsaved += 1
                return
            self._pending[name] = page
            self._pending_bytes += page.nbytes
            self._dropped.discard(name)
        self._to_write.put(name)

    def fetch(
        self,
        names: Sequence[BlockName],
        done: Callable[[list[Page | None]], None],
        *,
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> None:
        """Read pages, None where one is not to be had; `done` is called on the reading thread.
        Nothing more is read once `is_wanted` is false: others wait for a slow store too."""
        self._jobs.put(lambda: done(self._read(names, is_wanted)))

    def drop(self, names: Iterable[BlockName]) -> None:
        """Forget blocks that must never be found again, and the files they are in."""
        with self._lock:
            names = list(names)
            files = {self._index[name] for name in names if name in self._index}
            for name in names:
                if self._end_pending(name):
                    self._dropped.add(name)
                    self._report(name, is_there=name in self._index)
        for file in files:
            if self._is_shared:  # which may take its time
                self._forget(file)
                self._jobs.put(partial(self._remove, file))
            else:
                self._remove(file)

    def flush(self, timeout_s: float = 10.0) -> bool:
        """Wait until all is written; whether it is. For a clean end and for tests."""
        end = time.monotonic() + timeout_s
        while self._pending and time.monotonic() < end:
            time.sleep(0.005)
        return not self._pending

    def close(self) -> None:
        self.flush()
        self._closed.set()
        self._to_write.put(None)
        self._jobs.put(lambda: None)
        for thread in self._threads:
            thread.join(timeout=2.0)  # a hanging disk does not keep the process
        self._readers.shutdown(wait=False, cancel_futures=True)

    # -- the reading threads -----------------------------------------------------------------------

    def _read_all(self) -> None:
        while not self._closed.is_set():
            job = self._jobs.get()
            try:
                job()
            except Exception:
                logger.exception("Unhandled error while KV blocks were read")

    def _read(self, names: Sequence[BlockName], is_wanted: Callable[[], bool]) -> list[Page | None]:
        with self._lock:
            found: dict[BlockName, Page] = {
                n: self._pending[n] for n in names if n in self._pending
            }
            by_file: dict[str, list[BlockName]] = {}
            for name in names:
                if name not in found and name in self._index:
                    by_file.setdefault(self._index[name], []).append(name)
            runs = [(self._runs[file], wanted) for file, wanted in by_file.items()]

        def read(task: tuple[StoredRun, list[BlockName]]) -> dict[BlockName, Page]:
            is_useless = self._reading.is_on or not is_wanted()
            return {} if is_useless else self._read_run(*task)

        is_one = self.folder.num_readers == 1 or len(runs) == 1
        for pages in map(read, runs) if is_one else self._readers.map(read, runs):
            found |= pages
        return [found.get(name) for name in names]

    def _read_run(self, run: StoredRun, names: list[BlockName]) -> dict[BlockName, Page]:
        size = stored_bytes(run.page_bytes, run.cipher)
        spans = sorted(FileSpan(run.places[name].offset, size) for name in names)
        try:
            with self.folder.open(run.file, spans) as file:
                pages = {
                    n: read_page(file, run.places[n], run.page_bytes, run.cipher) for n in names
                }
            self.folder.used(run.file)
        except FileNotFoundError:
            self._forget(run.file)  # another engine made room
            return {}
        except TierFileError as error:
            self._drop_file(run.file, error)
            return {}
        except OSError as error:
            if self._is_shared:
                self._pause_reading(error)
            else:
                self._drop_file(run.file, error)
            return {}
        self._reading.end()
        return pages

    def _pause_reading(self, error: OSError) -> None:
        logger.warning(
            "No KV blocks from %s for %.0f s: %s", self.folder.place, self._reading.begin(), error
        )

    # -- the writing thread ------------------------------------------------------------------------

    def _write_all(self) -> None:
        while not self._closed.is_set():
            try:
                names = self._next_run()
                states = [name for name in names if is_state(name)]
                blocks = [name for name in names if not is_state(name)]
                for alike in (blocks, states):
                    if alike:
                        self._write(alike)
            except Exception:
                logger.exception("Unhandled error while KV blocks were written")

    def _next_run(self) -> list[BlockName]:
        """Blocks that wait, as many as go into one file, and states; empty at the end."""
        names: list[BlockName] = []
        num_bytes = 0
        try:
            while num_bytes < MAX_RUN_BYTES:
                name = self._to_write.get_nowait() if names else self._to_write.get()
                if name is None:
                    break
                names.append(name)
                num_bytes += self._sizes.of(name)
        except Empty:
            pass
        return names

    def _write(self, names: list[BlockName]) -> None:
        with self._lock:
            pages = {name: self._pending[name] for name in names if name in self._pending}
        if not pages:
            return
        file = f"{uuid.uuid4().hex}{SUFFIX}"
        try:
            self._make_room(self._sizes.sum(pages) + HEAD_BYTES)
            self._write_file(file, pages)
            self._writing.end()
        except (OSError, TierFileError) as error:
            self.num_unsaved += len(pages)
            logger.warning("Could not write KV blocks to %s: %s", self.folder.place, error)
            if self._is_shared:
                self._writing.begin()
        finally:
            with self._lock:
                for name in pages:
                    self._end_pending(name)
                    if name not in self._index:
                        self._report(name, is_there=False)

    def _end_pending(self, name: BlockName) -> bool:
        """It does not wait any more; whether it did. The lock is held."""
        page = self._pending.pop(name, None)
        if page is not None:
            self._pending_bytes -= page.nbytes
        return page is not None

    def _write_file(self, file: str, pages: dict[BlockName, Page]) -> None:
        """Raises OSError, TierFileError."""

        def write(target: BinaryIO) -> int:
            return write_run(target, self._key, list(pages), list(pages.values()), self._encryption)

        draft = self.folder.draft(file, write)
        try:
            with draft.open() as written:
                header = read_header(written, self._key, self._sizes, self._encryption)
                num_bytes = written.num_bytes
            self._publish(draft, StoredRun(file, num_bytes, *header))
        except BaseException:
            draft.discard()
            raise

    def _publish(self, draft: RunDraft, run: StoredRun) -> None:
        """Unless a block of it was dropped meanwhile. Raises OSError."""
        with self._lock:
            is_spoiled = self._forgive(run)
        if is_spoiled:
            draft.discard()
            return
        draft.publish()
        with self._lock:  # not held before: a shared store may take its time
            is_spoiled = self._forgive(run)
            if not is_spoiled:
                self._add(run)
        if is_spoiled:
            self._remove(run.file)

    def _forgive(self, run: StoredRun) -> bool:
        """Whether a block of it was dropped, which is settled by its file going."""
        is_spoiled = not self._dropped.isdisjoint(run.places)
        self._dropped.difference_update(run.places)
        return is_spoiled

    def _make_room(self, num_bytes: int) -> None:
        """Raises OSError."""
        if num_bytes - HEAD_BYTES > self._max_bytes:
            flag = "--kv-shared-size" if self._is_shared else "--kv-disk-size"
            raise OSError(f"a run of blocks is larger than {flag}")
        for file in self.folder.make_room(num_bytes, self._max_bytes):
            self._forget(file)

    # -- the index ---------------------------------------------------------------------------------

    def _scan_all(self) -> None:
        if self._is_shared:
            self._try_scan()
            self._scanned.set()
        while not self._closed.wait(self.folder.rescan_s):
            self._try_scan()

    def _try_scan(self) -> None:
        if self._reading.is_on:
            return
        try:
            self._scan()
        except OSError as error:
            if self._is_shared:
                self._pause_reading(error)
            else:
                logger.warning("Could not list %s: %s", self.folder.place, error)
        except Exception:
            logger.exception("Unhandled error while files of KV blocks were looked for")

    def _scan(self) -> None:
        """Find files that came, and forget those that went. Raises OSError."""
        with self._lock:
            before = set(self._runs)
        present = self.folder.names()
        for file in before - present:
            self._forget(file)
        self._unreadable &= present
        new = sorted(present - before - self._unreadable)
        is_one = self.folder.num_readers == 1
        for _ in map(self._take_in, new) if is_one else self._readers.map(self._take_in, new):
            pass

    def _take_in(self, name: str) -> None:
        if self._closed.is_set() or self._reading.is_on or name in self._runs:
            return
        try:
            with self.folder.open(name) as file:
                header = read_header(file, self._key, self._sizes, self._encryption)
                num_bytes = file.num_bytes
        except FileNotFoundError:
            return
        except NoKeyForFile as error:
            if not self._unreadable:
                logger.warning(
                    "Ignored %s in %s and others like it: %s", name, self.folder.place, error
                )
            self._unreadable.add(name)
            return
        except TierFileError as error:
            self._drop_file(name, error)
            return
        except OSError as error:
            if self._is_shared:
                self._pause_reading(error)
            else:
                self._drop_file(name, error)
            return
        with self._lock:
            self._add(StoredRun(name, num_bytes, *header))

    def _drop_file(self, name: str, error: Exception) -> None:
        logger.warning("Dropped %s in %s: %s", name, self.folder.place, error)
        self._remove(name)

    def _add(self, run: StoredRun) -> None:
        self._runs[run.file] = run
        for name in run.places:
            self._index[name] = run.file
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
        if self.folder.is_read_only:
            self._unreadable.add(file)
            return
        try:
            self.folder.remove(file)
        except OSError as error:
            logger.warning("Could not delete %s in %s: %s", file, self.folder.place, error)
            self._unreadable.add(file)
