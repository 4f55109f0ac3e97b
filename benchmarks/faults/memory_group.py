"""A control group in which the kernel ends a process for lack of memory, at a moment of our choice.

Where a limit is lowered below what a group uses, version 2 kills and version 1 refuses. So the
limit becomes what is used and a little more, and a helper, which the kernel is not to kill, takes
memory until the largest process of the group is gone: an engine's core.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

if TYPE_CHECKING:
    from collections.abc import Sequence

_MOUNT: Final = Path("/sys/fs/cgroup")
_UNLIMITED: Final = ("max", "-1")  # of version 2 and 1
_MARGIN: Final = 4 << 20
_WITHIN_S: Final = 30.0
_REMOVED_WITHIN_S: Final = 10.0
# Takes 4 MiB at a time. A killed process may take a moment to end, so it does not hurry.
_HELPER: Final = """
import os, sys, time
open("/proc/self/oom_score_adj", "w").write("-1000")
open(sys.argv[1] + "/cgroup.procs", "w").write(str(os.getpid()))
taken = []
while True:
    taken.append(bytearray(os.urandom(1 << 12) * (1 << 10)))
    time.sleep(0.005)
"""
_ENTER: Final = 'echo $$ > "$0/cgroup.procs" && exec "$@"'


class MemoryGroup:
    """Processes that share a limit, and those that they start."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        is_unified = (folder / "memory.max").exists()
        self._limit = folder / ("memory.max" if is_unified else "memory.limit_in_bytes")
        self._usage = folder / ("memory.current" if is_unified else "memory.usage_in_bytes")

    @classmethod
    def create(cls, name: str) -> Self | None:
        """None where this process may make none."""
        for parent in _parents():
            folder = parent / f"{name}-{os.getpid()}"
            try:
                folder.mkdir()
            except OSError:
                continue
            if any((folder / name).exists() for name in ("memory.max", "memory.limit_in_bytes")):
                return cls(folder)
            folder.rmdir()
        return None

    def command(self, command: Sequence[str]) -> list[str]:
        """The same, run in the group under the same process id."""
        return ["/bin/sh", "-c", _ENTER, str(self.folder), *command]

    def limit(self, num_bytes: int) -> None:
        """From now on: what would take more is killed, once no file's pages are left to give up."""
        self._limit.write_text(str(num_bytes))

    def exhaust(self) -> None:
        """Returns once the kernel has killed a process of the group. Raises TimeoutError."""
        before = self._pids()
        self.limit(int(self._usage.read_text()) + _MARGIN)
        helper = subprocess.Popen([sys.executable, "-S", "-c", _HELPER, str(self.folder)])
        try:
            ends_at = time.monotonic() + _WITHIN_S
            while before <= self._pids():
                if time.monotonic() > ends_at or helper.poll() is not None:
                    raise TimeoutError("the kernel killed no process for lack of memory")
                time.sleep(0.01)
        finally:
            helper.kill()
            helper.wait()
            self._lift()

    def remove(self) -> None:
        """Its processes have ended."""
        ends_at = time.monotonic() + _REMOVED_WITHIN_S
        while self.folder.exists() and time.monotonic() < ends_at:
            with suppress(OSError):
                self.folder.rmdir()
            time.sleep(0.02)

    def _lift(self) -> None:
        for value in _UNLIMITED:
            with suppress(OSError):
                self._limit.write_text(value)
                return

    def _pids(self) -> set[int]:
        return {int(line) for line in (self.folder / "cgroup.procs").read_text().split()}


def _parents() -> list[Path]:
    """Where this process's own group for memory is: of version 1, or 2."""
    found = []
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if "memory" in controllers.split(","):
                found.append(_MOUNT / "memory" / path.lstrip("/"))
            elif not controllers:
                # Controllers are only for groups beside the one with processes in it.
                own = _MOUNT / path.lstrip("/")
                found += [own, own.parent]
    return [folder for folder in found if folder.is_dir()]
