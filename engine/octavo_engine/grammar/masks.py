"""Makes the masks of a step in threads of its own, while the forward pass runs."""

from __future__ import annotations

import threading
from queue import SimpleQueue
from typing import TYPE_CHECKING

import numpy as np

from octavo_engine.sampling.batch import MaskRows

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from octavo_engine.state.sequence_grammar import SequenceGrammar

PATIENCE_S = 0.02  # that a step waits for its masks once the logits are there


class MaskWorkers:
    """Two threads: one for masks that have been quick so far, one for the others.

    A slow mask delays its own sequence: the step goes on without it, and the sequence is not
    scheduled again before the mask is there.
    """

    def __init__(self, *, patience_s: float = PATIENCE_S) -> None:
        self.patience_s = patience_s
        self._quick: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._slow: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._closed = False

    def start(self, runs: Sequence[SequenceGrammar]) -> threading.Event:
        """Start on the masks that are not started; the event is set when the quick ones are
        made."""
        self._open()
        done = threading.Event()
        fresh = [run for run in runs if not run.is_started]
        quick = [run for run in fresh if not run.is_slow]
        for run in fresh:
            run.is_started = True
            if run.is_slow:
                self._slow.put(run.prepare)

        def make() -> None:
            for run in quick:
                run.prepare()
            done.set()

        if quick:
            self._quick.put(make)
        else:
            done.set()
        return done

    def close(self) -> None:
        """End the threads. A second call does nothing."""
        if not self._closed:
            self._closed = True
            for queue in (self._quick, self._slow):
                queue.put(None)
            for thread in self._threads:
                thread.join(1.0)

    def _open(self) -> None:
        """Threads come with the first grammar."""
        if self._threads:
            return
        for name, queue in (("octavo-masks", self._quick), ("octavo-slow-masks", self._slow)):
            thread = threading.Thread(target=_work, args=(queue,), name=name, daemon=True)
            thread.start()
            self._threads.append(thread)


def _work(queue: SimpleQueue[Callable[[], None] | None]) -> None:
    while (work := queue.get()) is not None:
        work()


class StepMasks:
    """The masks of one step: `rows[i]` of its logits belong to `runs[i]`, one behind each draft."""

    def __init__(
        self, runs: Sequence[SequenceGrammar], rows: Sequence[range], num_rows: int
    ) -> None:
        workers = runs[0].workers
        self.late: list[int] = []  # indices into `runs` whose masks did not come in time
        self._runs = runs
        self._rows = rows
        self._num_rows = num_rows
        self._patience_s = workers.patience_s
        self._taken: MaskRows | None = None
        self._done = workers.start(runs)

    def take(self) -> MaskRows:
        if self._taken is None:
            self._taken = self._take()
        return self._taken

    def _take(self) -> MaskRows:
        self._done.wait(self._patience_s)
        places = np.full(self._num_rows, -1, np.int32)
        masks: list[NDArray[np.uint32]] = []
        for index, (run, rows) in enumerate(zip(self._runs, self._rows, strict=True)):
            if not run.is_ready or run.mask is None:
                self.late.append(index)
                continue
            for row, mask in zip(rows, (run.mask, *run.masks_ahead), strict=False):
                places[row] = len(masks)
                masks.append(mask)
        width = len(masks[0]) if masks else 0
        bits = np.stack(masks) if masks else np.zeros((0, width), np.uint32)
        return MaskRows(places, bits)
