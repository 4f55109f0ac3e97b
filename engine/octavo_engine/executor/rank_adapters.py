"""LoRA adapters of several ranks: each reads the files itself and keeps its own part.

Rank 0 numbers them. A rank packs one in a thread of its own, so that steps go on meanwhile; what is
put into slots and what is forgotten goes through the ring, in the order of the steps.
"""

from __future__ import annotations

import logging
import weakref
from collections import deque
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np

from octavo_engine.errors import ModelError
from octavo_engine.executor import messages
from octavo_engine.weights.adapter import read_adapter

if TYPE_CHECKING:
    from collections.abc import Callable

    from octavo_engine import _native
    from octavo_engine.backends.native.backend import NativeBackend
    from octavo_engine.executor.rank_processes import RankProcesses
    from octavo_engine.weights.adapter import AdapterFiles

logger = logging.getLogger(__name__)

MAX_FORGOTTEN = 256  # in one message of the ring, which has its bounds
NOTHING = -1  # instead of a number: the slot becomes empty


class RankedAdapter:
    """An adapter that every rank has a part of. Once nobody refers to it, all may forget it."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.own: _native.PackedAdapter | None = None  # rank 0's part


class LeadingAdapters:
    """Rank 0's end."""

    def __init__(self, processes: RankProcesses) -> None:
        self._processes = processes
        self._numbers = count()
        self._unused: deque[int] = deque()  # any thread adds to them

    def pack(
        self, files: AdapterFiles, pack_own: Callable[[AdapterFiles], _native.PackedAdapter]
    ) -> RankedAdapter:
        """On all ranks at the same time; one call at a time. Raises ModelError, by which no rank
        keeps anything, and WorkerLost."""
        adapter = RankedAdapter(next(self._numbers))
        self._processes.send(
            messages.PackAdapter(adapter.number, str(files.path.absolute()), files.digest)
        )
        try:
            adapter.own = pack_own(files)
        finally:  # a rank may forget it once it has answered, and not before
            answers = self._processes.answers(adapter.number)
            weakref.finalize(adapter, self._unused.append, adapter.number).atexit = False
        for answer in answers:
            if answer.error:
                raise ModelError(f"{self._processes.name_of(answer.rank)}: {answer.error}")
        return adapter

    def take_unused(self) -> list[bytes]:
        """What the other ranks can forget, as messages: with the next step, so that no rank does
        before it has placed it."""
        bodies = []
        while self._unused:
            amount = min(len(self._unused), MAX_FORGOTTEN)
            numbers = [self._unused.popleft() for _ in range(amount)]
            bodies.append(np.array(numbers, np.int32).tobytes())
        return bodies


def placing(slot: int, adapter: RankedAdapter | None) -> bytes:
    """The message to the other ranks about a slot."""
    number = NOTHING if adapter is None else adapter.number
    return np.array([slot, number], np.int32).tobytes()


class FollowingAdapters:
    """The end of a rank above 0."""

    def __init__(self, backend: NativeBackend, rank: int, max_rank: int) -> None:
        self._backend = backend
        self._rank = rank
        self._max_rank = max_rank
        self._held: dict[int, Any] = {}  # the packing thread adds to them

    def pack(self, wanted: messages.PackAdapter) -> messages.AdapterPacked:
        """In a thread. Whatever is wrong fails this adapter only."""
        try:
            files = read_adapter(wanted.path, max_rank=self._max_rank)
            if files.digest != wanted.digest:
                raise ModelError(
                    f"the files in {wanted.path} are not those that rank 0 read: they changed "
                    "meanwhile, or this host has others; load the adapter again once all are equal"
                )
            self._held[wanted.number] = self._backend.pack_adapter(files)
        except (ModelError, MemoryError) as error:
            return messages.AdapterPacked(wanted.number, self._rank, str(error) or "no memory")
        except Exception as error:  # it must not end the rank, nor the requests of others
            logger.exception("Could not read an adapter")
            return messages.AdapterPacked(wanted.number, self._rank, f"{wanted.path}: {error}")
        return messages.AdapterPacked(wanted.number, self._rank)

    def place(self, body: bytes) -> None:
        slot, number = np.frombuffer(body, np.int32).tolist()
        self._backend.set_adapter(slot, None if number == NOTHING else self._held[number])

    def forget(self, body: bytes) -> None:
        """A slot that still has one of them keeps it until it gets another."""
        for number in np.frombuffer(body, np.int32).tolist():
            self._held.pop(number, None)
