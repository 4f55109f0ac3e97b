"""Several processes on one port: a dead one is replaced, and all end when the parent is told to."""

from __future__ import annotations

import http.client
import os
import re
import signal
import subprocess
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PATIENCE = 4000


@contextmanager
def router(*args: str) -> Iterator[tuple[psutil.Process, int]]:
    """`octavo router` as a user starts it: the process, and its port."""
    command = [sys.executable, "-m", "octavo.cli", "router", "--host", "127.0.0.1", "--port", "0"]
    environment = {**os.environ, "OCTAVO_ROUTER_UPSTREAMS": "http://127.0.0.1:9"}
    process = subprocess.Popen(
        [*command, *args], stderr=subprocess.PIPE, text=True, env=environment
    )
    try:
        assert process.stderr is not None
        line = process.stderr.readline()
        match = re.search(r"routes at http://127\.0\.0\.1:(\d+)/v1", line)
        assert match, line
        yield psutil.Process(process.pid), int(match[1])
    finally:
        for child in psutil.Process(process.pid).children() if process.poll() is None else ():
            child.kill()
        process.kill()
        process.communicate()


def until(fact: Callable[[], bool]) -> None:
    """Processes have no events to wait for."""
    for _ in range(PATIENCE):
        if fact():
            return
        psutil.wait_procs([psutil.Process()], timeout=0.005)
    raise AssertionError("it did not come true")


def answers(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (ConnectionError, TimeoutError):
        return False
    finally:
        connection.close()


def test_a_worker_that_dies_is_replaced_and_all_end_together():
    with router("--workers", "2") as (parent, port):
        until(lambda: answers(port))
        first, second = parent.children()
        first.kill()
        until(lambda: len({one.pid for one in parent.children()} - {first.pid}) == 2)
        until(lambda: answers(port))

        parent.send_signal(signal.SIGINT)
        assert parent.wait(20) == 0
        assert not second.is_running()
        assert not answers(port)


def test_one_process_ends_on_ctrl_c():
    with router() as (process, port):
        until(lambda: answers(port))
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
