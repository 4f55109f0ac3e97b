"""Cores that are started before their settings are there: whose they become, and how they end."""

import fcntl
import importlib
import os
import signal
import socket
import sys
from functools import partial
from typing import cast

import psutil
import pytest

from octavo_engine.config import EngineConfig
from octavo_engine.core.async_engine import AsyncEngine
from octavo_engine.core.connect import choose_connect
from octavo_engine.core.process import child
from octavo_engine.core.process.process_client import ProcessClient
from octavo_engine.core.process.spawn import SpawnedCore, spawn_ahead, spawn_core
from tests.engine.core.process.test_process_client import (
    CONFIG,
    FAULTY,
    PATIENT,
    pid_of,
    restarted,
    run,
    text_of,
)


@pytest.mark.slow
def test_the_first_core_is_the_one_that_was_started_ahead_and_later_ones_are_new():
    async def test():
        spawned = spawn_core(FAULTY)
        connect = partial(ProcessClient, timing=PATIENT, command=FAULTY, spawned=spawned)
        engine = await AsyncEngine.start(CONFIG, connect=connect)
        await engine.ready()
        assert pid_of(engine) == spawned.process.pid
        whole = await text_of(engine)
        os.kill(spawned.process.pid, signal.SIGKILL)
        await restarted(engine, spawned.process.pid)
        assert await text_of(engine) == whole
        await engine.stop()
        spawned.drop()  # it has ended: nothing happens

    run(test())


@pytest.mark.slow
def test_a_core_that_nobody_configures_is_gone_once_it_is_dropped():
    spawned = spawn_core()
    assert psutil.pid_exists(spawned.process.pid)
    spawned.drop()
    assert not psutil.pid_exists(spawned.process.pid)


def test_only_an_engine_of_one_core_process_has_it_started_ahead(monkeypatch):
    spawned = object()
    monkeypatch.setattr("octavo_engine.core.process.spawn.spawn_core", lambda: spawned)
    assert spawn_ahead(EngineConfig(model="m", device="cpu")) is spawned
    assert spawn_ahead(EngineConfig(model="m", device="cpu", data_parallel_size=2)) is None
    assert spawn_ahead(CONFIG) is None, "the simulator runs in the server's own process"


def test_the_core_that_was_started_ahead_reaches_the_client():
    spawned = cast("SpawnedCore", object())
    connect = choose_connect(EngineConfig(model="m", device="cpu"), spawned=spawned)
    assert isinstance(connect, partial)
    assert connect.keywords["spawned"] is spawned


def test_imports_end_when_the_settings_come(monkeypatch):
    imported: list[str] = []
    monkeypatch.setattr(importlib, "import_module", imported.append)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        child._import_ahead(theirs)
        assert imported == list(child._IMPORTED_AHEAD)
        imported.clear()
        ours.sendall(b"x")
        child._import_ahead(theirs)
        assert imported == []


def test_a_core_may_be_given_a_file_of_any_number(monkeypatch):
    """A server with thousands of clients starts its core again."""
    monkeypatch.setattr(importlib, "import_module", lambda name: None)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        high = fcntl.fcntl(theirs, fcntl.F_DUPFD, 1500)
        with socket.socket(fileno=high) as connection:
            child._import_ahead(connection)


@pytest.mark.parametrize("module", child._IMPORTED_AHEAD)
def test_what_is_imported_ahead_exists(module):
    __import__(module)
    assert module in sys.modules
