"""The residency index: what each engine holds, and what is forgotten."""

import os

import pytest

from octavo_engine.protocol.route_keys import chain, pack_keys
from octavo_engine.protocol.stream import STORED_BYTES
from octavo_router.residency import index as slow
from octavo_router.residency import native

BLOCK = 16


def keys_for(name, count):
    """A chain of keys as a prompt has it."""
    return pack_keys(chain(hash_of(name), bytes(64 * count)))


def hash_of(name):
    return int.from_bytes(name.encode().ljust(8, b"."), "little")


def stored(keys, first=0):
    """All keys of a chain as an engine tells them, 16 tokens each."""
    parts = [keys[at : at + 8] for at in range(0, len(keys), 8)]
    return b"".join(
        key + ((first + place + 1) * BLOCK).to_bytes(4, "little") for place, key in enumerate(parts)
    )


@pytest.fixture
def index(hot_path):
    return hot_path.ResidencyIndex()


# ── matching ──


def test_each_engine_answers_with_its_own_longest_prefix(index):
    prompt = keys_for("a", 20)
    slots = [index.add_slot() for _ in range(4)]
    for slot, depth in zip(slots, (0, 1, 7, 20), strict=True):
        index.apply(slot, stored(prompt)[: depth * STORED_BYTES], b"")
    assert index.match(prompt, slots) == [0, 16, 112, 320]
    assert index.match(prompt, slots[::-1]) == [320, 112, 16, 0]
    assert index.match(prompt[: 5 * 8], slots) == [0, 16, 80, 80]
    assert index.match(keys_for("b", 20), slots) == [0, 0, 0, 0]


@pytest.mark.parametrize("length", [1, 2, 3, 5, 20, 1000])
def test_every_depth_of_a_prefix_is_found_exactly(index, length):
    prompt = keys_for("a", length)
    depths = range(length + 1) if length < 50 else (0, 1, 2, 499, 500, 501, 998, 999, 1000)
    slots = [index.add_slot() for _ in depths]
    for slot, depth in zip(slots, depths, strict=True):
        index.apply(slot, stored(prompt)[: depth * STORED_BYTES], b"")
    assert index.match(prompt, slots) == [depth * BLOCK for depth in depths]


def test_no_keys_or_no_slots_match_nothing(index):
    slot = index.add_slot()
    assert index.match(b"", [slot]) == [0]
    assert index.match(keys_for("a", 3), []) == []
    assert index.match(keys_for("a", 3), (slot,)) == [0]


def test_the_first_key_may_be_missing(index):
    """It may stand for too few tokens to be stored."""
    prompt = keys_for("a", 9)
    slots = [index.add_slot() for _ in range(9)]
    for depth, slot in enumerate(slots, start=1):
        index.apply(slot, stored(prompt)[STORED_BYTES : depth * STORED_BYTES], b"")
    assert index.match(prompt, slots) == [0, *(depth * BLOCK for depth in range(2, 10))]


def test_a_lone_key_far_on_is_not_believed(index):
    """It may be another key whose fingerprint is the same."""
    prompt = keys_for("a", 20)
    everything = stored(prompt)
    slots = [index.add_slot() for _ in range(5, 20)]
    for place, slot in enumerate(slots, start=5):
        index.apply(slot, everything[: 4 * STORED_BYTES], b"")
        index.apply(slot, everything[place * STORED_BYTES :][:STORED_BYTES], b"")
    assert index.match(prompt, slots) == [4 * BLOCK] * len(slots)


def test_many_lone_keys_are_not_believed_either(index):
    prompt = keys_for("a", 64)
    everything = stored(prompt)
    slot = index.add_slot()
    for place in (0, 1, 2, *range(4, 64, 2)):
        index.apply(slot, everything[place * STORED_BYTES :][:STORED_BYTES], b"")
    assert index.match(prompt, [slot]) == [3 * BLOCK]


def test_a_gap_never_makes_an_answer_longer_than_the_deepest_key(index):
    prompt = keys_for("a", 30)
    slot = index.add_slot()
    index.apply(slot, stored(prompt), prompt[8 * 10 : 8 * 12])
    index.apply(slot, b"", prompt[8 * 10 : 8 * 12] + prompt[8 * 25 :])
    assert index.match(prompt, [slot]) == [25 * BLOCK]
    assert index.match(prompt[: 8 * 12], [slot]) == [10 * BLOCK]


