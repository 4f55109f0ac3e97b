"""Several processes on one port: a dead one is replaced, and all end when the parent is told to."""

from __future__ import annotations

import http.client
import json
import logging
import os
import re
import signal
import subprocess
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

import psutil
import pytest

from octavo_router import cli

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.slow

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


def test_workers_end_with_a_parent_that_is_killed():
    with router("--workers", "2") as (parent, port):
        until(lambda: answers(port))
        workers = parent.children()
        parent.kill()
        until(lambda: not any(worker.is_running() for worker in workers))
        assert not answers(port)


def test_one_process_ends_on_ctrl_c():
    with router() as (process, port):
        until(lambda: answers(port))
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0


def decided_by(port: int) -> str:
    """The policy that one of the workers goes by."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/debug/config")
        return str(json.loads(connection.getresponse().read())["routing"]["policy"])
    except (ConnectionError, TimeoutError):
        return ""
    finally:
        connection.close()


def decided_by_all(port: int) -> set[str]:
    return {decided_by(port) for _ in range(12)}


def test_a_worker_that_takes_another_s_place_goes_by_what_was_read_last(tmp_path):
    file = tmp_path / "router.yaml"
    file.write_text("routing: {policy: random}\nserver: {debug_endpoints: true}\n")
    with router("--workers", "2", "--config", str(file)) as (parent, port):
        until(lambda: decided_by_all(port) == {"random"})
        file.write_text("routing: {policy: round-robin}\nserver: {debug_endpoints: true}\n")
        parent.send_signal(signal.SIGHUP)
        until(lambda: decided_by_all(port) == {"round-robin"})

        kill_all(parent)
        until(lambda: decided_by_all(port) == {"round-robin"})

        file.write_text("routing: {policy: [")  # half written
        kill_all(parent)
        until(lambda: decided_by_all(port) == {"round-robin"})


def kill_all(parent: psutil.Process) -> None:
    workers = parent.children()
    for worker in workers:
        worker.kill()
    gone = {worker.pid for worker in workers}
    until(lambda: len({one.pid for one in parent.children()} - gone) == 2)


@pytest.mark.parametrize(
    ("args", "is_reported"),
    [((), True), (("--api-key", "mine"), False)],
    ids=["open", "with a key"],
)
def test_a_router_that_lends_its_key_to_everybody_says_so(args, is_reported, capfd, monkeypatch):
    monkeypatch.setattr(cli, "open_listener", lambda host, port: None)
    monkeypatch.setattr(cli, "_run_process", lambda *given: 0)
    level, handlers = logging.getLogger("octavo").level, logging.getLogger().handlers[:]
    try:
        flags = {"upstreams": "http://127.0.0.1:9", "engine-key": "theirs"}
        assert cli.run(cli.ConfigLoader("", flags, args[1:], environment={})) == 0
    finally:
        logging.getLogger("octavo").setLevel(level)
        logging.getLogger().handlers[:] = handlers
    reported = capfd.readouterr().err
    assert ("anyone who reaches it is let in" in reported) is is_reported
    assert "theirs" not in reported
