import os
import subprocess
import sys

from octavo_common.process_tree import cpu_seconds, process_tree

# More than the test expects: the kernel counts whole ticks of 10 ms, and rounds them down.
BURN = "import time\nwhile time.process_time() < 0.25: pass\n"
PARENT = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {BURN!r} + "print('done', flush=True); input()"],
                         stdin=subprocess.PIPE)
print(child.pid, flush=True)
input()
child.communicate(b"\\n")
print("ended", flush=True)
input()
"""


def test_processor_time_counts_children_that_run_and_that_have_ended():
    process = subprocess.Popen(
        [sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    with process:
        child = int(process.stdout.readline())
        assert process.stdout.readline() == "done\n"
        assert process_tree(process.pid) == [process.pid, child]
        running_s = cpu_seconds(process.pid)
        assert running_s >= 0.2
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "ended\n"
        assert process_tree(process.pid) == [process.pid]
        assert cpu_seconds(process.pid) >= running_s
        process.communicate("\n")


def test_a_process_that_is_gone_used_nothing():
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    assert cpu_seconds(process.pid) == 0.0
    assert cpu_seconds(os.getpid()) > 0.0
