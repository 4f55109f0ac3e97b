"""Who has the home, and what is left of those who had it."""

from __future__ import annotations

import errno
import os

import pytest

from octavo.local.home import Home, HomeLock, write_whole
from octavo_engine.errors import ConfigError


def home_at(path) -> Home:
    home = Home.find({"OCTAVO_HOME": str(path)})
    home.make()
    return home


def test_one_at_a_time(tmp_path):
    home = home_at(tmp_path)
    assert home.owner() is None
    with HomeLock(home, "http://here"):
        owner = home.owner()
        assert owner is not None and (owner.pid, owner.url) == (os.getpid(), "http://here")
        with (
            pytest.raises(ConfigError, match=rf"process {os.getpid()}\) serves at http://here"),
            HomeLock(home, "http://there"),
        ):
            pass
    assert home.owner() is None


def test_a_home_that_cannot_be_made_says_so(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"OCTAVO_HOME .* cannot be used"):
        home_at(tmp_path / "file")


def test_runs_leave_logs_but_not_for_ever(tmp_path):
    home = home_at(tmp_path)
    (home.run / "old.toml").write_text("")
    for number in range(60):
        log = home.logs / f"{number}.log"
        log.write_text("")
        os.utime(log, (number, number))
    home.tidy()

    assert list(home.run.iterdir()) == []
    assert {int(log.stem) for log in home.logs.iterdir()} == set(range(10, 60))


def test_files_are_private_and_never_half_written(tmp_path):
    write_whole(tmp_path / "a", "one")
    write_whole(tmp_path / "a", "two")
    assert (tmp_path / "a").read_text() == "two"
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("what", ["open", "write"])
def test_a_home_that_has_no_room_or_may_not_be_written_says_so(tmp_path, what):
    home = home_at(tmp_path)
    if what == "write":
        home.lock_file.symlink_to("/dev/full")
    else:
        home.lock_file.mkdir()
    with (
        pytest.raises(ConfigError, match=r"OCTAVO_HOME .* cannot be used: .*; set OCTAVO_HOME"),
        HomeLock(home, "http://here"),
    ):
        pass


def test_what_could_not_be_written_leaves_nothing_behind(tmp_path, monkeypatch):
    write_whole(tmp_path / "a", "one")

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("pathlib.Path.replace", fail)
    with pytest.raises(OSError, match="No space"):
        write_whole(tmp_path / "a", "two")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
