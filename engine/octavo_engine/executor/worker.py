"""A rank above 0 as a process of its own: `python -m octavo_engine.executor.worker`.

It computes what rank 0 computes, with its own part of each layer, or the layers of its stage, and
decides nothing: the main thread takes one message after another from the ring. A second thread
reads the socket, and ends the process when rank 0 is gone; a third one reads adapters.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import numpy as np

from octavo_common.logs import set_up_logging
from octavo_engine import _native
from octavo_engine.backends.native.shard import RankPlace, Shard
from octavo_engine.backends.registry import build_gathering_rank, build_rank
from octavo_engine.backends.step_plan import StepPlan
from octavo_engine.errors import GatherFailed, OctavoError, machine_fault
from octavo_engine.executor import messages
from octavo_engine.executor.commands import ALIVE_S, Command
from octavo_engine.executor.rank_adapters import FollowingAdapters
from octavo_engine.executor.stage_rows import StageRows, StepRefused, place_of
from octavo_engine.weights.source import resolve_model

if TYPE_CHECKING:
    from collections.abc import Sequence

    from octavo_engine.backends.backend import BackendStep

logger = logging.getLogger("octavo_engine.executor.worker")  # __name__ is __main__ here

EXIT_LEADER_GONE = 4
EXIT_FAILED = 3


class _Nobody:
    """Rank 0 waits for this one's compilations in a gather, and answers for them."""

    def compile_begins(self) -> None: ...
    def compile_ends(self) -> None: ...


class RankWorker:
    """One rank at its end of the socket and of the ring, and of the `row_files` between stages."""

    def __init__(
        self,
        connection: Connection,
        memory_file: int,
        ring_file: int,
        row_files: Sequence[int] = (),
    ) -> None:
        self._row_files = row_files
        self._rows: StageRows | None = None
        self._sending = threading.Lock()
        self._connection = connection
        self._memory_file = memory_file
        self._ring_file = ring_file
        self._inbox: SimpleQueue[messages.ToWorker] = SimpleQueue()
        self._packing = ThreadPoolExecutor(1, "octavo-adapters")
        self._adapters: FollowingAdapters | None = None  # until the model is loaded

    def run(self) -> int:
        """The exit code; a worker that is no longer needed ends in `_listen`."""
        threading.Thread(target=self._listen, name="octavo-io", daemon=True).start()
        start = self._inbox.get()
        assert isinstance(start, messages.StartWorker)
        set_up_logging(start.log_format, start.log_level)
        try:
            self._serve(start)
        except GatherFailed as error:
            # Another rank is gone, or rank 0 gave one up; it names that one, and ends us.
            logger.debug("A gather failed", extra={"reason": str(error)})
            threading.Event().wait()
        except OctavoError as error:
            self._fail(type(error).__name__, str(error))
        except Exception as error:
            fault = machine_fault(error)
            if not fault:
                logger.exception("Rank %d of %d failed", start.rank, start.size)
            self._fail("OctavoError", fault or f"{type(error).__name__}: {error}")
        return EXIT_FAILED

    def _serve(self, start: messages.StartWorker) -> None:
        config = start.config
        files = resolve_model(config.model).with_overrides(config.overrides)
        if config.pipeline_parallel_size > 1:
            stage = place_of(config, start.rank)
            backend: Any = build_rank(config, files, stage=stage)
        else:
            stage = None
            place = RankPlace(Shard(start.rank, start.size), self._memory_file, start.patience_s)
            build = build_gathering_rank if config.device in ("cuda", "torch") else build_rank
            backend = build(config, files, place)
        adapters = FollowingAdapters(backend, start.rank, config.max_lora_rank)
        self._adapters = adapters
        self._send(messages.WorkerLoaded())
        prepare = self._inbox.get()
        assert isinstance(prepare, messages.PrepareWorker)
        backend.prepare(prepare.limits, prepare.num_blocks)
        ring = _native.Ring(*start.ring, self._ring_file, prepare.slot_bytes)
        if stage is not None:
            columns = backend.config.hidden_size
            self._rows = StageRows(stage, self._row_files, prepare.row_bytes, columns)
        self._send(messages.WorkerPrepared())
        while True:
            message = ring.take()
            self._follow(backend, adapters, Command(message[0]), message[1:])

    def _follow(
        self, backend: Any, adapters: FollowingAdapters, command: Command, body: bytes
    ) -> None:
        match command:
            case Command.STEP:
                # torch takes no memory that cannot be written to
                self._compute(backend, StepPlan.decode(bytearray(body)).step())
            case Command.WARM_UP:
                backend.warm_up(_Nobody())
            case Command.POISON:
                backend.poison_blocks(np.frombuffer(body, np.int32).tolist())
            case Command.RELEASE_KV:
                backend.release_kv()
            case Command.RESTORE_KV:
                backend.restore_kv()
            case Command.PLACE_ADAPTER:
                adapters.place(body)
            case Command.FORGET_ADAPTERS:
                adapters.forget(body)
            case Command.COUNT_EXPERTS:
                (number,) = np.frombuffer(body, np.int32).tolist()
                self._send(messages.ExpertCounts(number, backend.expert_layer_tokens()))

    def _compute(self, backend: Any, step: BackendStep) -> None:
        rows = None
        try:
            if self._rows is not None:
                self._rows.arrived()
                self._rows.put_into(step)
            rows = backend.follow(step)
        except StepRefused:
            pass  # and so it is by this one
        except ValueError:  # rank 0 gets the same error, or no rows, and fails this step only
            logger.exception("A step was refused")
        if self._rows is not None:
            self._rows.give(rows)

    def _pack_adapter(self, wanted: messages.PackAdapter) -> None:
        assert self._adapters is not None, "rank 0 waits until the model is loaded"
        self._send(self._adapters.pack(wanted))

    def _send(self, message: messages.FromWorker) -> None:
        with self._sending:
            messages.send(self._connection, message)

    def _fail(self, kind: str, message: str) -> None:
        try:
            self._send(messages.WorkerFailed(kind, message))
        except OSError:
            os._exit(EXIT_LEADER_GONE)

    def _listen(self) -> None:
        try:
            while True:
                if not self._connection.poll(ALIVE_S):
                    self._send(messages.WorkerAlive())
                    continue
                message = messages.receive(self._connection, messages.TO_WORKER)
                if isinstance(message, messages.PackAdapter):
                    self._packing.submit(self._pack_adapter, message)
                else:
                    self._inbox.put(message)
        except (EOFError, OSError, messages.BrokenMessage):
            os._exit(EXIT_LEADER_GONE)  # the main thread may be in the middle of a step


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="one rank of an engine; started by rank 0")
    parser.add_argument("--socket", type=int, required=True, help="the socket to rank 0")
    parser.add_argument("--memory", type=int, required=True, help="memory that all ranks map")
    parser.add_argument("--ring", type=int, required=True, help="memory that steps come through")
    parser.add_argument("--rows", type=int, action="append", default=[],
                        help="memory between a stage and the next")  # fmt: skip
    args = parser.parse_args(argv)
    # Ctrl-C and SIGTERM reach the whole group: rank 0 decides, and the socket tells.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return RankWorker(Connection(args.socket), args.memory, args.ring, args.rows).run()


if __name__ == "__main__":
    sys.exit(main())
