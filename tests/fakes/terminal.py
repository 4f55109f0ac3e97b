"""A command of ours on a real terminal, as a person sees and uses it."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import threading
import time

from tests.fakes.process import environment

PATIENCE_S = 60.0


class Terminal:
    """`octavo` with these arguments; `screen` is what a terminal would show."""

    def __init__(self, *arguments: str, **variables: str) -> None:
        self._controller, terminal = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "octavo.cli", *arguments],
            stdin=terminal, stdout=terminal, stderr=terminal, start_new_session=True,
            env=environment(TERM="xterm", **variables),
        )  # fmt: skip
        os.close(terminal)
        self._raw = b""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        while True:
            try:
                block = os.read(self._controller, 65536)
            except OSError:  # the other side is closed
                return
            self._raw += block

    @property
    def screen(self) -> list[str]:
        lines = []
        for line in self._raw.decode(errors="replace").replace("\r\n", "\n").split("\n"):
            shown = ""
            for part in line.split("\r"):
                is_erased = part.startswith("\033[K")
                part = re.sub(r"\033\[[0-9;?]*[a-zA-Z]", "", part)
                shown = part if is_erased else part + shown[len(part) :]
            lines.append(shown)
        return lines

    @property
    def text(self) -> str:
        return "\n".join(self.screen)

    def wait_for(self, pattern: str, seconds: float = PATIENCE_S) -> re.Match[str]:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if match := re.search(pattern, self.text):
                return match
            time.sleep(0.05)
        raise AssertionError(f"no {pattern!r} on the screen: {self.screen}")

    def type(self, text: str) -> None:
        os.write(self._controller, text.encode())

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
        self.process.wait(PATIENCE_S)
        self._reader.join(10)
        os.close(self._controller)
