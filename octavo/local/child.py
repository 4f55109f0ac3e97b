"""A child process: on a leash, in a process group of its own, its output in a file."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

from octavo.local import leash

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

_TAIL_BYTES = 8192


class Child:
    """Started at once. Its owner reads `code` from time to time, or on SIGCHLD."""

    def __init__(
        self, command: Sequence[str], *, log: Path, environment: Mapping[str, str]
    ) -> None:
        """Raises OSError."""
        # NOTE: a group of its own, so that Ctrl-C reaches us alone: we drain in the right order.
        self.log = log
        with log.open("ab") as output:
            self._log_from = output.tell()
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", leash.__file__, str(os.getpid()), *command],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=dict(environment),
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def code(self) -> int | None:
        """None while it runs; negative: the signal that ended it."""
        code = self._process.poll()
        if code is not None and self._process.stdin is not None:
            self._process.stdin.close()
        return code

    def signal(self, number: signal.Signals) -> None:
        if self.code is None:
            self._process.send_signal(number)

    def terminate(self) -> None:
        self.signal(signal.SIGTERM)

    def kill(self) -> None:
        """With all that it started."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def wait(self, timeout_s: float) -> None:
        """Raises subprocess.TimeoutExpired."""
        self._process.wait(timeout_s)
        _ = self.code

    def last_lines(self, count: int) -> list[str]:
        """Of what this process wrote."""
        try:
            with self.log.open("rb") as file:
                end = file.seek(0, os.SEEK_END)
                file.seek(max(self._log_from, end - _TAIL_BYTES))
                text = file.read().decode(errors="replace")
        except OSError:
            return []
        return [line.rstrip() for line in text.splitlines() if line.strip()][-count:]


def octavo_command(*arguments: str) -> list[str]:
    """The command line for another process of this very installation."""
    # NOTE: -P, lest a folder `octavo` in the working directory be taken for the package.
    return [sys.executable, "-P", "-m", "octavo.cli", *arguments]


def describe_end(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"ended by signal {-code}"
