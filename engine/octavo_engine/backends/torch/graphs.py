"""Steps as captured graphs: which sizes there are, and when one is captured.

A graph replays the same launches over the same memory, so a step is laid out in the smallest bucket
that holds it and the rest is padding. A bucket's first step runs launch by launch, which also
compiles and loads whatever it needs; its second one is captured. So nothing is paid for sizes that
never occur, and the server opens at once.

Decode steps have a bucket for a number of sequences. Small steps that hold parts of prompts have
one for tokens and one for sequences, coarser both: up to a few hundred rows a product costs what
its weights take to be read, however many rows are padding. There are never more buckets than there
may be graphs, so what is captured stays captured.
"""

from __future__ import annotations

import bisect
from typing import TYPE_CHECKING, Generic, NamedTuple, Protocol, TypeVar

from octavo_engine.backends.torch.device_step import StepSizes

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from octavo_engine.backends.backend import BackendLimits, BackendStep

MIXED_TOKENS = (16, 32, 64, 128, 192, 256, 384, 512)
MIXED_SEQS = (4, 16, 64, 256)
# Coarser and coarser ladders: decode sizes in each doubling, and one of so many sizes of tokens.
LADDERS = ((4, 1), (4, 2), (2, 2), (1, 4), (1, 8))

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


class Buckets(NamedTuple):
    """The sizes that steps are padded to."""

    decode: list[int]  # sequences, ascending
    mixed: dict[int, list[int]]  # sequences by tokens, ascending both

    @property
    def total(self) -> int:
        return len(self.decode) + sum(map(len, self.mixed.values()))


def plan_buckets(limits: BackendLimits, max_graphs: int, *, has_mixed: bool = True) -> Buckets:
    """The finest buckets that `max_graphs` suffice for."""
    for per_doubling, every in LADDERS:
        mixed = mixed_buckets(limits, MIXED_TOKENS[every - 1 :: every]) if has_mixed else {}
        buckets = Buckets(decode_buckets(limits.max_seqs, per_doubling), mixed)
        if buckets.total <= max_graphs:
            return buckets
    # Larger steps than these are launched.
    return Buckets(buckets.decode[:max_graphs], {})


def decode_buckets(max_num_seqs: int, per_doubling: int = 4) -> list[int]:
    """1, 2, 4, steps of 8 up to 64, and so many in each doubling behind: of the default four, a
    fifth of a step at most is padding where it counts."""
    sizes = [1, 2, 4, *range(8, 64, 8 * 4 // per_doubling)]
    first = 64
    while first < max_num_seqs:
        sizes += range(first, 2 * first, first // per_doubling)
        first *= 2
    return [*(size for size in sizes if size < max_num_seqs), max_num_seqs]


def mixed_buckets(limits: BackendLimits, tokens: Sequence[int]) -> dict[int, list[int]]:
    """Steps of more tokens than the limits allow have none; a sequence has a token at least, and
    one of them is padding."""
    if limits.max_seqs < 2:
        return {}
    return {
        size: sorted({min(seqs, size, limits.max_seqs) for seqs in (*MIXED_SEQS, limits.max_seqs)})
        for size in tokens
        if size <= limits.max_tokens
    }


def choose_bucket(sizes: Sequence[int], count: int) -> int | None:
    """The smallest bucket that holds so many; None if none does."""
    index = bisect.bisect_left(sizes, count)
    return sizes[index] if index < len(sizes) else None


def mixed_sizes(step: BackendStep, buckets: Buckets, *, tokens_per_tile: int) -> StepSizes | None:
    """The bucket of a small step that is not only decoding; None if it has none. One of its
    sequences is padding, which owns the tokens that are."""
    num_seqs = len(step.seq_lens)
    tokens = choose_bucket(list(buckets.mixed), len(step.token_ids))
    if tokens is None:
        return None
    seqs = choose_bucket(buckets.mixed[tokens], num_seqs + 1)
    if seqs is None or len(step.logit_rows) > seqs:
        return None
    # Each sequence's last tile may be partly filled.
    return StepSizes(tokens, seqs, seqs, tokens // tokens_per_tile + seqs)


class GraphCache(Generic[Result]):
    """Graphs by bucket, made on second use and kept. Where there are `max_graphs` already, further
    buckets are launched: a capture costs many times what it saves a single step."""

    def __init__(self, recorder: GraphRecorder[Result], *, max_graphs: int) -> None:
        self._recorder = recorder
        self._max_graphs = max_graphs
        self._warm: set[Hashable] = set()
        self._eager: set[Hashable] = set()  # could not be captured, and is not tried again
        self._graphs: dict[Hashable, tuple[Result, Replay]] = {}
        self._is_usual = True

    def run(self, bucket: Hashable, work: Callable[[], Result]) -> Result:
        """Do the bucket's work, by its graph if there is one or may be one now."""
        if bucket not in self._warm:
            self._warm.add(bucket)
            self._is_usual = False
            return work()
        if bucket in self._eager:
            return work()
        entry = self._graphs.get(bucket)
        if entry is None:
            if len(self._graphs) >= self._max_graphs or not self._recorder.has_room():
                return work()
            self._is_usual = False
            entry = self._recorder.capture(work)
            if entry is None:
                self._eager.add(bucket)
                return work()
            self._graphs[bucket] = entry
        result, replay = entry
        replay()
        return result

    def take_usual(self) -> bool:
        """Whether all runs since the last look took what such runs take from then on: none was its
        bucket's first, or captured it."""
        is_usual, self._is_usual = self._is_usual, True
        return is_usual

    @property
    def captured(self) -> set[Hashable]:
        return set(self._graphs)

    def clear(self) -> None:
        self._graphs.clear()
        self._warm.clear()
        self._eager.clear()
