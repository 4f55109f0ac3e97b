"""The engines that run on this machine: each writes a file while it serves, `octavo ps` reads
them."""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Self

from octavo.local.home import write_whole

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from octavo.local.home import Home

LOADING, SERVING = "loading", "serving"
_NO_PROCESS = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningServer:
    """One engine. `began` distinguishes it from a later process with the same number."""

    pid: int
    began: str
    url: str
    models: tuple[str, ...]
    state: str  # loading, serving
    since: float  # seconds since 1970

    @property
    def is_alive(self) -> bool:
        return self.began != _NO_PROCESS and process_start(self.pid) == self.began


class ServerRecord:
    """The file of this process; gone when the server ends. A home that cannot be written to, as in
    a container, keeps no records."""

    def __init__(self, home: Home, url: str, models: Sequence[str]) -> None:
        pid = os.getpid()
        self._path = _folder(home) / f"{pid}.json"
        self._server = RunningServer(
            pid=pid, began=process_start(pid), url=url, models=tuple(models), state=LOADING,
            since=time.time(),
        )  # fmt: skip

    def __enter__(self) -> Self:
        with suppress(OSError):
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._write()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with suppress(OSError):
            self._path.unlink(missing_ok=True)

    def ready(self, models: Sequence[str]) -> None:
        """Its model has been loaded, and answers to these names."""
        self._server = replace(self._server, models=tuple(models), state=SERVING)
        self._write()

    def _write(self) -> None:
        with suppress(OSError):
            write_whole(self._path, json.dumps(asdict(self._server)))


def running_servers(home: Home) -> list[RunningServer]:
    """The oldest first. Files of processes that were killed are deleted."""
    found = []
    for path in _folder(home).glob("*.json"):
        server = _read(path)
        if server is not None and server.is_alive:
            found.append(server)
        else:
            with suppress(OSError):
                path.unlink(missing_ok=True)
    return sorted(found, key=lambda server: (server.since, server.pid))


def process_start(pid: int) -> str:
    """When it began, in the kernel's own unit; "" where there is no such process, or no /proc."""
    try:
        # The program's name may contain spaces and brackets; what follows the last one is plain.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return _NO_PROCESS


def resident_bytes(pid: int) -> int:
    """The memory of a process and of those it started; 0 where it is unknown."""
    total, pids = 0, [pid]
    while pids:
        each = pids.pop()
        try:
            pages = int(Path(f"/proc/{each}/statm").read_text().split()[1])
            children = Path(f"/proc/{each}/task/{each}/children").read_text().split()
        except (OSError, IndexError, ValueError):
            continue
        total += pages * os.sysconf("SC_PAGE_SIZE")
        pids += [int(child) for child in children]
    return total


def _folder(home: Home) -> Path:
    return home.path / "servers"


def _read(path: Path) -> RunningServer | None:
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        return RunningServer(**{**fields, "models": tuple(fields["models"])})
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None
