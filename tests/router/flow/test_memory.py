"""Memory runs short: who would wait is refused, then everybody, and then all is as before."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from octavo_router.errors import Rejected
from octavo_router.flow.admission import Ticket
from octavo_router.flow.memory import Level, MemoryUse, MemoryWatch, level_of, read_memory
from tests.router.flow.test_admission import World, refusal

if TYPE_CHECKING:
    from pathlib import Path

OK, TIGHT, FULL = Level.OK, Level.TIGHT, Level.FULL


@pytest.mark.parametrize(
    ("before", "share", "after"),
    [
        (OK, 0.84, OK),
        (OK, 0.85, TIGHT),
        (OK, 0.95, FULL),
        (TIGHT, 0.81, TIGHT),  # it does not go to and fro
        (TIGHT, 0.79, OK),
        (FULL, 0.91, FULL),
        (FULL, 0.89, TIGHT),
        (FULL, 0.81, TIGHT),
        (FULL, 0.5, OK),
    ],
)
def test_levels(before, share, after):
    assert level_of(share, before) == after


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_a_containers_limit_in_both_forms_without_files_that_are_only_cached(tmp_path):
    write(tmp_path / "two", {
        "sys/fs/cgroup/memory.max": "1000\n",
        "sys/fs/cgroup/memory.current": "900\n",
        "sys/fs/cgroup/memory.stat": "anon 500\ninactive_file 300\n",
    })  # fmt: skip
    write(tmp_path / "one", {
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "1000\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": "900\n",
        "sys/fs/cgroup/memory/memory.stat": "total_inactive_file 300\n",
    })  # fmt: skip
    for form in ("one", "two"):
        assert read_memory(0, tmp_path / form, is_container=True) == MemoryUse(600, 1000)
        assert read_memory(0, tmp_path / form, is_container=False) is None


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"sys/fs/cgroup/memory.max": "max\n", "sys/fs/cgroup/memory.current": "9\n"},
        {
            "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{2**63 - 4096}\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "9\n",
        },
    ],
)
def test_no_limit_is_no_limit(tmp_path, files):
    write(tmp_path, files)
    assert read_memory(0, tmp_path, is_container=True) is None


def test_a_limit_of_its_own_is_for_this_process():
    memory = read_memory(2**40)
    assert memory is not None
    assert 10 * 2**20 < memory.used_bytes < memory.limit_bytes == 2**40


def test_changes_are_told_once():
    used = [0]
    heard: list[Level] = []
    watch = MemoryWatch(0, heard.append, read=lambda limit: MemoryUse(used[0], 100))
    for used[0] in (10, 86, 87, 96, 99, 20, 10):
        watch.look()
    assert heard == [TIGHT, FULL, OK]


def test_bodies_on_their_way_count_as_if_they_were_there():
    heard: list[Level] = []
    watch = MemoryWatch(0, heard.append, read=lambda limit: MemoryUse(50, 100))
    for awaited_bytes in (34, 36, 46, 0):
        watch.look(awaited_bytes)
    assert heard == [TIGHT, FULL, OK]


def test_what_only_the_allocator_keeps_is_given_back_first():
    used = [90]
    heard: list[Level] = []

    def give_back() -> None:
        used[0] -= 30

    watch = MemoryWatch(
        0, heard.append, read=lambda limit: MemoryUse(used[0], 100), give_back=give_back
    )
    watch.look()
    assert (heard, used) == ([], [60])


def test_nobody_may_wait_while_it_is_tight_and_nobody_comes_in_while_it_is_full():
    world = World(seats=1)
    world.gate.change_memory(TIGHT)
    ticket = world.admit()
    assert isinstance(ticket, Ticket)
    ticket.release()
    world.rooms.seats = 0
    status, code, retry_after_s = refusal(world.admit)
    assert (status, code) == (503, "out_of_memory")
    assert retry_after_s > 0.0
    world.rooms.seats = 1
    world.gate.change_memory(FULL)
    with pytest.raises(Rejected, match="short of memory"):
        world.gate.authenticate("", "")
    world.gate.change_memory(OK)
    assert isinstance(world.admit(), Ticket)


def test_outside_of_a_container_half_of_the_machine_is_shared_by_the_workers(tmp_path):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/statm").write_text("9999 1000 1 1 0 1 0\n")
    (tmp_path / "proc/meminfo").write_text("MemTotal:       8000000 kB\nMemFree: 1 kB\n")
    page = os.sysconf("SC_PAGESIZE")
    found = read_memory(0, tmp_path, is_container=False, num_processes=4)
    assert found == (1000 * page, 8_000_000 * 1024 // 8)
    assert read_memory(77, tmp_path, is_container=False) == (1000 * page, 77)
