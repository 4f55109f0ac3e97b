"""What goes on though the machine does not play along."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

from octavo.local.home import Home
from octavo.local.supervisor import PlatformSupervisor

if TYPE_CHECKING:
    from octavo.local.snapshot import PlatformSnapshot


class Lines:
    def __init__(self) -> None:
        self.reported: list[str] = []

    def notify(self, line: str) -> None:
        self.reported.append(line)

    def show(self, snapshot: PlatformSnapshot) -> None: ...


def full() -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_is_said_once_and_ends_nothing(tmp_path):
    home = Home(tmp_path)
    home.make()
    screen = Lines()
    supervisor = PlatformSupervisor(home, screen, host="127.0.0.1", port=1)
    for write in (full, full, lambda: None, full):
        supervisor._save(write)
    problem = f"{tmp_path} cannot be written: No space left on device"
    assert screen.reported == [f"{problem}; running engines continue, changes wait"] * 2


def test_a_router_that_cannot_be_started_is_tried_again(tmp_path, monkeypatch):
    home = Home(tmp_path)
    home.make()
    screen = Lines()
    supervisor = PlatformSupervisor(home, screen, host="127.0.0.1", port=1)
    monkeypatch.setattr("octavo.local.router.Child", lambda *_, **__: full())
    supervisor.router.start()
    assert (supervisor.router.state, supervisor.router.is_running) == ("down", False)
    assert "could not be started: No space left on device" in screen.reported[0]
