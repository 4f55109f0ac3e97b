"""Grammars of requests, tried out in processes that they may take down instead of the server.

A grammar that needs too much memory or time, or that the compiler dies of, costs its own request:
its process ends, and the next grammar starts another. What was found is kept by the grammar's
digest, so that a grammar which is sent again costs a look.

Nothing names the sender of a SIGKILL: the kernel sends it for lack of memory, to whichever process
it finds, and so do those who end an engine. A grammar is held to be its cause only where each of
several processes was killed over it, and at last one that had no other beside it.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from contextlib import contextmanager
from functools import cache
from hashlib import blake2b
from queue import Empty, LifoQueue
from typing import TYPE_CHECKING, Final

import msgspec

from octavo_common.process_tree import cpu_seconds
from octavo_engine.errors import GenerationFailed, InvalidRequest, QueueFull
from octavo_engine.grammar.check import refusal
from octavo_engine.grammar.schema import PARAM
from octavo_engine.grammar.trial_process import (
    CPU_S,
    GROWTH_BYTES,
    TrialReply,
    TrialRequest,
    framed,
    receive,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from octavo_engine.errors import RequestError
    from octavo_engine.state.grammar import GrammarSpec

logger = logging.getLogger(__name__)

COMMAND: Final = (sys.executable, "-m", "octavo_engine.grammar.trial_process")
NUM_PROCESSES: Final = 2
START_S: Final = 60.0
WALL_S: Final = 30.0  # of one trial: far more than its processor time, for machines that are busy
QUEUE_S: Final = 10.0  # until one begins
TRIES: Final = 3  # of a grammar whose process others may have ended
ALONE_AFTER_S: Final = 1.0  # before one more of its own: what kills processes may be over then
_MAX_KNOWN: Final = 4096
# Signals to a whole group of processes, whose end the request does not have to pay for.
_TO_THE_GROUP: Final = (-signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP)
_BY_OTHERS: Final = (-signal.SIGKILL, *_TO_THE_GROUP)
# One thread each: a processor of many cores would take a small address space for stacks alone.
_ENVIRONMENT: Final = {"RAYON_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}


class ProcessLost(Exception):
    """The process ended over a request; `code` is None where it had got no processor for it."""

    def __init__(self, code: int | None, *, has_request: bool) -> None:
        super().__init__(code)
        self.code = code
        self.has_request = has_request  # False: it ended before, so that no request is the cause

    @property
    def is_by_others(self) -> bool:
        """Perhaps: then another process may live."""
        return self.code is not None and (not self.has_request or self.code in _BY_OTHERS)


class GrammarTrials:
    """May be called by any threads; each call blocks, for milliseconds as a rule."""

    def __init__(
        self,
        *,
        num_processes: int = NUM_PROCESSES,
        queue_s: float = QUEUE_S,
        wall_s: float = WALL_S,
        command: Sequence[str] = COMMAND,
    ) -> None:
        """Processes start with the first grammars."""
        self.num_lost = 0  # processes that ended over a request
        self._queue_s = queue_s
        self._wall_s = wall_s
        self._command = command
        self._known: OrderedDict[bytes, TrialReply] = OrderedDict()
        self._lock = threading.Lock()
        self._num_processes = num_processes
        self._taking_all = threading.Lock()
        self._idle: LifoQueue[TrialProcess | None] = LifoQueue()
        for _ in range(num_processes):
            self._idle.put(None)  # may be started

    def check(self, spec: GrammarSpec) -> None:
        """Raises RequestError for a grammar that cannot be served."""
        message = msgspec.msgpack.encode(TrialRequest(spec))
        digest = blake2b(message, digest_size=16).digest()
        with self._lock:
            if (known := self._known.get(digest)) is not None:
                self._known.move_to_end(digest)
        reply = known or self._reply(message)
        with self._lock:
            self._known[digest] = reply
            while len(self._known) > _MAX_KNOWN:
                self._known.popitem(last=False)
        if reply.message:
            raise InvalidRequest(reply.message, param=reply.param, code=reply.code)

    def verdicts(self, texts: Sequence[str], schema: str) -> list[bool | None]:
        """Of each text, whether it is valid under the schema; None: it is not known."""
        request = TrialRequest(texts=tuple(texts), schema=schema)
        try:
            return list(self._run(msgspec.msgpack.encode(request)).verdicts)
        except (ProcessLost, QueueFull, GenerationFailed):
            return [None] * len(texts)

    def close(self) -> None:
        """End the processes that have nothing to do."""
        while True:
            try:
                process = self._idle.get_nowait()
            except Empty:
                return
            if process is not None:
                process.close()

    def _reply(self, message: bytes) -> TrialReply:
        """Raises RequestError where that may be otherwise another time."""
        try:
            try:
                return self._run(message)
            except ProcessLost as lost:
                if not lost.has_request or lost.code != -signal.SIGKILL:
                    raise
            return self._run_alone(message)
        except ProcessLost as lost:
            if not lost.has_request or lost.code is None or lost.code in _TO_THE_GROUP:
                raise _busy() from None
            error = _refused(lost.code)
            return TrialReply(error.message, error.param, error.code)

    def _run(self, message: bytes) -> TrialReply:
        """Raises ProcessLost, QueueFull, GenerationFailed."""
        process = self._take()
        try:
            for number in range(1, TRIES + 1):
                try:
                    process = process or self._started()
                    reply = process.call(message, self._wall_s)
                    if reply.is_last:
                        process.close()
                        process = None
                    return reply
                except ProcessLost as lost:
                    process = None
                    self._note(lost)
                    if number == TRIES or not lost.is_by_others:
                        raise
        finally:
            self._idle.put(process)
        raise AssertionError("a loop that returns or raises")

    def _run_alone(self, message: bytes) -> TrialReply:
        """In a process of its own, a moment later, with no other of ours beside it. Raises as
        `_run`."""
        time.sleep(ALONE_AFTER_S)
        with self._alone():
            try:
                process = self._started()
                try:
                    return process.call(message, self._wall_s)
                finally:
                    process.close()
            except ProcessLost as lost:
                self._note(lost)
                raise

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """No process of ours runs, and none is started by others. Raises QueueFull."""
        # One at a time: two that take half of the processes each would wait for ever.
        if not self._taking_all.acquire(timeout=self._queue_s):
            raise _busy()
        num_taken = 0
        try:
            while num_taken < self._num_processes:
                process = self._take()
                num_taken += 1
                if process is not None:
                    process.close()
            yield
        finally:
            for _ in range(num_taken):
                self._idle.put(None)
            self._taking_all.release()

    def _take(self) -> TrialProcess | None:
        """Raises QueueFull."""
        try:
            return self._idle.get(timeout=self._queue_s)
        except Empty:
            raise _busy() from None

    def _started(self) -> TrialProcess:
        """Raises ProcessLost, GenerationFailed."""
        try:
            return TrialProcess(self._command)
        except OSError as error:
            raise GenerationFailed(f"the grammar could not be tried out: {error}") from error

    def _note(self, lost: ProcessLost) -> None:
        with self._lock:
            self.num_lost += 1
        logger.warning("The process that tries grammars out ended over one (%s)", lost.code)


class TrialProcess:
    """One process, for one caller at a time."""

    def __init__(self, command: Sequence[str]) -> None:
        """Raises OSError, ProcessLost."""
        self._began_at_cpu_s = 0.0
        self._has_request = False
        self._connection, theirs = socket.socketpair()
        with theirs:
            try:
                self._process = subprocess.Popen(
                    [*command, "--fd", str(theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,  # a panic's words, which have parts of the grammar
                    env={**os.environ, **_ENVIRONMENT},
                )
            except BaseException:
                self._connection.close()
                raise
        self._receive(START_S)

    def call(self, message: bytes, wall_s: float) -> TrialReply:
        """Raises ProcessLost, and then this has ended."""
        self._began_at_cpu_s = cpu_seconds(self._process.pid)
        try:
            self._connection.settimeout(wall_s)
            self._connection.sendall(framed(message))
        except OSError:
            self._end()
        self._has_request = True
        return msgspec.msgpack.decode(self._receive(wall_s), type=TrialReply)

    def close(self) -> None:
        self._connection.close()
        self._process.kill()
        self._process.wait()

    def _receive(self, wall_s: float) -> bytes:
        try:
            self._connection.settimeout(wall_s)
            message = receive(self._connection)
        except TimeoutError:
            used_s = cpu_seconds(self._process.pid) - self._began_at_cpu_s
            self.close()
            # On a busy machine its time is over before it has used what it may.
            is_busy = self._has_request and used_s >= CPU_S / 4
            code = -signal.SIGXCPU if is_busy else None
            raise ProcessLost(code, has_request=self._has_request) from None
        except OSError:
            message = None
        return self._end() if message is None else message

    def _end(self) -> bytes:
        self._connection.close()
        raise ProcessLost(self._process.wait(), has_request=self._has_request)


@cache
def shared_trials() -> GrammarTrials:
    """Those of this process; its processes end with it."""
    return GrammarTrials()


def _refused(code: int) -> RequestError:
    if code == -signal.SIGXCPU:
        return InvalidRequest(
            f"the grammar takes more than {CPU_S} s to compile; make it smaller",
            param=PARAM,
            code="grammar_timeout",
        )
    return refusal(
        f"compiling it takes more than {GROWTH_BYTES >> 20} MiB, or ends the compiler; "
        "make it smaller"
    )


def _busy() -> QueueFull:
    return QueueFull(
        "the grammar could not be tried out in time", code="grammar_queue_full", retry_after_s=5
    )
