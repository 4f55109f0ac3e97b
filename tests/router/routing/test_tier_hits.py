"""A prefix in host memory or on disk counts for less than one in the device's memory."""

from __future__ import annotations

from random import Random

import pytest

from octavo_engine.protocol.route_keys import keys_of, pack_keys, unpack_keys
from octavo_router.metrics import LabelledCounter
from octavo_router.residency.index import PyResidencyIndex
from octavo_router.residency.tier_slots import SAVED_PERCENT
from octavo_router.routing.tier_hits import saved_tokens
from octavo_router.signals.kv_events import BlockId, Cleared, Removed, Stored
from octavo_router.signals.kv_residency import KvResidency
from octavo_router.signals.kv_tier_keys import MEDIA, KvTierKeys
from tests.fakes.endpoints import World, make_keys, make_request

TOKENS = tuple(range(1000, 1160))
KEYS = pack_keys(keys_of({"prompt": list(TOKENS)}, "completion", ""))
CHAIN = unpack_keys(KEYS)


@pytest.mark.parametrize(
    ("matched", "media", "saved"),
    [
        (0, [], 0),
        (160, [], 160),
        (0, ["CPU"] * 10, 144),
        (0, ["DISK"] * 10, 128),
        (80, [None] * 5 + ["CPU"] * 3 + ["DISK"] * 2, 148),
        (80, ["CPU"] * 10, 152),  # copies of what is in the device's memory add nothing
        (48, [None] * 4 + ["CPU"] * 6, 48),  # a gap ends it
        (0, [None, "CPU"], 0),
    ],
)
def test_tokens_saved_by_medium(matched, media, saved):
    held = {key: medium for key, medium in zip(CHAIN, media, strict=False) if medium}
    assert saved_tokens(matched, KEYS, held) == saved


def test_every_medium_has_a_price_and_quicker_ones_save_more():
    assert list(SAVED_PERCENT) == list(MEDIA)
    assert 100 > SAVED_PERCENT["CPU"] > SAVED_PERCENT["DISK"] > 0


class Server:
    """A server's events, and what the router makes of them."""

    def __init__(self) -> None:
        self.index = PyResidencyIndex()
        self.slot = self.index.add_slot()
        self.residency = KvResidency(self.index, self.slot, LabelledCounter())

    def saved(self) -> int:
        (matched,) = self.index.match(KEYS, [self.slot])
        return saved_tokens(matched, KEYS, self.residency.tiers.held)


ALL = Stored(tuple(range(1, 11)), None, TOKENS, 16)


def in_tier(medium: str, *hashes: BlockId) -> Stored:
    return Stored(hashes, None, (), 16, medium=medium)


def test_blocks_that_leave_the_device_are_found_in_the_tiers():
    server = Server()
    server.residency.apply([ALL, in_tier("CPU", *range(1, 9)), in_tier("DISK", *range(1, 11))])
    assert server.saved() == 160
    server.residency.apply([Removed(tuple(range(6, 11)))])
    assert server.saved() == int(80 + 3 * 16 * 0.9 + 2 * 16 * 0.8)
    server.residency.apply([Removed(tuple(range(1, 9)), medium="CPU")])
    assert server.saved() == 80 + 5 * 16 * 0.8
    server.residency.apply([Removed((6,), medium="DISK")])
    assert server.saved() == 80
    server.residency.apply([ALL])
    assert server.saved() == 160


def test_names_that_no_event_gave_tokens_for_do_not_count():
    server = Server()
    server.residency.apply([in_tier("CPU", 1), Removed((1,), medium="DISK")])
    assert server.saved() == 0
    assert server.residency.tiers.held == {}


def test_a_tier_block_outlives_the_device_block_and_moves_on_to_disk():
    server = Server()
    server.residency.apply([ALL, in_tier("CPU", 1), Removed(ALL.hashes), in_tier("DISK", 1)])
    assert server.saved() == int(16 * 0.9)
    server.residency.apply([Removed((1,), medium="CPU")])
    assert server.saved() == int(16 * 0.8)


def test_a_cleared_server_holds_nothing_in_its_tiers():
    server = Server()
    server.residency.apply([ALL, in_tier("CPU", *ALL.hashes), Cleared()])
    assert server.saved() == 0
    assert server.residency.tiers.held == {}


def test_random_lives_leave_the_quickest_medium_of_each_key():
    random = Random(7)
    tiers, there = KvTierKeys(), set()
    keys = {block: [block % 4, 10 + block % 3] for block in range(12)}  # shared by several blocks
    for _ in range(3000):
        block, medium = random.randrange(12), random.choice(MEDIA)
        if random.random() < 0.5:
            assert tiers.store(block, keys[block], medium)
            there.add((block, medium))
        else:
            assert tiers.remove(block, medium) is ((block, medium) in there)
            there.discard((block, medium))
        expected = {
            key: medium
            for medium in reversed(MEDIA)
            for block, its in sorted(there)
            if its == medium
            for key in keys[block]
        }
        assert tiers.held == expected


def test_a_request_goes_where_reading_its_prefix_is_cheapest():
    world = World(0)
    cold, disk, host, device = world.add(4)
    keys = make_keys(("a", 40))
    disk.tier_keys = dict.fromkeys(unpack_keys(keys), "DISK")
    host.tier_keys = dict.fromkeys(unpack_keys(keys), "CPU")
    world.hold(device, keys)
    matched = []
    for endpoint in (device, host, disk, cold):
        lease = world.place(make_request(keys=keys, prompt_tokens=640))
        assert lease.endpoint is endpoint
        matched.append(lease.decision.matched_tokens)
        endpoint.base_tokens += 10_000  # it is busy from now on
    assert matched == [640, 576, 512, 0]
