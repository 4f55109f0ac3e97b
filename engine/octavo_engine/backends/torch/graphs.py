"""Steps as captured graphs: which sizes there are, and when one is captured.

A graph replays the same launches over the same memory, so a step is laid out in the smallest bucket
that holds it and the rest is padding. A bucket's first step runs launch by launch, which also
compiles and loads whatever it needs; its second one is captured. So nothing is paid for sizes that
never occur, and the server opens at once.

Decode steps have a bucket for a number of sequences. Small steps that hold parts of prompts have
one for tokens and one for sequences, coarser both: up to a few hundred rows a product costs what
its weights take to be read, however many rows are padding.
"""

from __future__ import annotations

import bisect
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from octavo_engine.backends.torch.device_step import StepSizes

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from octavo_engine.backends.backend import BackendLimits, BackendStep

MIXED_TOKENS = (16, 32, 64, 128, 192, 256, 384, 512)

Result = TypeVar("Result")


class Replay(Protocol):
    def __call__(self) -> None:
        """Launch the captured work again."""


class GraphRecorder(Protocol[Result]):
    """The device's side of it; a fake one in tests."""

    def capture(self, work: Callable[[], Result]) -> tuple[Result, Replay] | None:
        """Record what `work` launches, without running it; None where the device cannot."""

    def has_room(self) -> bool:
        """Whether there is memory for one more."""


def bucket_sizes(max_num_seqs: int) -> list[int]:
    """1, 2, 4, then steps of 8, from 256 on of 16: at most an eighth is padding where it counts."""
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, max_num_seqs + 1, 16)]
    sizes = [size for size in sizes if size < max_num_seqs]
    return [*sizes, max_num_seqs]


def choose_bucket(sizes: list[int], num_seqs: int) -> int | None:
    """The smallest bucket that holds so many; None if none does."""
    index = bisect.bisect_left(sizes, num_seqs)
    return sizes[index] if index < len(sizes) else None


def mixed_sizes(
    step: BackendStep, limits: BackendLimits, *, tokens_per_tile: int
) -> StepSizes | None:
    """The bucket of a small step that is not only decoding; None if it has none. One of its
    sequences is padding, which owns the tokens that are."""
    num_tokens, num_seqs = len(step.token_ids), len(step.seq_lens)
    tokens = next((size for size in MIXED_TOKENS if size >= num_tokens), None)
    seqs = min(1 << num_seqs.bit_length(), limits.max_seqs)
    is_within = tokens is not None and tokens <= limits.max_tokens and num_seqs < seqs
    if tokens is None or not is_within or len(step.logit_rows) > seqs:
        return None
    # Each sequence's last tile may be partly filled.
    return StepSizes(tokens, seqs, seqs, tokens // tokens_per_tile + seqs)


class GraphCache(Generic[Result]):
    """Graphs by bucket, made on second use; the one unused for longest makes room for a new one."""

    def __init__(self, recorder: GraphRecorder[Result], *, max_graphs: int) -> None:
        self._recorder = recorder
        self._max_graphs = max_graphs
        self._warm: set[Hashable] = set()
        self._eager: set[Hashable] = set()  # could not be captured, and is not tried again
        self._graphs: dict[Hashable, tuple[Result, Replay]] = {}  # in the order of their last use

    def run(self, bucket: Hashable, work: Callable[[], Result]) -> Result:
        """Do the bucket's work, by its graph if there is one or may be one now."""
        if bucket not in self._warm:
            self._warm.add(bucket)
            return work()
        if bucket in self._eager:
            return work()
        entry = self._graphs.pop(bucket, None)
        if entry is None:
            if len(self._graphs) >= self._max_graphs:
                del self._graphs[next(iter(self._graphs))]
            if not self._recorder.has_room():
                return work()
            entry = self._recorder.capture(work)
            if entry is None:
                self._eager.add(bucket)
                return work()
        self._graphs[bucket] = entry
        result, replay = entry
        replay()
        return result

    @property
    def captured(self) -> set[Hashable]:
        return set(self._graphs)

    def clear(self) -> None:
        self._graphs.clear()
        self._warm.clear()
        self._eager.clear()
