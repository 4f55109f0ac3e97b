"""Several router processes on one port: restarted, sent the parent's signals, replaced one by one.

The kernel deals connections out among them. Each follows all engines on its own, so that none waits
for another, and one that dies takes only its own connections along.

    SIGTERM, SIGINT   all drain and end      SIGHUP   all read their configuration again
    SIGUSR2           replaced one by one: the new one listens before the old one drains

A parent that is killed takes its workers along: each drains when the parent's pipe ends.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger("octavo.router")

_SIGNALS: Final = frozenset(
    (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2, signal.SIGCHLD)
)
_OUR_SIGNALS: Final = (-signal.SIGTERM, -signal.SIGINT)  # as exit codes
_STABLE_S: Final = 5.0  # a worker that lives this long is not one that cannot start
_MAX_PAUSE_S: Final = 5.0
_READY_S: Final = 30.0  # for a replacement to listen


@dataclass(slots=True)
class Worker:
    number: int
    pid: int
    started_at: float
    ready: int  # the reading end of a pipe: a byte comes when it listens
    is_retired: bool = False  # is to end: not replaced


@dataclass(slots=True)
class WorkerSupervisor:
    """`run_worker(number, on_ready)` runs in each child and returns its exit code."""

    count: int
    run_worker: Callable[[int, Callable[[], None]], int]
    on_reload: Callable[[], None] = lambda: (
        None
    )  # all were sent the order to read their configuration
    workers: dict[int, Worker] = field(default_factory=dict)  # by process id
    is_stopping: bool = False
    num_deaths: int = 0  # in a row, of young ones
    start_at: dict[int, float] = field(default_factory=dict)  # numbers to start again, and when
    parent: tuple[int, int] = field(
        default_factory=os.pipe
    )  # its writing end is the parent's alone

    def run(self) -> int:
        """Until all have ended after SIGTERM. The exit code: that of the worst."""
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        for number in range(self.count):
            self._start(number)
        worst = 0
        while self.workers or (self.start_at and not self.is_stopping):
            self._start_due()
            received = signal.sigtimedwait(_SIGNALS, self._pause_s())
            if received is None:
                continue
            match received.si_signo:
                case signal.SIGCHLD:
                    worst = max(worst, self._reap())
                case signal.SIGHUP:
                    self._tell(signal.SIGHUP)
                    self.on_reload()
                case signal.SIGUSR2:
                    self._replace_all()
                case number:
                    self.is_stopping = True
                    self.start_at.clear()
                    self._tell(signal.Signals(number))
        return worst

    def _start(self, number: int) -> Worker:
        ready, ready_end = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(ready)
            self._be_worker(number, ready_end)
        os.close(ready_end)
        worker = self.workers[pid] = Worker(number, pid, time.monotonic(), ready)
        return worker

    def _be_worker(self, number: int, ready_end: int) -> None:
        """In the child; never returns."""
        code = 1
        try:
            for worker in self.workers.values():
                os.close(worker.ready)
            reading, writing = self.parent
            os.close(writing)
            for received in _SIGNALS:
                signal.signal(received, signal.SIG_DFL)
            signal.signal(signal.SIGUSR2, signal.SIG_IGN)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
            threading.Thread(target=_end_with_parent, args=(reading,), daemon=True).start()
            code = self.run_worker(number, lambda: _announce(ready_end))
        except BaseException:  # whatever it is, the parent's stack must not run twice
            logger.exception("Unhandled error in a worker")
        finally:
            logging.shutdown()
            os._exit(code)

    def _reap(self) -> int:
        """Takes note of all that have ended. The worst exit code of those that were meant to."""
        worst = 0
        while self.workers:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            worker = self.workers.pop(pid, None)
            if worker is None:
                continue
            os.close(worker.ready)
            code = os.waitstatus_to_exitcode(status)
            if worker.is_retired or self.is_stopping:
                if code not in _OUR_SIGNALS:  # it may have been too young to listen to them
                    worst = max(worst, abs(code))
                continue
            now = time.monotonic()
            is_young = now - worker.started_at < _STABLE_S
            self.num_deaths = self.num_deaths + 1 if is_young else 0
            pause_s = min(_MAX_PAUSE_S, 0.1 * 2.0**self.num_deaths) if is_young else 0.0
            self.start_at[worker.number] = now + pause_s
            logger.error(
                "A worker died; it is started again",
                extra={"worker": worker.number, "pid": pid, "exit_code": code},
            )
        return worst

    def _start_due(self) -> None:
        now = time.monotonic()
        for number, at in list(self.start_at.items()):
            if at <= now:
                del self.start_at[number]
                self._start(number)

    def _pause_s(self) -> float:
        if not self.start_at:
            return 3600.0
        return max(0.0, min(self.start_at.values()) - time.monotonic())

    def _replace_all(self) -> None:
        for old in list(self.workers.values()):
            new = self._start(old.number)
            if not _is_ready(new.ready, _READY_S):
                logger.error("Kept a worker: its replacement does not start")
                new.is_retired = True
                os.kill(new.pid, signal.SIGTERM)
                return
            old.is_retired = True
            os.kill(old.pid, signal.SIGTERM)

    def _tell(self, number: signal.Signals) -> None:
        for worker in self.workers.values():
            os.kill(worker.pid, number)


def _end_with_parent(reading: int) -> None:
    """Nothing is ever written there: reading returns when the last writer is gone."""
    os.read(reading, 1)
    os.kill(os.getpid(), signal.SIGTERM)


def _announce(ready_end: int) -> None:
    os.write(ready_end, b"1")
    os.close(ready_end)


def _is_ready(ready: int, timeout_s: float) -> bool:
    import select

    readable, _, _ = select.select([ready], [], [], timeout_s)
    return bool(readable) and os.read(ready, 1) == b"1"
