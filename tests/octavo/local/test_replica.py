"""How an engine of this machine ends, is started again, and is given up."""

from __future__ import annotations

import sys

from octavo.local import replica as replica_module
from octavo.local.home import Home
from octavo.local.launch import Launch, ThreadShare
from octavo.local.replica import MAX_SAME_ENDS, LocalReplica
from tests.fakes.clock import ManualClock

SHARE = ThreadShare(num_threads=1)


class Rig:
    """A replica whose process is a line of Python."""

    def __init__(self, tmp_path, monkeypatch, script: str) -> None:
        self.script = script
        self.said: list[str] = []
        self.clock = ManualClock()
        home = Home(tmp_path)
        home.make()
        monkeypatch.setattr(
            replica_module, "octavo_command", lambda *_: [sys.executable, "-c", self.script]
        )
        # Nothing looks how it comes up.
        monkeypatch.setattr(
            "octavo.local.replica.asyncio.create_task", lambda work, **_: work.close()
        )
        self.replica = LocalReplica(
            "r-1", Launch("r", {}), home=home, environ={}, notify=self.said.append,
            wake=lambda: None, clock=self.clock,
        )  # fmt: skip

    def run_once(self) -> None:
        """One life, from its start to its end."""
        if self.replica.state == "held":
            self.replica.start(SHARE)
        else:
            self.clock.advance(100.0)
            self.replica.look(SHARE)
        assert self.replica._child is not None
        self.replica._child.wait(30)
        self.replica.look(SHARE)


def ends(code: int, words: str) -> str:
    return f"import sys; print({words!r}); sys.exit({code})"


def test_a_reason_does_not_grow_with_each_restart(tmp_path, monkeypatch):
    rig = Rig(tmp_path, monkeypatch, ends(1, "octavo: m: no such model"))
    details = []
    for _ in range(4):
        rig.run_once()
        details.append(rig.replica.detail)
    assert set(details) == {"exit code 1: octavo: m: no such model"}
    assert rig.replica.state == "waiting"


def test_an_end_is_not_blamed_on_an_earlier_one(tmp_path, monkeypatch):
    rig = Rig(tmp_path, monkeypatch, "import time; time.sleep(60)")
    rig.replica.start(SHARE)
    rig.clock.advance(rig.replica.launch.startup_s)
    rig.replica.look(SHARE)  # kills it
    assert rig.replica._child is not None
    rig.replica._child.wait(30)
    rig.replica.look(SHARE)
    assert rig.replica.detail == "was not ready within 300 s"
    rig.script = ends(1, "oh")
    rig.run_once()
    assert rig.replica.detail == "exit code 1: oh"


def test_settings_that_cannot_work_are_not_tried_for_ever(tmp_path, monkeypatch):
    rig = Rig(tmp_path, monkeypatch, ends(2, "octavo: --block-size must be 16; got 7"))
    for _ in range(MAX_SAME_ENDS):
        assert rig.replica.state in ("held", "waiting")
        rig.run_once()
    assert rig.replica.state == "failed"
    assert rig.replica.detail == "octavo: --block-size must be 16; got 7"
    assert "is not started again until its file changes" in rig.said[-1]
    rig.clock.advance(1000.0)
    rig.replica.look(SHARE)
    assert rig.replica._child is None
    rig.replica.leave()
    assert rig.replica.is_leaving


def test_ends_with_other_words_are_tried_again(tmp_path, monkeypatch):
    """A port that somebody was quicker to take is another one the next time."""
    rig = Rig(tmp_path, monkeypatch, "")
    for port in range(2 * MAX_SAME_ENDS):
        rig.script = ends(2, f"octavo: cannot listen on 127.0.0.1:{port}")
        rig.run_once()
    assert rig.replica.state == "waiting"
