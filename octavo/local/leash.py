"""Runs a command that cannot outlive the process that started it: `leash.py PARENT COMMAND …`.

A script of its own, of nothing but the standard library, because between fork and exec no Python
may safely run in a process that has threads.
"""

import ctypes
import os
import select
import signal
import subprocess
import sys

_PR_SET_PDEATHSIG = 1


def main(parent: int, command: list[str]) -> int:
    if sys.platform.startswith("linux"):
        # Kept across exec: whatever happens to the parent, the kernel ends this process.
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it ended before the line above
            return 1
        os.execv(command[0], command)
    return _watch(command)


def _watch(command: list[str]) -> int:
    """Where the kernel does not help: stdin is a pipe that only the parent holds open."""
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, _: child.send_signal(number))
    while child.poll() is None:
        if select.select([0], [], [], 0.2)[0]:
            child.kill()
            break
    return child.wait()


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
