"""One file over HTTP: parallel ranges, each going on at the byte where it broke."""

from __future__ import annotations

import os
import re
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo.fetch.errors import Changed, FetchError, FetchReason, Passing, of_status
from octavo.fetch.parts import Journal

if TYPE_CHECKING:
    from collections.abc import Callable

    from octavo.fetch.parts import FileParts
    from octavo.fetch.progress import FetchProgress
    from octavo.fetch.source import RemoteFile
    from octavo_common.remote.http import Http, HttpResponse

RANGE_BYTES = 32 * 2**20
_ENCRYPTION = "x-amz-server-side-encryption"
_OWN_KEY = f"{_ENCRYPTION}-customer-algorithm"
_CONTENT_RANGE = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18})")


@dataclass(frozen=True, slots=True)
class TransferPatience:
    """With one range; progress makes it forget its failures."""

    num_failures: int = 6
    first_s: float = 0.5
    longest_s: float = 30.0

    def pause_s(self, failures: int, server_s: float | None) -> float:
        own = self.first_s * 2 ** (failures - 1)
        return float(min(self.longest_s, max(own, server_s or 0.0)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Means:
    """How to transfer."""

    http: Http
    progress: FetchProgress
    num_workers: int = 4
    range_bytes: int = RANGE_BYTES
    patience: TransferPatience = TransferPatience()  # frozen
    sleep: Callable[[float], object] | None = None  # None: until others give up too


class Missing(Exception):
    """An optional file is not there."""


class Transfer:
    """One attempt at one file."""

    def __init__(self, file: RemoteFile, parts: FileParts, means: Means) -> None:
        self._file = file
        self._parts = parts
        self._means = means
        self._is_cancelled = threading.Event()
        self._lock = threading.Lock()
        self._counted = 0  # bytes that were reported as progress
        self.was_resumed = False
        self.is_md5_known = True  # whether the listed MD5 is one

    def run(self) -> None:
        """Into the part's file. Raises FetchError: Changed where it has to begin anew; Missing."""
        path = self._parts.path
        journal = self._parts.read()
        with path.open("r+b" if path.exists() else "w+b") as out:
            if journal is None:
                journal = self._first(out.fileno())
            else:
                self._grow(journal.size)
                self._count(journal.num_bytes_done)
                self.was_resumed = bool(journal.done)
            if journal is not None:
                self._ranges(journal, out.fileno())
            os.fsync(out.fileno())

    def take_back(self) -> None:
        """What was counted is worth nothing."""
        self._count(-self._counted)

    def _first(self, out: int) -> Journal | None:
        """The first range gives size and ETag. None where the server knows no ranges, and the whole
        file has been read."""
        failures = 0
        while True:
            try:
                return self._open_first(out)
            except Passing as error:
                failures += 1
                self._pause(error, failures)

    def _open_first(self, out: int) -> Journal | None:
        file = self._file
        span = f"bytes=0-{self._means.range_bytes - 1}"
        headers = {**file.headers, "range": span}
        with self._means.http.open(file.url, headers=headers, sign=file.sign) as answer:
            self._note_encryption(answer)
            match answer.status:
                case 206:
                    return self._begin(answer, out)
                case 200:
                    self._whole(answer, out)
                    return None
                case 416 if file.size in (None, 0):
                    os.ftruncate(out, 0)  # it is empty: there is no first byte
                    return None
                case 404 | 410 if file.is_optional:
                    raise Missing
            raise self._refusal(answer)

    def _begin(self, answer: HttpResponse, out: int) -> Journal:
        name = self._file.name
        first, _, size = _content_range(answer, name)
        if first != 0:
            raise FetchError(FetchReason.FAILED, f"{name}: its server answers other ranges")
        self._check_size(size)
        journal = Journal(size, _validator(answer), self._means.range_bytes)
        self._grow(size)
        self._parts.write(journal)
        try:
            journal.begun[0] = self._read(answer, out, 0, journal.bounds(0)[1])
        except _Broken as error:
            journal.begun[0] = error.at
        return journal

    def _whole(self, answer: HttpResponse, out: int) -> None:
        """Without ranges there is no resuming: what breaks begins anew."""
        length = answer.headers.get("content-length", "")
        size = int(length) if length.isdigit() else None
        if size is not None:
            self._check_size(size)
        os.ftruncate(out, 0)
        try:
            done = self._read(answer, out, 0, None)
            if size is not None and done != size:
                raise Passing(f"{self._file.name} broke off after {done} of {size} bytes")
        except Passing:
            self.take_back()
            raise
        self._grow(done)

    def _ranges(self, journal: Journal, out: int) -> None:
        left = journal.left
        if not left:
            return
        with ThreadPoolExecutor(min(self._means.num_workers, len(left)), "fetch") as workers:
            tasks = [workers.submit(self._range, journal, index, out) for index in left]
            try:
                for task in tasks:
                    task.result()
            except BaseException:
                self._is_cancelled.set()  # the others end at their next block
                for task in tasks:
                    task.cancel()
                raise

    def _range(self, journal: Journal, index: int, out: int) -> None:
        start, end = journal.bounds(index)
        at, failures = journal.begun.get(index, start), 0
        while at < end:
            self._check_cancelled()
            before = at
            try:
                with self._open_range(journal, at, end) as answer:
                    at = self._read(answer, out, at, end)
                if at < end:
                    raise Passing(f"{self._file.name} broke off at byte {at}")
            except Passing as error:
                # NOTE: what had been written when a connection broke is kept.
                at = max(at, error.at) if isinstance(error, _Broken) else at
                failures = 1 if at > before else failures + 1
                self._pause(error, failures)
        self._parts.mark(journal, index, out)

    def _open_range(self, journal: Journal, at: int, end: int) -> HttpResponse:
        file = self._file
        headers = {**file.headers, "range": f"bytes={at}-{end - 1}"}
        if journal.etag.startswith('"'):  # a weak one must not be used so
            headers["if-range"] = journal.etag
        answer = self._means.http.open(file.url, headers=headers, sign=file.sign)
        try:
            if answer.status in (200, 416):  # If-Range did not hold, or it is shorter now
                raise Changed(file.name)
            if answer.status != 206:
                raise self._refusal(answer)
            self._note_encryption(answer)
            first, _, size = _content_range(answer, file.name)
            if first != at or size != journal.size or _validator(answer) != journal.etag:
                raise Changed(file.name)
        except BaseException:
            answer.close()
            raise
        return answer

    def _read(self, answer: HttpResponse, out: int, at: int, end: int | None) -> int:
        """The position behind the last byte written. Raises _Broken, which carries it."""
        while True:
            self._check_cancelled()
            try:
                block = answer.read()
            except Passing as error:
                raise _Broken(error, at) from None
            if end is not None:
                block = block[: end - at]  # a server that sends more than was requested
            if not block:
                return at
            written = 0
            while written < len(block):
                written += os.pwrite(out, block[written:], at + written)
            at += len(block)
            self._count(len(block))

    def _check_cancelled(self) -> None:
        if self._is_cancelled.is_set():
            raise FetchError(FetchReason.FAILED, "the fetch was interrupted; run it again to go on")

    def _check_size(self, size: int) -> None:
        """What a server says is not believed at any price."""
        promised = self._file.size
        if promised not in (None, size):
            raise FetchError(
                FetchReason.DIGEST_MISMATCH,
                f"{self._file.name} has {size} bytes instead of the {promised} that its source "
                "lists; fetch it again",
            )
        folder = self._parts.path.parent
        free = shutil.disk_usage(folder).free
        if size > free:
            raise FetchError(
                FetchReason.DISK_FULL,
                f"{self._file.name} needs {size / 2**30:.2f} GiB, and {folder.parent} has "
                f"{free / 2**30:.2f} GiB left; use a larger volume",
            )

    def _refusal(self, answer: HttpResponse) -> FetchError:
        file = self._file
        return of_status(answer.status, file.name, hint=file.hint, after_s=answer.retry_after_s)

    def _note_encryption(self, answer: HttpResponse) -> None:
        """With a key of its own, an object's ETag in S3 is not its MD5."""
        if answer.headers.get(_ENCRYPTION, "AES256") != "AES256" or _OWN_KEY in answer.headers:
            self.is_md5_known = False

    def _pause(self, error: Passing, failures: int) -> None:
        if failures >= self._means.patience.num_failures:
            raise FetchError(error.reason, str(error)) from None
        pause_s = self._means.patience.pause_s(failures, error.after_s)
        (self._means.sleep or self._is_cancelled.wait)(pause_s)

    def _count(self, num_bytes: int) -> None:
        with self._lock:
            self._counted += num_bytes
        self._means.progress.add(num_bytes)

    def _grow(self, size: int) -> None:
        if self._file.size is None:
            self._means.progress.grow(size)


class _Broken(Passing):
    """A connection broke; `at` is where to go on."""

    def __init__(self, error: Passing, at: int) -> None:
        super().__init__(str(error), after_s=error.after_s)
        self.at = at


def _content_range(answer: HttpResponse, name: str) -> tuple[int, int, int]:
    match = _CONTENT_RANGE.fullmatch(answer.headers.get("content-range", ""))
    if match is None:
        raise FetchError(
            FetchReason.FAILED, f"{name}: its server answers 206 without a Content-Range"
        )
    return int(match[1]), int(match[2]), int(match[3])


def _validator(answer: HttpResponse) -> str:
    """By which a change shows: the ETag, else the date."""
    return answer.headers.get("etag") or answer.headers.get("last-modified") or ""
