"""A backend that launches: its device does nothing until it must, and everything in order.

It is the fake backend behind a queue. A launched step is copied, as a device's would be, and is
computed when somebody waits for it or for one behind it; only then are the tokens known that a
later step takes from its row. `log` tells what the host did, in the order in which it did it.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.fakes.backend import FakeBackend

if TYPE_CHECKING:
    from collections.abc import Callable

    from octavo_engine.backends.backend import BackendLimits, BackendStep
    from octavo_engine.sampling.batch import Sampled, SamplingBatch


class LaunchingBackend(FakeBackend):
    """`on_launch` and `on_wait` get a step's number and may raise."""

    launch_waits = False

    def __init__(self, num_blocks: int, vocab_size: int = 512, **options: Any) -> None:
        super().__init__(num_blocks, vocab_size, **options)
        self.log: list[str] = []
        self.num_launches = 0
        self.num_awaited = 0  # tokens that a step took from the device
        self.on_launch: Callable[[int], None] | None = None
        self.on_wait: Callable[[int], None] | None = None
        self._queue: deque[Launched] = deque()
        self._last = np.zeros(0, np.int32)  # of each row, the token sampled last

    def prepare(self, limits: BackendLimits, num_blocks: int) -> None:
        super().prepare(limits, num_blocks)
        self._last = np.full(limits.max_seqs, -1, np.int32)

    def launch(self, step: BackendStep, sampling: SamplingBatch) -> Launched:
        number = self.num_launches
        self.num_launches += 1
        self.log.append(f"launch {number}")
        if self.on_launch is not None:
            self.on_launch(number)
        launched = Launched(self, number, copy.deepcopy(step), _copied(sampling))
        self._queue.append(launched)
        return launched

    def compute_until(self, wanted: Launched) -> None:
        """What a device has done when `wanted` is done."""
        while wanted.sampled is None:
            launched = self._queue.popleft()
            step, sampling = launched.step, launched.sampling
            if step.awaited is not None:
                waits = step.awaited >= 0
                self.num_awaited += int(waits.sum())
                known = self._last[np.where(waits, step.awaited, 0)]
                tokens = np.where(waits, known, step.token_ids)
                step = dataclasses.replace(step, token_ids=tokens, awaited=None)
            if sampling.awaited is not None:  # what the sampler looks back at is known by now too
                rows, ends = (a[sampling.awaited] for a in (sampling.rows, sampling.positions))
                sampling.history[rows, ends - 1] = self._last[rows]
            launched.sampled = sampled = self.execute(step, sampling)
            drawn = sampling.targets < 0
            self._last[sampling.rows[drawn]] = np.maximum(sampled.tokens[drawn], 0)


class Launched:
    """One step of it."""

    def __init__(
        self, backend: LaunchingBackend, number: int, step: BackendStep, sampling: SamplingBatch
    ) -> None:
        self._backend = backend
        self._number = number
        self.step = step
        self.sampling = sampling
        self.sampled: Sampled | None = None

    def wait(self) -> Sampled:
        self._backend.log.append(f"wait {self._number}")
        if self._backend.on_wait is not None:
            self._backend.on_wait(self._number)
        self._backend.compute_until(self)
        assert self.sampled is not None
        return self.sampled


def _copied(sampling: SamplingBatch) -> SamplingBatch:
    """All but masks, which are somebody's work under way."""
    masks, sampling = sampling.masks, dataclasses.replace(sampling, masks=None)
    return dataclasses.replace(copy.deepcopy(sampling), masks=masks)


class PipelinedBackend(LaunchingBackend):
    """The same with stages: every step has all its tokens, and no sequence is in two but with
    chunks of its prompt."""

    def __init__(self, num_blocks: int, num_stages: int, **options: Any) -> None:
        super().__init__(num_blocks, **options)
        self.num_stages = num_stages
        self.most_under_way = 0
        self._rows: deque[set[int]] = deque()  # that sample, of the steps under way

    def launch(self, step: BackendStep, sampling: SamplingBatch) -> Launched:
        assert step.awaited is None and sampling.awaited is None
        rows = set(sampling.rows[sampling.targets < 0].tolist())
        self._rows.append(rows)
        self.most_under_way = max(self.most_under_way, len(self._rows))
        return super().launch(step, sampling)

    def compute_until(self, wanted: Launched) -> None:
        super().compute_until(wanted)
        self._rows.popleft()
