"""Nothing outlives whoever asked for it, also where the kernel does not see to that."""

from __future__ import annotations

import subprocess
import sys

import psutil
import pytest

from octavo.local import leash

# Reads nothing and writes its number; only a signal ends it.
SLEEPER = "import os, signal; print(os.getpid(), flush=True); signal.pause()"


@pytest.mark.slow
@pytest.mark.parametrize("by", ["prctl", "pipe"])
def test_the_command_ends_with_its_parent(by):
    command = [sys.executable, "-c", SLEEPER]
    if by == "pipe":
        start = f"from octavo.local import leash; leash._watch({command!r})"
    else:
        start = (
            "import os, signal, subprocess, sys\n"
            f"leash, command = {leash.__file__!r}, {command!r}\n"
            "subprocess.Popen([sys.executable, leash, str(os.getpid()), *command])\n"
            "signal.pause()"
        )
    parent = subprocess.Popen(
        [sys.executable, "-c", start], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdin is not None and parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    if by == "pipe":
        parent.stdin.close()
    else:
        parent.kill()
    child.wait(20)
    parent.wait(20)
    parent.stdin.close()
    parent.stdout.close()


def test_a_command_whose_parent_is_gone_already_is_not_run():
    done = subprocess.run(
        [sys.executable, leash.__file__, "1", sys.executable, "-c", "print('ran')"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (1, "")
