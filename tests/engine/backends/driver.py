"""Drives a backend as the runner would, with blocks in no order and free memory poisoned."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np

from octavo_engine.backends.backend import BackendLimits, BackendStep, HoldsStates, StateStep
from octavo_engine.config import BLOCK_SIZE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from octavo_engine.caches import CacheLayout

LIMITS = BackendLimits(max_tokens=512, max_seqs=8, max_logit_rows=512, max_model_len=512)
NUM_BLOCKS = 128
NUM_STATE_SLOTS = 160


class LogitsBackend(Protocol):
    """Both real backends: a Backend that also shows its logits."""

    @property
    def cache_layout(self) -> CacheLayout: ...
    def prepare(self, limits: BackendLimits, num_blocks: int) -> None: ...
    def logits(self, step: BackendStep) -> NDArray[np.float32]: ...
    def poison_blocks(self, block_ids: list[int]) -> None: ...


@dataclass
class Request:
    """A sequence of tokens, some of them computed."""

    row: int
    token_ids: list[int]
    num_computed: int = 0
    blocks: list[int] = field(default_factory=list)
    logits: list[NDArray[np.float32]] = field(default_factory=list)  # of each computed token
    snapshots: dict[int, int] = field(default_factory=dict)  # slots of its states, by length
    loads: int | None = None  # the slot whose state it begins with


class Driver:
    """Requests over one prepared backend. A request's block stands for one in each group of layers.

    Of a model with recurrent states a snapshot is saved at the end of each block.

    With `frees`, what leaves a group's window is given back: poisoned, and out of the table.
    """

    def __init__(
        self, backend: LogitsBackend, *, limits: BackendLimits = LIMITS, frees: bool = False
    ) -> None:
        self.backend = backend
        self.limits = limits
        self._windows = backend.cache_layout.windows if frees else (None,)
        self._num_groups = len(backend.cache_layout.groups)
        self._has_states = bool(backend.cache_layout.states)
        if self._has_states:
            limits = replace(limits, num_state_slots=limits.max_seqs + NUM_STATE_SLOTS)
        backend.prepare(limits, NUM_BLOCKS * self._num_groups)
        self._free_slots = list(range(limits.max_seqs, limits.num_state_slots))
        if self._has_states:
            assert isinstance(backend, HoldsStates)
            backend.poison_states(list(range(limits.num_state_slots)))
        self.poison(list(range(NUM_BLOCKS)))
        self._free = list(range(NUM_BLOCKS))
        random.Random(7).shuffle(self._free)
        width = limits.max_model_len // BLOCK_SIZE
        self._tables = np.full((self._num_groups, limits.max_seqs, width), -1, np.int32)

    def poison(self, blocks: Sequence[int]) -> None:
        self.backend.poison_blocks(
            [self._place(b, group) for b in blocks for group in range(self._num_groups)]
        )

    def _place(self, block: int, group: int) -> int:
        return block * self._num_groups + group

    def _give_back(self, request: Request) -> None:
        for group, window in enumerate(self._windows):
            if window is None:
                continue
            first = max(0, request.num_computed - window + 1) // BLOCK_SIZE
            gone = [self._place(block, group) for block in request.blocks[:first]]
            self.backend.poison_blocks(gone)
            self._tables[group, request.row, :first] = -1

    def add(self, row: int, token_ids: list[int], *, prefix: Request | None = None) -> Request:
        """A request; with `prefix`, its first whole blocks that are the same are shared."""
        request = Request(row, list(token_ids))
        if prefix is not None:
            while (end := request.num_computed + BLOCK_SIZE) < len(token_ids) and (
                token_ids[:end] == prefix.token_ids[:end] and end <= prefix.num_computed
            ):
                request.blocks.append(prefix.blocks[request.num_computed // BLOCK_SIZE])
                request.num_computed = end
            if self._has_states and request.num_computed:
                request.loads = prefix.snapshots[request.num_computed]
        return request

    def step(
        self,
        work: Sequence[tuple[Request, int]],
        copies: Sequence[tuple[int, int, int]] = (),
    ) -> list[NDArray[np.float32]]:
        """Compute some tokens of some requests: the logits of each token, request by request."""
        step = self.plan(work, copies)
        logits = np.array(self.backend.logits(step))
        parts = np.split(logits, step.seq_starts[1:-1])
        for (request, _), part in zip(work, parts, strict=True):
            request.logits.extend(part)
            self._give_back(request)
        return parts

    def _states(self, work: Sequence[tuple[Request, int]]) -> StateStep:
        """Before the requests are counted on."""
        saves, copies = [], []
        for request, count in work:
            if request.loads is not None:
                copies.append((request.loads, request.row))
                request.loads = None
            for end in range(request.num_computed + 1, request.num_computed + count + 1):
                slot = -1
                if end % BLOCK_SIZE == 0:
                    slot = request.snapshots[end] = self._free_slots.pop()
                saves.append(slot)
        return StateStep(
            slots=np.array([request.row for request, _ in work], np.int32),
            saves=np.array(saves, np.int32),
            copies=np.array(copies, np.int32).reshape(-1, 2),
        )

    def plan(
        self,
        work: Sequence[tuple[Request, int]],
        copies: Sequence[tuple[int, int, int]] = (),
    ) -> BackendStep:
        states = self._states(work) if self._has_states else None
        positions = [np.arange(r.num_computed, r.num_computed + n, dtype=np.int32) for r, n in work]
        slots = []
        for (request, count), at in zip(work, positions, strict=True):
            request.num_computed += count
            while len(request.blocks) * BLOCK_SIZE < request.num_computed:
                request.blocks.append(self._free.pop())
            for group, table in enumerate(self._tables[:, request.row]):
                # What was given back stays out.
                first = np.argmax(table >= 0) if request.num_computed > count else 0
                table[first : len(request.blocks)] = [
                    self._place(b, group) for b in request.blocks[first:]
                ]
            table = self._tables[:, request.row]
            slots.append(table[:, at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE)
        token_ids = [
            np.array(r.token_ids, np.int32)[at] for (r, _), at in zip(work, positions, strict=True)
        ]
        num_tokens = sum(count for _, count in work)
        return BackendStep(
            token_ids=np.concatenate(token_ids),
            positions=np.concatenate(positions),
            slots=np.ascontiguousarray(np.concatenate(slots, axis=1), np.int32),
            seq_starts=np.cumsum([0, *(count for _, count in work)]).astype(np.int32),
            seq_lens=np.array([request.num_computed for request, _ in work], np.int32),
            rows=np.array([request.row for request, _ in work], np.int32),
            block_tables=self._tables,
            logit_rows=np.arange(num_tokens, dtype=np.int32),
            copies=np.array(
                [
                    (self._place(source, group), self._place(target, group), count)
                    for source, target, count in copies
                    for group in range(self._num_groups)
                ],
                np.int32,
            ).reshape(-1, 3),
            states=states,
        )

    def take_block(self) -> int:
        return self._free.pop()


def run_alone(
    backend: LogitsBackend,
    token_ids: list[int],
    chunks: Sequence[int] = (),
    *,
    frees: bool = False,
) -> NDArray[np.float32]:
    """The logits of one request, computed in chunks of these sizes and then the rest."""
    driver = Driver(backend, frees=frees)
    request = driver.add(0, token_ids)
    for count in chunks:
        driver.step([(request, count)])
    rest = len(token_ids) - request.num_computed
    if rest:
        driver.step([(request, rest)])
    return np.array(request.logits)


def random_tokens(count: int, seed: int = 0, vocabulary: int = 256) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(vocabulary) for _ in range(count)]
