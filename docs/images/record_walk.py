"""Records the walk of README: `python docs/images/record_walk.py` in a built checkout.

It runs the commands on this machine, with a terminal in front of each, and draws what they wrote,
line by line at the times they wrote it, as an animated SVG: a browser plays it, and no player is
needed. Where animations are turned off, the whole walk is shown.
"""

from __future__ import annotations

import argparse
import html
import os
import pty
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

FILE = Path(__file__).with_name("walk.svg")
PORT = 8080
QUESTION = "What is the capital of France?"
COLUMNS, FONT_SIZE, LINE_HEIGHT = 104, 13, 18
LONGEST_PAUSE_S = 2.5  # waiting for longer than this shows nothing new
READING_S = 1.2  # before the next command
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[()][A-Z0-9]|[\x00-\x08\x0b-\x1f\x7f]")


@dataclass(frozen=True)
class ShownLine:
    """One line of the screen, and when it appears."""

    at_s: float
    text: str
    is_command: bool = False


def main() -> None:
    parser = argparse.ArgumentParser(description="Record the walk of README.")
    parser.add_argument("--to", type=Path, default=FILE, metavar="FILE")
    parser.add_argument("--port", type=int, default=PORT)
    options = parser.parse_args()
    options.to.write_text(drawing(record(options.port)), encoding="utf-8")


def record(port: int) -> list[ShownLine]:
    """The platform starts, answers, shows its state, and ends."""
    with tempfile.TemporaryDirectory() as home:
        os.environ["OCTAVO_HOME"] = home
        terminal = RecordedTerminal()
        up = terminal.start(f"octavo up demo://smollm2 --replicas 2 --port {port} --plain &")
        try:
            terminal.watch(until=lambda: any("Octavo serves at" in line for line in terminal.texts))
            url = f"http://localhost:{port}"
            terminal.run(f'octavo chat --url {url} --temperature 0 --prompt "{QUESTION}"')
            terminal.run("octavo status --wait 10")
            terminal.run("octavo down")
            terminal.watch(until=lambda: up.is_closed)
        finally:
            up.end()
    return terminal.lines


class RunningCommand:
    """A command with a terminal of its own, so that it writes as it does for people."""

    def __init__(self, words: str) -> None:
        self.reads, theirs = pty.openpty()
        shell = words.removesuffix("&").strip()
        environment = os.environ | {"COLUMNS": str(COLUMNS), "NO_COLOR": "1", "TERM": "dumb"}
        environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
        self.process = subprocess.Popen(
            ["/bin/sh", "-c", f"exec {shell}"], stdin=subprocess.DEVNULL, stdout=theirs,
            stderr=theirs, env=environment, start_new_session=True,
        )  # fmt: skip
        os.close(theirs)
        self.rest = b""
        self.is_closed = False

    def new_lines(self, patience_s: float) -> list[str]:
        """What it has written since; `is_closed` after the last of it."""
        if self.is_closed or not select.select([self.reads], [], [], patience_s)[0]:
            return []
        try:
            data = os.read(self.reads, 65536)
        except OSError:  # how Linux says that the other end is closed
            data = b""
        self.is_closed = not data
        *lines, self.rest = (self.rest + data + (b"\n" if not data else b"")).split(b"\n")
        return [plain(line) for line in lines if line.strip()]

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        self.process.wait(60)
        os.close(self.reads)


class RecordedTerminal:
    """The screen on which all commands write, and its clock, which skips long pauses."""

    def __init__(self) -> None:
        self.lines: list[ShownLine] = []
        self._running: list[RunningCommand] = []
        self._shown_s = 0.0
        self._looked_at = time.monotonic()

    @property
    def texts(self) -> list[str]:
        return [line.text for line in self.lines]

    def start(self, words: str) -> RunningCommand:
        self._looked_at = time.monotonic()
        self._shown_s += READING_S if self.lines else 0.0
        self.lines.append(ShownLine(self._shown_s, f"$ {words}", is_command=True))
        self._running.append(RunningCommand(words))
        return self._running[-1]

    def watch(self, *, until: Callable[[], bool]) -> None:
        while not until():
            if all(command.is_closed for command in self._running):
                sys.exit("\n".join(("The commands ended:", *self.texts)))
            for command in self._running:
                for line in command.new_lines(0.05):
                    self._show(line)

    def run(self, words: str) -> None:
        command = self.start(words)
        try:
            self.watch(until=lambda: command.is_closed)
        finally:
            command.end()
        self._running.remove(command)
        if command.process.returncode != 0:
            sys.exit(f"{words} ended with {command.process.returncode}")

    def _show(self, line: str) -> None:
        now = time.monotonic()
        self._shown_s += min(now - self._looked_at, LONGEST_PAUSE_S)
        self._looked_at = now
        self.lines.append(ShownLine(self._shown_s, line))


def plain(line: bytes) -> str:
    """Without colours, and only the last state of a line that was drawn several times."""
    text = line.decode("utf-8", "replace").rstrip("\r").rpartition("\r")[2]
    text = _CONTROL.sub("", text).rstrip()
    return text if len(text) <= COLUMNS else text[: COLUMNS - 1] + "…"


def drawing(lines: list[ShownLine]) -> str:
    """An SVG with one text for each line, which appears at its time."""
    width, height = round(COLUMNS * FONT_SIZE * 0.602) + 32, len(lines) * LINE_HEIGHT + 32
    shown = []
    for row, line in enumerate(lines):
        kind = "line command" if line.is_command else "line"
        shown.append(
            f'<text class="{kind}" x="16" y="{row * LINE_HEIGHT + 28}" '
            f'style="animation-delay:{line.at_s:.2f}s">{html.escape(line.text)}</text>'
        )
    return "\n".join((
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" role="img" font-family="ui-monospace,Menlo,Consolas,monospace" '
        f'font-size="{FONT_SIZE}" fill="#d8dee6" xml:space="preserve">',
        "<title>A terminal: octavo up, a question, its answer, octavo status, octavo down</title>",
        "<style>",
        "@keyframes appear { from { opacity: 0 } to { opacity: 1 } }",
        ".line { animation: appear 1ms linear backwards }",
        ".command { fill: #8fd3a8; font-weight: 600 }",
        "@media (prefers-reduced-motion: reduce) { .line { animation: none } }",
        "</style>",
        f'<rect width="{width}" height="{height}" rx="6" fill="#1b2027"/>',
        *shown,
        "</svg>\n",
    ))  # fmt: skip


if __name__ == "__main__":
    main()
