"""The kernel kills for lack of memory when it is to, and only in the group."""

from __future__ import annotations

import subprocess
import sys

import pytest

from benchmarks.faults.memory_group import MemoryGroup

PROGRAM = """
import sys, time
taken = bytearray(int(sys.argv[1]) << 20)
taken[::4096] = b"x" * len(taken[::4096])
print(flush=True)
time.sleep(600)
"""


@pytest.mark.slow
def test_the_largest_process_of_the_group_is_killed_and_no_other():
    group = MemoryGroup.create("octavo-test")
    if group is None:
        pytest.skip("control groups cannot be made here")
    started: list[subprocess.Popen[bytes]] = []

    def start(mib: int, *, is_inside: bool) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", PROGRAM, str(mib)]
        process = subprocess.Popen(
            group.command(command) if is_inside else command, stdout=subprocess.PIPE
        )
        started.append(process)
        assert process.stdout is not None
        process.stdout.readline()
        return process

    try:
        small, large = start(8, is_inside=True), start(120, is_inside=True)
        outside = start(120, is_inside=False)
        group.exhaust()
        assert large.wait(30) == -9
        assert small.poll() is None and outside.poll() is None
    finally:
        for process in started:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
        group.remove()
    assert not group.folder.exists()
