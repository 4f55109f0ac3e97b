"""Ctrl-C is noted where an exception would be lost, and acts where the caller looks."""

from __future__ import annotations

import signal
import threading

import pytest

from octavo_engine.core.interrupt import deferred_interrupt


@pytest.fixture(autouse=True)
def pythons_own_handler():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class Dropped:
    """Python drops an exception in its destructor."""

    def __del__(self) -> None:
        interrupt()


def interrupt() -> None:
    """In this thread, and handled at once: another one might take what is sent to the process."""
    signal.raise_signal(signal.SIGINT)


def test_it_is_seen_also_where_python_would_drop_it():
    before = signal.getsignal(signal.SIGINT)
    with deferred_interrupt() as interrupted:
        assert not interrupted()
        Dropped()
        assert interrupted()
    assert interrupted()
    assert signal.getsignal(signal.SIGINT) is before


def test_the_second_one_acts_at_once():
    with deferred_interrupt() as interrupted:
        interrupt()
        assert interrupted()
        with pytest.raises(KeyboardInterrupt):
            interrupt()


def test_other_threads_leave_signals_alone():
    before, seen = signal.getsignal(signal.SIGINT), []

    def work() -> None:
        with deferred_interrupt() as interrupted:
            seen.append((interrupted(), signal.getsignal(signal.SIGINT)))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [(False, before)]
