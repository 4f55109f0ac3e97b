"""What an engine reports of its slower memories, as tokens that need not be computed."""

from __future__ import annotations

import pytest

from octavo_engine.protocol.kv_events import TIER_MEDIA
from octavo_router.residency.index import PyResidencyIndex
from octavo_router.residency.tier_slots import SAVED_PERCENT, SharedSlots, TierSlots
from tests.fakes.engine_stream import pack_evicted, pack_stored

CHAIN = list(range(1001, 1011))  # ten keys of 16 tokens each
KEYS = pack_evicted(*CHAIN)


def entries(*numbers: int) -> bytes:
    return pack_stored(*((CHAIN[i], 16 * (i + 1)) for i in numbers))


class Engine:
    def __init__(
        self,
        *media: str,
        store: str = "",
        shared: SharedSlots | None = None,
        index: PyResidencyIndex | None = None,
    ) -> None:
        self.index = index or PyResidencyIndex()
        self.slot = self.index.add_slot()
        self.tiers = TierSlots(self.index, media, store=store, shared=shared)

    def report(self, stored: bytes = b"", evicted: bytes = b"", **tiers: bytes) -> None:
        self.index.apply(self.slot, stored, evicted)
        self.tiers.apply(stored, evicted, tiers)

    def saved(self) -> int:
        (matched,) = self.index.match(KEYS, [self.slot])
        return self.tiers.saved_tokens(matched, self.index.match(KEYS, self.tiers.slots))


def test_every_medium_of_our_engines_has_a_price_and_quicker_ones_save_more():
    assert tuple(SAVED_PERCENT) == TIER_MEDIA
    assert sorted(SAVED_PERCENT.values(), reverse=True) == list(SAVED_PERCENT.values())
    assert all(0 < percent < 100 for percent in SAVED_PERCENT.values())


def test_a_prompt_in_three_memories_saves_each_part_at_its_price():
    engine = Engine("CPU", "DISK")
    engine.report(entries(*range(10)))
    assert engine.saved() == 160
    engine.report(evicted=pack_evicted(*CHAIN[4:]), CPU=entries(4, 5, 6), DISK=entries(7, 8, 9))
    assert engine.saved() == 64 + 48 * 90 // 100 + 48 * 80 // 100
    engine.report(evicted=pack_evicted(*CHAIN[4:7]), DISK=entries(4, 5, 6))
    assert engine.saved() == 64 + 96 * 80 // 100
    engine.report(entries(4, 5, 6))  # they were loaded
    assert engine.saved() == 112 + 48 * 80 // 100
    engine.report(evicted=pack_evicted(*CHAIN[7:]))
    assert engine.saved() == 112


def test_a_medium_of_a_newer_engine_is_left_out():
    engine = Engine("DISK", "TAPE")
    assert engine.tiers.media == ["DISK"]
    engine.report(TAPE=entries(*range(10)))
    assert engine.saved() == 0


@pytest.mark.parametrize("media", [("CPU", "DISK"), ("DISK",), ()])
def test_slots_are_given_back(media):
    engine = Engine(*media)
    engine.report(entries(*range(10)))
    engine.tiers.clear()
    assert all(engine.index.num_keys(slot) == 0 for slot in engine.tiers.slots)
    engine.tiers.close()
    assert engine.index.add_slot() == 1


SHARED = "SHARED_STORAGE"
PRICE = SAVED_PERCENT[SHARED]


class Stores:
    """Engines, some of which share a store."""

    def __init__(self) -> None:
        self.index = PyResidencyIndex()
        self.shared = SharedSlots(self.index)

    def engine(self, *media: str, store: str) -> Engine:
        return Engine(*media, store=store, shared=self.shared, index=self.index)


def test_what_one_engine_computed_counts_for_all_that_share_its_store():
    stores = Stores()
    one, other = (stores.engine(SHARED, store="a") for _ in range(2))
    stranger = stores.engine(SHARED, store="b")
    one.report(entries(*range(10)))
    assert (one.saved(), other.saved(), stranger.saved()) == (160, 160 * PRICE // 100, 0)
    other.report(entries(*range(4)))  # it was sent there, and has computed a part
    assert other.saved() == 64 + 96 * PRICE // 100
    one.report(evicted=pack_evicted(*CHAIN), **{SHARED: entries(*range(10))})
    assert one.saved() == 160 * PRICE // 100
    one.report(evicted=pack_evicted(*CHAIN[4:]))  # the store has lost it
    assert (one.saved(), other.saved()) == (64 * PRICE // 100, 64)


def test_a_store_outlives_engines_and_is_forgotten_with_the_last():
    stores = Stores()
    one, other = (stores.engine("CPU", SHARED, store="a") for _ in range(2))
    one.report(entries(*range(10)))
    one.index.clear(one.slot)
    one.tiers.clear()
    one.tiers.close()
    assert other.saved() == 160 * PRICE // 100
    other.tiers.close()
    assert stores.engine("CPU", SHARED, store="a").saved() == 0
