"""Steps of engine cores that compute experts for each other: all take each step at the same time.

Each core has requests of its own and decides for itself when it has a step. The others then take
part with their experts: with a step of their own, if they have one, or with an empty one, which a
thread runs here while the core has nothing to do.
"""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from octavo_engine.errors import WorkerLost

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from octavo_engine import _native

# A core that has just had a step is likely to come with the next one: an empty step in its place
# would have it wait for another whole one.
_NEXT_STEP_S = 0.01
_LOOK_S = 0.25  # so often a wait looks whether it is still of use


class Lockstep:
    """One core among `ranks.size`. `run_empty` computes its experts' part of a step."""

    def __init__(self, ranks: _native.Ranks, run_empty: Callable[[], None]) -> None:
        self._ranks = ranks
        self._run_empty = run_empty
        self._turn = threading.Lock()
        self._num_done = 0
        self._is_wanted = False  # the core waits for its turn
        self._ended_at = float("-inf")  # the last step with tokens of this core
        self._is_closed = False
        self._when_lost: Callable[[WorkerLost], None] | None = None
        self._lost: WorkerLost | None = None
        self._thread = threading.Thread(target=self._follow, name="octavo-experts", daemon=True)

    def start(self) -> None:
        """Once all that steps need is there; waits for the other cores, however long they load."""
        self._ranks.join()
        while self._ranks.num_joined < self._ranks.size:
            time.sleep(0.02)
        self._thread.start()

    def watch(self, when_lost: Callable[[WorkerLost], None]) -> None:
        """Have it called, on any thread, when another core is lost; at once if one is."""
        self._when_lost = when_lost
        if self._lost is not None:
            when_lost(self._lost)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around a step with tokens. Raises WorkerLost."""
        self._is_wanted = True
        with self._turn:
            self._is_wanted = False
            self._num_done += 1
            self._ranks.begin_step(self._num_done)
            try:
                yield
            except RuntimeError as error:
                self._check(error)
                raise
            finally:
                self._ended_at = time.monotonic()

    def close(self) -> None:
        """Nobody waits for this core any more. A second call does nothing."""
        self._is_closed = True
        self._ranks.fail(self._ranks.rank)
        if self._thread.is_alive():
            self._thread.join()

    def _follow(self) -> None:
        while not self._is_closed:
            if not self._ranks.await_step(self._num_done + 1, _LOOK_S):
                continue
            if self._is_wanted or time.monotonic() - self._ended_at < _NEXT_STEP_S:
                time.sleep(0.0005)
                continue
            with self._turn:
                if not self._ranks.await_step(self._num_done + 1, 0.0):
                    continue  # the core came first
                self._num_done += 1
                try:
                    self._run_empty()
                except RuntimeError as error:
                    if not self._is_closed:
                        self._lose(error)
                    return

    def _lose(self, error: RuntimeError) -> None:
        try:
            self._check(error)
        except WorkerLost as lost:
            self._lost = lost
            if self._when_lost is not None:
                self._when_lost(lost)

    def _check(self, error: RuntimeError) -> None:
        """Raises WorkerLost where another core is to blame."""
        ranks = self._ranks
        if ranks.failed >= 0:
            raise WorkerLost(
                f"data-parallel rank {ranks.failed} of {ranks.size} has ended or hangs: the others "
                "wait for its experts"
            ) from error
