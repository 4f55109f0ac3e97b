"""Progress of a fetch: on the terminal, in logs, and as a file in the folder."""

from __future__ import annotations

import json
import sys
import threading
import time
from contextlib import suppress
from typing import IO, TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

STATUS_FILE = ".octavo-status.json"
EVERY_S = 1.0
LINE_EVERY_S = 10.0  # for people whose terminal it is not
_WINDOW_S = 10.0  # over which the rate is measured


class FetchProgress:
    """A thread reports it once a second while it is entered. Safe to use from many threads.

    Where `out` is no terminal, as JSON, or as lines where it is for people.
    """

    def __init__(
        self,
        uri: str,
        *,
        out: IO[str] | None = None,
        is_for_people: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._uri = uri
        self._out = out or sys.stdout
        self._is_terminal = self._out.isatty()
        self._is_for_people = is_for_people
        self._line_at: tuple[str, float] = ("", 0.0)  # phase and time of the last
        self._clock = clock
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._folder: Path | None = None
        self._phase = "listing"
        self._total: int | None = None
        self._done = 0
        self._files = (0, 0)
        self._marks: list[tuple[float, int]] = []
        self._thread = threading.Thread(target=self._run, name="progress", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def write_into(self, folder: Path) -> None:
        """Only for the holder of the folder's lock."""
        self._folder = folder

    def begin(self, phase: str, *, total: int | None, files: int) -> None:
        with self._lock:
            self._phase, self._total, self._done, self._files = phase, total, 0, (0, files)
            self._marks = []
        self.report()

    def phase(self, phase: str) -> None:
        with self._lock:
            self._phase = phase
        self.report()

    def add(self, num_bytes: int) -> None:
        """Negative where bytes turned out to be worth nothing."""
        with self._lock:
            self._done += num_bytes

    def grow(self, num_bytes: int) -> None:
        """A size that the listing did not have."""
        with self._lock:
            self._total = (self._total or 0) + num_bytes

    def file_done(self) -> None:
        with self._lock:
            self._files = (self._files[0] + 1, self._files[1])

    def facts(self) -> dict[str, Any]:
        now = self._clock()
        with self._lock:
            self._marks = [mark for mark in self._marks if mark[0] > now - _WINDOW_S]
            self._marks.append((now, self._done))
            began_at, began_bytes = self._marks[0]
            rate = (self._done - began_bytes) / (now - began_at) if now > began_at else 0.0
            rate = max(0.0, rate)
            left = None if self._total is None else max(0, self._total - self._done)
            return {
                "phase": self._phase,
                "uri": self._uri,
                "bytes": self._done,
                "total": self._total,
                "rate": round(rate),
                "eta_s": round(left / rate, 1) if left is not None and rate > 0 else None,
                "files_done": self._files[0],
                "files": self._files[1],
            }

    def report(self, **more: Any) -> None:
        facts = {**self.facts(), **more}
        with suppress(OSError, ValueError):  # who reads it has left; the fetch goes on
            if self._is_terminal:
                print(f"\r\033[K{_readable(facts)}", end="", file=self._out, flush=True)
            elif self._is_for_people:
                self._print_line(facts)
            else:
                print(json.dumps(facts), file=self._out, flush=True)
        if self._folder is not None:
            temporary = self._folder / f"{STATUS_FILE}.new"
            with suppress(OSError):  # a full disk is reported by the writer of the model
                temporary.write_text(json.dumps(facts))
                temporary.replace(self._folder / STATUS_FILE)

    def _print_line(self, facts: dict[str, Any]) -> None:
        phase, at = self._line_at
        now = self._clock()
        if facts["phase"] != phase or now - at >= LINE_EVERY_S:
            self._line_at = (facts["phase"], now)
            print(_readable(facts), file=self._out, flush=True)

    def _run(self) -> None:
        before: dict[str, Any] = {}
        while not self._stop.wait(EVERY_S):
            facts = self.facts()
            if facts != before:
                self.report()
            before = facts


def _readable(facts: dict[str, Any]) -> str:
    text = f"{facts['phase']} {facts['uri']}"
    if facts["bytes"] or facts["total"]:
        total = f" of {facts['total'] / 2**20:,.1f}" if facts["total"] else ""
        text += f"  {facts['bytes'] / 2**20:,.1f}{total} MiB, {facts['rate'] / 2**20:.1f} MiB/s"
    if facts["eta_s"] is not None:
        text += f", {facts['eta_s']:.0f} s left"
    return text