def test_huge_token_counts_are_told_as_the_largest(index):
    slot = index.add_slot()
    index.apply(slot, pack_keys([5]) + b"\xff\xff\xff\xff", b"")
    assert index.match(pack_keys([5]), [slot]) == [slow.MAX_TOKENS]
    index.apply(slot, pack_keys([5]) + bytes(4), b"")
    assert index.match(pack_keys([5]), [slot]) == [0]
    assert index.num_keys(slot) == 1


def test_key_zero_is_a_key(index):
    slot = index.add_slot()
    assert index.match(bytes(8), [slot]) == [0]
    index.apply(slot, bytes(8) + b"\x10\0\0\0", b"")
    assert index.match(bytes(8), [slot]) == [16]
    index.apply(slot, b"", bytes(8))
    assert (index.match(bytes(8), [slot]), index.num_keys(slot)) == ([0], 0)


# ── changes ──


def test_evictions_come_before_what_is_stored(index):
    prompt = keys_for("a", 3)
    slot = index.add_slot()
    index.apply(slot, stored(prompt), prompt)
    assert index.match(prompt, [slot]) == [48]
    index.apply(slot, b"", prompt[8:])
    assert (index.match(prompt, [slot]), index.num_keys(slot)) == ([16], 1)
    index.apply(slot, b"", prompt)  # some are gone already
    assert index.num_keys(slot) == 0


def test_a_dropped_slot_is_given_out_again_empty(index):
    prompt = keys_for("a", 3)
    first, second = index.add_slot(), index.add_slot()
    index.apply(first, stored(prompt), b"")
    index.apply(second, stored(prompt), b"")
    index.drop_slot(first)
    with pytest.raises(IndexError, match="slot 0 is not in use"):
        index.match(prompt, [second, first])
    assert index.add_slot() == first
    assert index.match(prompt, [first, second]) == [0, 48]


def test_a_cleared_slot_holds_nothing(index):
    slot = index.add_slot()
    index.apply(slot, stored(keys_for("a", 500)), b"")
    index.assume(slot, keys_for("b", 5), 16.0)
    index.clear(slot)
    assert index.num_keys(slot) == 0
    assert index.match(keys_for("a", 5), [slot]) == [0]


@pytest.mark.parametrize("slot", [-1, 1, 10**6])
def test_a_slot_that_is_not_in_use_is_named(index, slot):
    index.add_slot()
    calls = (
        lambda: index.apply(slot, b"", b""),
        lambda: index.assume(slot, b"", 1.0),
        lambda: index.match(b"", [slot]),
        lambda: index.clear(slot),
        lambda: index.drop_slot(slot),
        lambda: index.num_keys(slot),
    )
    for call in calls:
        with pytest.raises(IndexError, match=f"slot {slot} is not in use"):
            call()


def test_torn_entries_are_refused_before_anything_changes(index):
    slot = index.add_slot()
    prompt = keys_for("a", 3)
    index.apply(slot, stored(prompt), b"")
    with pytest.raises(ValueError, match="stored has 11 bytes, which are not whole entries of 12"):
        index.apply(slot, bytes(11), prompt)
    with pytest.raises(ValueError, match="evicted has 9 bytes"):
        index.apply(slot, bytes(12), bytes(9))
    with pytest.raises(ValueError, match="keys has 7 bytes"):
        index.match(bytes(7), [slot])
    with pytest.raises(ValueError, match="tokens_per_key must be from 0"):
        index.assume(slot, prompt, float("nan"))
    assert (index.match(prompt, [slot]), index.num_keys(slot)) == ([48], 3)


@pytest.mark.parametrize("name", ["max_keys_per_slot", "max_assumed_keys_per_slot"])
@pytest.mark.parametrize("limit", [0, 1, 2**28 + 1])
def test_limits_have_limits(hot_path, name, limit):
    with pytest.raises(ValueError, match=f"{name} must be from 2 to {2**28}; got {limit}"):
        hot_path.ResidencyIndex(**{name: limit})


# ── bounds ──


