"""Files of KV blocks in a bucket of S3, or of a store that speaks its protocol.

An object is there whole or not at all: it is put by one request, with digests that the store
compares. A bucket has no time of last use, so the oldest objects go first.
"""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from io import BytesIO
from typing import TYPE_CHECKING

import numpy as np

from octavo_common.remote.errors import FetchError, FetchReason
from octavo_common.remote.s3_bucket import S3Object
from octavo_engine.tiers.run_folder import SUFFIX, FileSpan
from octavo_engine.tiers.run_format import TierFileError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import BinaryIO

    from numpy.typing import NDArray

    from octavo_common.remote.s3_bucket import S3Bucket
    from octavo_engine.tiers.run_folder import RunDraft
    from octavo_engine.tiers.run_format import RunBytes

RESCAN_S = 30.0  # a listing is a request that costs money
HEADER_BYTES = 16 << 10  # enough for the header of most files, by one request
MAX_GAP_BYTES = 1 << 20  # between two parts of a file that one request gets


class _ObjectBytes:
    """Parts are requested as they are foreseen, the others one by one."""

    def __init__(self, bucket: S3Bucket, found: S3Object) -> None:
        self._bucket, self._found = bucket, found
        self.num_bytes = found.size
        self._parts: list[tuple[int, memoryview]] = []

    def foresee(self, spans: Sequence[FileSpan]) -> None:
        """Get them, those that lie near each other together. Raises OSError."""
        start = end = 0
        for offset, num_bytes in sorted(spans):
            if end and offset > end + MAX_GAP_BYTES:
                self._get(start, end)
                end = 0
            start, end = (start if end else offset), max(end, offset + num_bytes)
        if end:
            self._get(start, end)

    def read_into(self, target: NDArray[np.uint8], offset: int) -> None:
        end = offset + target.nbytes
        if end > self.num_bytes:
            raise TierFileError("blocks are cut off")
        for start, part in self._parts:
            if start <= offset and end <= start + len(part):
                break
        else:
            start, part = self._get(offset, end)
        target[:] = np.frombuffer(part[offset - start : end - start], np.uint8)

    def _get(self, start: int, end: int) -> tuple[int, memoryview]:
        end = min(end, self.num_bytes)
        with _as_os_errors():
            part = start, memoryview(self._bucket.get(self._found.key, start, end - start))
        if len(part[1]) != end - start:
            raise TierFileError("blocks are cut off")
        self._parts.append(part)
        return part


class _BufferBytes:
    def __init__(self, content: bytes) -> None:
        self._content = content
        self.num_bytes = len(content)

    def read_into(self, target: NDArray[np.uint8], offset: int) -> None:
        target[:] = np.frombuffer(self._content, np.uint8, target.nbytes, offset)


class _ObjectDraft:
    def __init__(self, bucket: S3Bucket, key: str, content: bytes) -> None:
        self._bucket, self._key, self._content = bucket, key, content

    @contextmanager
    def open(self) -> Iterator[RunBytes]:
        yield _BufferBytes(self._content)

    def publish(self) -> None:
        with _as_os_errors():
            self._bucket.put(self._key, self._content)

    def discard(self) -> None:
        pass


class BucketFolder:
    """A RunFolder in a bucket. Safe to use from many threads."""

    is_read_only = False
    num_readers = 4

    def __init__(self, bucket: S3Bucket, prefix: str, key: bytes) -> None:
        """`prefix` is empty or ends with a slash."""
        self._bucket, self._root = bucket, prefix
        self._prefix = f"{prefix}{key.hex()}/"
        self.place = f"s3://{bucket.name}/{self._prefix}"
        self.rescan_s = RESCAN_S
        self._lock = threading.Lock()  # of the two below
        self._found: dict[str, S3Object] = {}  # by name below the prefix, as last listed
        self._own: dict[str, S3Object] = {}  # put since
        self._total = 0  # bytes of all keys, as last listed, and what was put since
        self._listed_at = float("-inf")

    def check(self) -> None:
        """Raises FetchError where it cannot be listed."""
        next(self._bucket.objects(self._prefix, delimiter=""), None)

    def names(self) -> set[str]:
        with _as_os_errors():
            found = {
                each.key.removeprefix(self._prefix): each
                for each in self._bucket.objects(self._prefix)
            }
        found = {name: each for name, each in found.items() if name.endswith(SUFFIX)}
        with self._lock:
            self._found = found
            self._own = {name: each for name, each in self._own.items() if name not in found}
        return set(found)

    @contextmanager
    def open(self, name: str, spans: Sequence[FileSpan] = ()) -> Iterator[RunBytes]:
        with self._lock:
            found = self._found.get(name) or self._own.get(name)
        if found is None:
            raise FileNotFoundError(f"{self.place}{name}")
        content = _ObjectBytes(self._bucket, found)
        if spans:
            content.foresee(spans)
        elif found.size:
            content.foresee([FileSpan(0, HEADER_BYTES)])
        yield content

    def draft(self, name: str, write: Callable[[BinaryIO], int]) -> RunDraft:
        buffer = BytesIO()
        write(buffer)
        content = buffer.getvalue()
        key = self._prefix + name
        self._total += len(content)
        with self._lock:
            self._own[name] = S3Object(key, len(content), "", "")
        return _ObjectDraft(self._bucket, key, content)

    def used(self, name: str) -> None:
        pass

    def remove(self, name: str) -> None:
        with _as_os_errors():
            self._bucket.delete(self._prefix + name)

    def make_room(self, num_bytes: int, max_bytes: int) -> list[str]:
        is_old = time.monotonic() - self._listed_at >= self.rescan_s
        if not is_old and self._total + num_bytes <= max_bytes:
            return []
        removed = []
        with _as_os_errors():
            all_keys = self._bucket.objects(self._root, delimiter="")
            files = sorted((f for f in all_keys if f.key.endswith(SUFFIX)), key=_age)
            self._total, self._listed_at = sum(file.size for file in files), time.monotonic()
            for file in files:
                if self._total + num_bytes <= max_bytes:
                    break
                self._bucket.delete(file.key)
                self._total -= file.size
                if file.key.startswith(self._prefix):
                    removed.append(file.key.removeprefix(self._prefix))
        return removed


def _age(found: S3Object) -> tuple[str, str]:
    return found.modified, found.key


@contextmanager
def _as_os_errors() -> Iterator[None]:
    """What a store that fails means to those who know of files only."""
    try:
        yield
    except FetchError as error:
        kind = FileNotFoundError if error.reason is FetchReason.NOT_FOUND else OSError
        raise kind(str(error)) from None
