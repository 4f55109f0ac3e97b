"""KV blocks on their way to a sequence: what is read, where from and for how long."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

from octavo_engine.protocol.prefix_hash import TOKEN_BYTES
from octavo_engine.tiers.page import block_name, tail_name

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable

    from octavo_engine.backends.backend import PageCopy
    from octavo_engine.kv.restore import BlockTurn
    from octavo_engine.state.sequence import Sequence
    from octavo_engine.tiers.page import BlockName, Page, PageSizes
    from octavo_engine.tiers.price import TierMeter
    from octavo_engine.tiers.run_store import RunStore

TRIED_BYTES = 8 << 20  # that are read of a store which seems too slow
TRIAL_TURN = 50  # refusals between two such trials


@dataclass(slots=True)
class TierRead:
    """Blocks that a thread reads from one tier."""

    tier: str  # disk, shared or peer
    meter: TierMeter
    names: list[BlockName]
    started_at: float  # by the reading thread, where others are read first
    pages: dict[BlockName, Page] = field(default_factory=dict)  # grows, by the reading thread
    ended_at: float | None = None  # set last, by the reading thread
    is_followed: bool = False  # another engine is computing them
    num_seen: int = 0  # of a followed read's pages, when its patience began
    is_wanted: bool = True  # false: the thread need not go on


@dataclass(slots=True)
class TierFetch:
    """Blocks on their way to a sequence."""

    sequence: Sequence
    turns: list[BlockTurn]
    pages: dict[BlockName, Page]  # those that are there
    give_up_at: float
    patience_s: float
    reads: list[TierRead] = field(default_factory=list)
    rest: list[tuple[BlockTurn, Page]] | None = None  # to be placed, once all is read
    states: tuple[BlockTurn, Page] | None = None  # likewise, behind those
    copy: PageCopy | None = None  # of the first of them


def turn_name(turn: BlockTurn) -> BlockName:
    if turn.tail:
        return tail_name(turn.digest, turn.group, turn.tail)
    return block_name(turn.digest, turn.group)


def came_of(turns: Iterable[BlockTurn], pages: Container[BlockName]) -> list[BlockTurn]:
    """Those whose pages are there; of tails as many tokens as are."""
    came: list[BlockTurn] = []
    for turn in turns:
        lengths = range(len(turn.tail), 0, -TOKEN_BYTES) or (0,)
        parts = (turn._replace(tail=turn.tail[:length]) for length in lengths)
        came += islice((part for part in parts if turn_name(part) in pages), 1)
    return came


class StoredTier:
    """Files of blocks as a tier: on disk, or in a store that engines share."""

    def __init__(
        self, name: str, medium: str, store: RunStore, meter: TierMeter, *, store_id: str = ""
    ) -> None:
        """`meter` begins with what is assumed before anything was read. `store_id`: the same for
        all engines that share it."""
        self.store_id = store_id
        self.name, self.medium, self.store, self.meter = name, medium, store, meter
        self._trial: TierRead | None = None
        self._to_try: list[BlockName] = []  # after the first one
        self._tried: tuple[int, float] | None = None  # bytes and seconds of the first one
        self._num_refused = 0

    def read(self, read: TierRead, now: Callable[[], float], woken: Callable[[], None]) -> None:
        """Begin with it."""

        def done(pages: list[Page | None]) -> None:
            there = zip(read.names, pages, strict=True)
            read.pages.update((name, page) for name, page in there if page is not None)
            read.ended_at = now()
            woken()

        self.store.fetch(read.names, done, is_wanted=lambda: read.is_wanted)

    def refused(
        self,
        names: list[BlockName],
        sizes: PageSizes,
        now: Callable[[], float],
        woken: Callable[[], None],
    ) -> None:
        """What is known spoke against reading them. Now and then read some all the same, beside the
        steps and for no sequence: one block, which says what a read costs at least, then more."""
        self.meter.refused()
        self._num_refused += 1
        if self._trial is None and self._num_refused % TRIAL_TURN == 1:
            self._to_try = names[: sizes.blocks_in(TRIED_BYTES)]
            self._try(names[:1], now, woken)

    def end_trial(self, now: Callable[[], float], woken: Callable[[], None]) -> None:
        """Take in how long it took, once it is over."""
        trial = self._trial
        if trial is None or trial.ended_at is None:
            return
        self._trial = None
        if not trial.pages:
            return
        num_bytes = sum(page.nbytes for page in trial.pages.values())
        taken = num_bytes, trial.ended_at - trial.started_at
        names, self._to_try = self._to_try, []
        if len(names) > 1:
            self._tried = taken
            self._try(names, now, woken)
        elif self._tried is None:
            self.meter.observe(*taken)
        else:
            self.meter.replace(*self._tried)
            self.meter.observe(*taken)
            self._tried = None

    def _try(
        self, names: list[BlockName], now: Callable[[], float], woken: Callable[[], None]
    ) -> None:
        self._trial = TierRead(self.name, self.meter, names, now())
        self.read(self._trial, now, woken)
