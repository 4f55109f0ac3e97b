"""The step that brings a model's files, where the engine cannot do that itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.fetch.progress import STATUS_FILE
from octavo.local.backoff import BackOff
from octavo.local.child import Child, describe_end, octavo_command

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from octavo.local.launch import Launch


class Fetching:
    """One `octavo fetch`, run again after a pause until it succeeds."""

    def __init__(
        self,
        launch: Launch,
        log: Path,
        *,
        environ: Mapping[str, str],
        notify: Callable[[str], None],
        clock: Callable[[], float],
    ) -> None:
        self._arguments = launch.fetch
        self._log = log
        self._environment = {**environ, **launch.fetch_variables}
        self._notify = notify
        self._clock = clock
        self._backoff = BackOff()
        self._child: Child | None = None
        self._started_at = 0.0
        self._folder = _folder_of(launch.fetch)
        self.is_done = not launch.fetch
        self.problem = ""

    @property
    def detail(self) -> str:
        """How far it is, or why it is not."""
        if self.problem:
            return self.problem
        fields = _read(self._folder / STATUS_FILE)
        done, total = int(fields.get("bytes") or 0), int(fields.get("total") or 0)
        if not total:
            return "fetching"
        rate, eta_s = float(fields.get("rate") or 0), fields.get("eta_s")
        ending = f", {eta_s:.0f} s left" if isinstance(eta_s, int | float) else ""
        return (
            f"fetching {100 * done // total} % of {total / 2**20:,.0f} MiB "
            f"({rate / 2**20:.1f} MiB/s{ending})"
        )

    def look(self) -> None:
        now = self._clock()
        if self.is_done:
            return
        if self._child is None:
            if self._backoff.is_over(now):
                self._started_at = now
                self._start()
            return
        code = self._child.code
        if code is None:
            self.problem = ""
            return
        child, self._child = self._child, None
        if code == 0:
            self.is_done, self.problem = True, ""
            self._notify(f"fetched {self._arguments[0]}")
            return
        self._failed(_reason(child.last_lines(1)) or describe_end(code))

    def _start(self) -> None:
        try:
            self._child = Child(
                octavo_command("fetch", *self._arguments),
                log=self._log,
                environment=self._environment,
            )
        except OSError as error:
            self._failed(f"could not be started: {error.strerror or error}")

    def _failed(self, why: str) -> None:
        now = self._clock()
        pause_s = self._backoff.failed(now, ran_s=now - self._started_at)
        self.problem = why
        self._notify(f"{self._arguments[0]} could not be fetched; again in {pause_s:g} s: {why}")

    def kill(self) -> None:
        if self._child is not None:
            self._child.kill()


def _folder_of(arguments: tuple[str, ...]) -> Path:
    for argument in arguments:
        name, _, value = argument.partition("=")
        if name == "--to":
            return Path(value)
    return Path()


def _reason(lines: list[str]) -> str:
    try:
        fields = json.loads(lines[-1])
        return f"{fields['reason']}: {fields['message']}"
    except (ValueError, KeyError, TypeError, IndexError, RecursionError):
        return lines[-1] if lines else ""


def _read(path: Path) -> dict[str, Any]:
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return fields if isinstance(fields, dict) else {}
