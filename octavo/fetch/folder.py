"""The folder that a model is fetched into: one writer at a time, and a mark when all is there.

The folder may be a volume that many machines share, so the lock is a file that its holder touches:
a process that sees it untouched for long enough takes it over; at once where the holder
was a process of this very place and has ended.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from octavo.fetch.errors import FetchError, FetchReason
from octavo.fetch.parts import StoredPart

if TYPE_CHECKING:
    from collections.abc import Callable

MARK_FILE = ".octavo-complete.json"
LOCK_FILE = ".octavo-lock"
TOUCH_S = 5.0
STALE_S = 60.0  # untouched for so long: its holder is dead
_LOOK_S = 0.5


@dataclass(frozen=True, slots=True)
class FolderMark:
    """What the folder holds, whole."""

    uri: str
    asked_revision: str  # the name is in stored files
    revision: str
    digest: str
    files: tuple[StoredPart, ...]

    def is_of(self, uri: str, revision: str) -> bool:
        return (self.uri, self.asked_revision) == (uri, revision)


def read_mark(folder: Path) -> FolderMark | None:
    """None where the folder is not whole. Sizes are looked at, contents are not read again."""
    try:
        fields = json.loads((folder / MARK_FILE).read_text(encoding="utf-8"))
        files = tuple(
            StoredPart(str(n), int(size), str(sha)) for n, size, sha in fields.pop("files")
        )
        mark = FolderMark(**fields, files=files)
        if all((folder / file.name).stat().st_size == file.size for file in files):
            return mark
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        pass
    return None


def write_mark(folder: Path, mark: FolderMark) -> None:
    temporary = folder / f"{MARK_FILE}.new"
    with temporary.open("w", encoding="utf-8") as file:
        json.dump(asdict(mark) | {"files": [list(each) for each in mark.files]}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(folder / MARK_FILE)


class FolderLock:
    """`with FolderLock(folder) as lock:`; waits for its holder. `is_held` turns false when
    another process took the lock over."""

    def __init__(
        self,
        folder: Path,
        *,
        on_wait: Callable[[str], None] = lambda holder: None,
        stale_s: float = STALE_S,
        touch_s: float = TOUCH_S,
        look_s: float = _LOOK_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path = folder / LOCK_FILE
        self._on_wait = on_wait
        self._stale_s = stale_s
        self._touch_s = touch_s
        self._look_s = look_s
        self._clock = clock
        self._token = secrets.token_hex(8)
        self._stop = threading.Event()
        self._toucher = threading.Thread(target=self._touch, name="folder-lock", daemon=True)
        self.is_held = False

    def __enter__(self) -> Self:
        """Raises OSError where the folder cannot be written."""
        seen: tuple[bytes, int] | None = None
        seen_at = self._clock()
        while not self._try():
            now_seen = self._look()
            if now_seen != seen:
                if seen is None and now_seen is not None:
                    self._on_wait(_holder(now_seen[0]))
                seen, seen_at = now_seen, self._clock()
            elif seen is not None and (
                self._clock() - seen_at >= self._stale_s or _is_dead(seen[0])
            ):
                self._take_over(seen[0])
                continue
            self._stop.wait(self._look_s)
        self.is_held = True
        self._toucher.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._toucher.join()
        if self.is_held and self._is_ours():
            self._path.unlink(missing_ok=True)

    def check(self) -> None:
        if not self.is_held:
            raise FetchError(
                FetchReason.FAILED, f"{self._path} was taken over by another fetch; run it again"
            )

    def _try(self) -> bool:
        content = {"token": self._token, **_place(), "pid": os.getpid(), **_began_or_none()}
        try:
            descriptor = os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        except FileExistsError:
            return False
        try:
            with os.fdopen(descriptor, "w") as file:
                json.dump(content, file)
        except OSError:  # on a full disk: others would wait for a lock that names nobody
            self._path.unlink(missing_ok=True)
            raise
        return True

    def _look(self) -> tuple[bytes, int] | None:
        try:
            return self._path.read_bytes(), self._path.stat().st_mtime_ns
        except FileNotFoundError:
            return None

    def _take_over(self, stale: bytes) -> None:
        """Two may try at once: the one that finds another lock in place puts it back."""
        aside = self._path.with_name(f"{LOCK_FILE}.{self._token}")
        try:
            self._path.rename(aside)
        except FileNotFoundError:
            return
        if aside.read_bytes() != stale:
            with suppress(FileExistsError):
                os.link(aside, self._path)
        aside.unlink(missing_ok=True)

    def _is_ours(self) -> bool:
        try:
            fields: Any = json.loads(self._path.read_bytes())
        except (OSError, ValueError, RecursionError):
            return False
        return isinstance(fields, dict) and fields.get("token") == self._token

    def _touch(self) -> None:
        while not self._stop.wait(self._touch_s):
            if not self._is_ours():
                self.is_held = False
                return
            with suppress(OSError):
                os.utime(self._path)


def _place() -> dict[str, str]:
    """Where process ids mean the same: one boot of one machine, one container."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = ""
    return {"host": socket.gethostname(), "boot": boot}


def _began(pid: int) -> dict[str, str]:
    """Raises ProcessLookupError where there is no such process."""
    try:
        # NOTE: the name may have spaces and brackets; what follows the last one is plain.
        return {"began": Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]}
    except FileNotFoundError:
        raise ProcessLookupError(pid) from None


def _began_or_none() -> dict[str, str]:
    try:
        return _began(os.getpid())
    except OSError:  # no /proc here
        return {}


def _is_dead(content: bytes) -> bool:
    """Known to be, without waiting: it was here, and its process is not. A pod's step that is
    started again has the number of the one that was killed, and began later."""
    try:
        fields = json.loads(content)
        if {name: fields[name] for name in ("host", "boot")} != _place() or not fields["boot"]:
            return False
        return bool(_began(int(fields["pid"]))["began"] != fields["began"])
    except ProcessLookupError:
        return True
    except (OSError, ValueError, KeyError, TypeError, IndexError, RecursionError):
        return False


def _holder(content: bytes) -> str:
    try:
        fields = json.loads(content)
        return f"{fields['host']}, process {fields['pid']}"
    except (ValueError, KeyError, TypeError, RecursionError):
        return "another fetch"
