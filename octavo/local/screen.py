"""What people see: one live table on a terminal, plain lines anywhere else."""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from octavo.local.snapshot import PlatformSnapshot

_COLOURS = {
    "serving": "green", "ready": "cyan", "waiting": "red", "stalled": "red", "failed": "red",
    "leaving": "yellow",
}  # fmt: skip


class PlainScreen:
    """One line an event. A reader that has left ends nothing."""

    def __init__(self) -> None:
        self._was_ready = False

    def __enter__(self) -> PlainScreen:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def notify(self, line: str) -> None:
        with suppress(OSError, ValueError):
            print(line, file=sys.stderr, flush=True)

    def show(self, snapshot: PlatformSnapshot) -> None:
        if snapshot.is_ready and not self._was_ready:
            self.notify(f"Octavo serves at {snapshot.url}/v1 · stop it with Ctrl-C or octavo down")
        self._was_ready = snapshot.is_ready


class LiveScreen:
    """The table at the bottom, events scroll above it."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._live = Live(console=self._console, auto_refresh=False)
        self._shown: PlatformSnapshot | None = None

    def __enter__(self) -> LiveScreen:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):  # the terminal may be closed
            self._live.stop()

    def notify(self, line: str) -> None:
        with suppress(OSError):
            self._console.print(Text(f"{time.strftime('%H:%M:%S')}  {line}"))

    def show(self, snapshot: PlatformSnapshot) -> None:
        if snapshot == self._shown:
            return
        self._shown = snapshot
        with suppress(OSError):
            self._live.update(render(snapshot), refresh=True)


def render(snapshot: PlatformSnapshot) -> Group:
    table = Table(box=None, pad_edge=False, header_style="bold")
    lines: list[Text | Table] = [Text(f"{snapshot.url}/v1  router {snapshot.router}"), table]
    for title in ("MODEL", "REPLICA", "STATE", "REQUESTS", "RESTARTS", "PORT"):
        is_number = title in ("REQUESTS", "RESTARTS", "PORT")
        table.add_column(title, justify="right" if is_number else "left", no_wrap=True)
    for pool in snapshot.pools:
        head = Text(f"{pool.served_names[0]}  {pool.serving}/{pool.wanted} {pool.phase}", "bold")
        table.add_row(head, "", "", "", "", "")
        if pool.message:
            lines.append(Text(f"{pool.served_names[0]}: {pool.message}", "dim"))
        for replica in pool.replicas:
            colour = _COLOURS.get(replica.state, "")
            table.add_row(
                "", replica.id, Text(replica.state, colour), str(replica.in_flight),
                str(replica.restarts), str(replica.port or ""),
            )  # fmt: skip
            if replica.detail and replica.detail != pool.message:
                lines.append(Text(f"{replica.id}: {replica.detail}", "dim"))
        for adapter in pool.adapters:
            if adapter.phase != "Loaded" or adapter.message:
                text = f"adapter {adapter.name}: {adapter.phase}: {adapter.message}"
                lines.append(Text(text, "red" if adapter.phase == "Failed" else "dim"))
            if adapter.trial:
                lines.append(Text(f"adapter {adapter.name}: canary {adapter.trial}", "dim"))
    if snapshot.problem:
        lines.append(Text(f"kept the running state: {snapshot.problem}", "red"))
    return Group(*lines)
