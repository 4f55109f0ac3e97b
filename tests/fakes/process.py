"""A real `octavo serve` process on a free loopback port."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import httpx

if TYPE_CHECKING:
    import signal
    from collections.abc import Iterator, Sequence

PATIENCE_S = 60.0  # ends tests that have gone wrong; a machine that does much else is slow


@dataclass
class ServeProcess:
    """Its URL is known once it says so."""

    process: subprocess.Popen[str]
    url: str = ""
    lines: list[dict[str, Any]] = field(default_factory=list)

    def client(self, **kwargs: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=PATIENCE_S, **kwargs)

    def read_until(self, message: str) -> dict[str, Any]:
        """The next log line with this message."""
        assert self.process.stderr is not None
        for text in self.process.stderr:
            line: dict[str, Any] = json.loads(text)
            self.lines.append(line)
            if line["message"] == message:
                return line
        raise AssertionError(f"ended without {message!r}: {self.lines}")

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self) -> int:
        """The exit code, once all that it still logs is read."""
        assert self.process.stderr is not None
        self.lines += [json.loads(text) for text in self.process.stderr]
        return self.process.wait(PATIENCE_S)


def environment(**more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("OCTAVO_")}
    return kept | more


@contextmanager
def serving(
    *flags: str, env: dict[str, str] | None = None, inside: Sequence[str] = ()
) -> Iterator[ServeProcess]:
    """`octavo serve --device sim` that is ready; killed at the end if it still runs.

    `inside`: a command that runs it elsewhere, under the same process id.
    """
    command = [*inside, sys.executable, "-m", "octavo.cli", "serve", "--device", "sim"]
    command += ["--port", "0", "--log-format", "json", *flags]
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env=environment(**(env or {}))
    )
    server = ServeProcess(process)
    try:
        server.url = server.read_until("Ready")["url"]
        yield server
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(PATIENCE_S)
        assert process.stderr is not None
        process.stderr.close()
