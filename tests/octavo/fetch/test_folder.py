"""One writer at a time, whoever dies with the lock in his hand."""

from __future__ import annotations

import json
import threading

import pytest

from octavo.fetch.folder import LOCK_FILE, MARK_FILE, FolderLock, FolderMark, read_mark, write_mark
from octavo.fetch.parts import StoredPart

MARK = FolderMark("demo://x", "", "", "sha256:0", (StoredPart("a", 1, "0"),))


def lock(folder, **more) -> FolderLock:
    return FolderLock(folder, **{"stale_s": 0.2, "touch_s": 0.02, "look_s": 0.01, **more})


@pytest.mark.slow
def test_a_second_one_waits_for_the_first(tmp_path):
    holders: list[str] = []
    entered = threading.Event()
    waiting = threading.Event()

    def on_wait(holder: str) -> None:
        holders.append(holder)
        waiting.set()

    def second() -> None:
        with lock(tmp_path, stale_s=1.0, on_wait=on_wait):
            entered.set()

    thread = threading.Thread(target=second)
    with lock(tmp_path, stale_s=1.0):
        thread.start()
        assert waiting.wait(60)
        # It is touched: longer than stale_s does not make it stale.
        assert not entered.wait(1.5)
    assert entered.wait(60)
    thread.join()
    assert len(holders) == 1 and ", process " in holders[0]
    assert not (tmp_path / LOCK_FILE).exists()


def test_a_dead_one_s_lock_is_taken_over(tmp_path):
    (tmp_path / LOCK_FILE).write_text('{"token": "dead", "host": "h", "pid": 1}')
    with lock(tmp_path) as mine:
        assert mine.is_held


def test_a_lock_of_a_process_that_ended_here_does_not_wait(tmp_path):
    with lock(tmp_path):
        content = json.loads((tmp_path / LOCK_FILE).read_text())
    for other in ({"pid": 2**22 + 1}, {"began": "1"}):
        (tmp_path / LOCK_FILE).write_text(json.dumps({**content, **other}))
        with lock(tmp_path, stale_s=1e9) as mine:
            assert mine.is_held


def test_whoever_was_taken_for_dead_notices(tmp_path):
    with lock(tmp_path) as mine:
        (tmp_path / LOCK_FILE).write_text('{"token": "another"}')
        mine._toucher.join(60)
        assert not mine.is_held
    assert (tmp_path / LOCK_FILE).exists()  # it is the other one's


@pytest.mark.slow
def test_only_one_of_many_takes_over(tmp_path):
    (tmp_path / LOCK_FILE).write_text("{}")
    inside, most, guard = [0], [0], threading.Lock()

    def run() -> None:
        with lock(tmp_path, stale_s=1.0):
            with guard:
                inside[0] += 1
                most[0] = max(most[0], inside[0])
            threading.Event().wait(0.02)
            with guard:
                inside[0] -= 1

    threads = [threading.Thread(target=run) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert most == [1]


def test_a_lock_that_changed_hands_meanwhile_is_put_back(tmp_path):
    """Between the look and the taking somebody else took it over."""
    (tmp_path / LOCK_FILE).write_text("the living one's")
    lock(tmp_path)._take_over(b"the dead one's")
    assert (tmp_path / LOCK_FILE).read_text() == "the living one's"
    assert [path.name for path in tmp_path.iterdir()] == [LOCK_FILE]


def test_a_mark_is_read_as_it_was_written(tmp_path):
    (tmp_path / "a").write_bytes(b"x")
    write_mark(tmp_path, MARK)
    assert read_mark(tmp_path) == MARK


def test_a_mark_that_cannot_be_believed_is_none(tmp_path):
    assert read_mark(tmp_path) is None
    write_mark(tmp_path, MARK)
    assert read_mark(tmp_path) is None  # its file is not there
    for content in ("{", "[" * 3000):
        (tmp_path / MARK_FILE).write_text(content)
        assert read_mark(tmp_path) is None
