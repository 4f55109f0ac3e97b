"""What several cores hold, reported as one: against sets that are made anew each time."""

from __future__ import annotations

import random
import struct

import pytest

from octavo_engine.core.data_parallel.residency_union import ResidencyUnion
from octavo_engine.state.labels import ENTRY_BYTES, NAME_BYTES, ResidencyChange

Held = dict[bytes, int]


def packed(held: Held) -> bytes:
    return b"".join(name + struct.pack("<I", tokens) for name, tokens in held.items())


def unpacked(entries: bytes) -> Held:
    starts = range(0, len(entries), ENTRY_BYTES)
    return {
        entries[at : at + NAME_BYTES]: int.from_bytes(
            entries[at + NAME_BYTES : at + ENTRY_BYTES], "little"
        )
        for at in starts
    }


def follow(seen: Held, change: ResidencyChange | None) -> None:
    """As a router does."""
    if change is None:
        return
    for at in range(0, len(change.evicted), NAME_BYTES):
        del seen[change.evicted[at : at + NAME_BYTES]]
    seen.update(unpacked(change.stored))


def union_of(cores: list[Held]) -> Held:
    whole: Held = {}
    for held in cores:
        for name, tokens in held.items():
            whole[name] = max(tokens, whole.get(name, 0))
    return whole


A, B, C = b"a" * 8, b"b" * 8, b"c" * 8


def test_the_snapshot_comes_once_all_have_sent_theirs() -> None:
    union = ResidencyUnion(2)
    union.watch([0, 1])
    first = union.apply(0, ResidencyChange(snapshot=packed({A: 16, B: 32})))
    assert first is not None
    assert first.snapshot is None
    second = union.apply(1, ResidencyChange(snapshot=packed({A: 48, C: 16})))
    assert second is not None
    assert second.snapshot is not None
    assert unpacked(second.snapshot) == {A: 48, B: 32, C: 16}


def test_a_core_that_is_lost_is_not_waited_for() -> None:
    union = ResidencyUnion(2)
    union.watch([0, 1])
    union.apply(0, ResidencyChange(snapshot=packed({A: 16})))
    change = union.lose(1)
    assert change is not None
    assert change.snapshot == packed({A: 16})


def test_what_another_core_holds_is_not_evicted() -> None:
    union = ResidencyUnion(2)
    union.apply(0, ResidencyChange(stored=packed({A: 32})))
    assert union.apply(1, ResidencyChange(stored=packed({A: 16}))) is None
    assert union.apply(0, ResidencyChange(evicted=A)) == ResidencyChange(stored=packed({A: 16}))
    assert union.lose(1) == ResidencyChange(evicted=A)


def test_the_quickest_memory_of_any_core_counts() -> None:
    union = ResidencyUnion(2)
    on_disk, in_host = {"DISK": packed({A: 64})}, {"CPU": packed({A: 48})}
    assert union.apply(0, ResidencyChange(tiers=on_disk)) == ResidencyChange(
        evicted=A, tiers=on_disk
    )
    assert union.apply(1, ResidencyChange(tiers=in_host)) == ResidencyChange(
        evicted=A, tiers=in_host
    )
    stored = ResidencyChange(stored=packed({A: 16}))
    assert union.apply(0, stored) == stored
    assert union.apply(0, ResidencyChange(evicted=A, tiers=on_disk)) == ResidencyChange(
        evicted=A, tiers=in_host
    )
    assert union.lose(1) == ResidencyChange(evicted=A, tiers=on_disk)
    assert union.lose(0) == ResidencyChange(evicted=A)


def test_the_snapshot_has_what_tiers_hold() -> None:
    union = ResidencyUnion(1)
    union.watch([0])
    report = ResidencyChange(snapshot=packed({A: 16}), snapshot_tiers={"DISK": packed({B: 32})})
    change = union.apply(0, report)
    assert change is not None
    assert (change.snapshot, change.snapshot_tiers) == (report.snapshot, report.snapshot_tiers)


@pytest.mark.parametrize("seed", range(20))
def test_any_reports_give_the_union(seed: int) -> None:
    rng = random.Random(seed)
    names = [bytes([value]) * NAME_BYTES for value in range(12)]
    cores: list[Held] = [{} for _ in range(3)]
    seen: Held = {}
    union = ResidencyUnion(3)
    for _ in range(300):
        rank = rng.randrange(3)
        held = cores[rank]
        kind = rng.random()
        if kind < 0.03:
            held.clear()
            follow(seen, union.lose(rank))
        elif kind < 0.08:
            cores[rank] = {name: rng.randrange(1, 5) for name in rng.sample(names, 4)}
            follow(seen, union.apply(rank, ResidencyChange(snapshot=packed(cores[rank]))))
        else:
            gone = rng.sample(sorted(held), min(len(held), rng.randrange(3)))
            new = {name: rng.randrange(1, 5) for name in rng.sample(names, rng.randrange(4))}
            for name in gone:
                del held[name]
            held.update(new)
            change = ResidencyChange(evicted=b"".join(gone), stored=packed(new))
            follow(seen, union.apply(rank, change))
        assert seen == union_of(cores)
    union.watch([1])
    last = union.apply(1, ResidencyChange(snapshot=packed(cores[1])))
    assert last is not None
    assert unpacked(last.snapshot or b"") == union_of(cores)