def test_a_full_slot_refuses_new_keys_and_keeps_old_ones(hot_path):
    index = hot_path.ResidencyIndex(max_keys_per_slot=10)
    prompt = keys_for("a", 12)
    full, other = index.add_slot(), index.add_slot()
    index.apply(full, stored(prompt), b"")
    assert (index.num_keys(full), index.num_refused) == (10, 2)
    assert index.match(prompt, [full, other]) == [160, 0]
    index.apply(full, stored(prompt)[: 3 * STORED_BYTES], b"")  # known keys are no new ones
    assert index.num_refused == 2
    index.apply(full, stored(prompt)[10 * STORED_BYTES :], prompt[:16])
    assert (index.num_keys(full), index.num_refused) == (10, 2)
    index.apply(other, stored(prompt)[: 10 * STORED_BYTES], b"")
    assert index.match(prompt, [other]) == [160]


def test_what_was_assumed_is_found_by_its_rate(index):
    slot = index.add_slot()
    prompt = keys_for("a", 10)
    index.assume(slot, prompt[: 8 * 5], 12.5)
    assert index.match(prompt, [slot]) == [62]
    index.assume(slot, prompt, 20.0)
    assert index.match(prompt, [slot]) == [200]


def test_the_least_recent_assumptions_are_forgotten_first(hot_path):
    index = hot_path.ResidencyIndex(max_assumed_keys_per_slot=40)
    slot = index.add_slot()
    prompts = [keys_for(name, 8) for name in "abcdef"]
    for prompt in prompts[:3]:
        index.assume(slot, prompt, 16.0)  # the third begins a generation
    index.assume(slot, prompts[0], 16.0)  # used again
    for prompt in prompts[3:]:
        index.assume(slot, prompt, 16.0)
    held = [index.match(prompt, [slot])[0] for prompt in prompts]
    assert held == [128, 0, 128, 128, 128, 128] or held == [0, 0, 0, 128, 128, 128]
    assert index.num_keys(slot) <= 40


def test_what_is_used_again_outlives_what_is_not(hot_path):
    index = hot_path.ResidencyIndex(max_assumed_keys_per_slot=64)
    slot = index.add_slot()
    shared = keys_for("system", 8)
    for number in range(50):
        index.assume(slot, shared + keys_for(f"u{number}", 4), 16.0)
        assert index.match(shared, [slot]) == [128]
        assert index.num_keys(slot) <= 64
    assert index.match(keys_for("u0", 4), [slot]) == [0]


def test_an_assumed_prompt_longer_than_the_bound_is_cut(hot_path):
    index = hot_path.ResidencyIndex(max_assumed_keys_per_slot=10)
    slot = index.add_slot()
    index.assume(slot, keys_for("a", 100), 16.0)
    assert index.num_keys(slot) == 5
    assert index.match(keys_for("a", 100), [slot]) == [80]


# ── memory ──


def test_a_key_takes_about_ten_bytes():
    index = native.load().ResidencyIndex()
    slot = index.add_slot()
    empty = index.memory_bytes
    assert empty < 1000
    for _ in range(20):
        index.apply(slot, os.urandom(12 * 10_000), b"")
        per_key = (index.memory_bytes - empty) / index.num_keys(slot)
        assert 9.9 < per_key < 14.5  # so that 64 x 1 M keys take less than 1 GB
    assert index.num_keys(slot) == 200_000


def test_memory_is_flat_over_prefixes_that_come_and_go():
    index = native.load().ResidencyIndex()
    slot = index.add_slot()
    waiting = []
    sizes = []
    for step in range(400):
        fresh = os.urandom(12 * 500)
        waiting.append(b"".join(fresh[at : at + 8] for at in range(0, len(fresh), 12)))
        index.apply(slot, fresh, waiting.pop(0) if step >= 40 else b"")
        sizes.append(index.memory_bytes)
    assert index.num_keys(slot) == 20_000
    assert max(sizes[100:]) < 1.15 * min(sizes[100:])
    for keys in waiting:
        index.apply(slot, b"", keys)
    assert index.num_keys(slot) == 0
    assert index.memory_bytes < 10_000


def test_a_shrunken_slot_gives_its_memory_back():
    index = native.load().ResidencyIndex()
    slot = index.add_slot()
    entries = os.urandom(12 * 50_000)
    index.apply(slot, entries, b"")
    full = index.memory_bytes
    keys = [entries[at : at + 8] for at in range(0, len(entries), 12)]
    index.apply(slot, b"", b"".join(keys[2_000:]))
    assert index.memory_bytes < full / 4
    assert index.match(keys[0] + keys[1], [slot]) != [0]
    index.drop_slot(slot)
    assert index.memory_bytes < 1000
