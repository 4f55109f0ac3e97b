"""Labels come and go with blocks.

Red when: a label is told before its block is cached, or stays after it went; a block that cannot be
reached keeps its labels; a name on several blocks of a chain does not fall back; a name that two
prompts share goes with the first of them; anything is left when the cache is empty.
"""

from __future__ import annotations

import struct
from array import array

from octavo_engine.config import BLOCK_SIZE, SchedulerConfig
from octavo_engine.kv.residency import MAX_LABELS
from octavo_engine.scheduling.scheduler import Scheduler
from octavo_engine.state.labels import Labels
from octavo_engine.state.request import EngineRequest
from octavo_engine.state.sampling_params import SamplingParams
from tests.fakes.kv_machine import Loop


def labels(*wanted: tuple[int, int, int]) -> Labels:
    """(name, tokens, block) each."""
    entries = b"".join(struct.pack("<QI", name, tokens) for name, tokens, _ in wanted)
    return Labels(entries, array("I", [block for *_, block in wanted]).tobytes())


class View:
    """A scheduler with 8 blocks, and what somebody who watches knows of it."""

    def __init__(self, num_blocks: int = 8) -> None:
        config = SchedulerConfig(max_num_seqs=4, max_model_len=128, max_num_batched_tokens=256)
        self.scheduler = Scheduler(config, num_blocks=num_blocks)
        self.loop = Loop(self.scheduler)
        self.residency = self.scheduler.kv.residency
        self.residency.watch(on=True)
        self.known: dict[int, int] = {}
        self.number = 0
        self.is_watching = True

    def run(self, prompt: list[int], named: Labels | None = None, *, max_tokens: int = 1) -> str:
        self.number += 1
        request_id = str(self.number)
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        self.scheduler.add(
            EngineRequest(
                request_id=request_id, prompt_token_ids=prompt, params=params, labels=named
            )
        )
        while self.scheduler.has_work:
            self.loop.step()
            if self.is_watching:
                self.look()
        return request_id

    def look(self) -> dict[int, int]:
        change = self.residency.take()
        if change is not None:
            for (name,) in struct.iter_unpack("<Q", change.evicted):
                self.known.pop(name, None)
            self.known.update(struct.iter_unpack("<QI", change.stored))
        assert dict(struct.iter_unpack("<QI", self.residency.snapshot())) == self.known
        return self.known


def prompt(first: int, num_tokens: int) -> list[int]:
    return [first * 50 + i for i in range(num_tokens)]


A = labels((1, 16, 0), (2, 32, 1), (3, 40, 1))


def test_labels_are_true_from_the_step_that_computes_their_blocks():
    view = View()
    view.run(prompt(1, 40), A)
    assert view.look() == {1: 16, 2: 32, 3: 40}


def test_labels_for_what_is_cached_already_are_true_at_once():
    view = View()
    view.run(prompt(1, 40))
    assert view.look() == {}
    view.run(prompt(1, 40), A)
    assert view.look() == {1: 16, 2: 32, 3: 40}


def test_labels_go_with_their_blocks_the_last_ones_first():
    view = View()
    view.run(prompt(1, 40), A)
    view.run(prompt(2, 7 * BLOCK_SIZE))  # of eight blocks seven: only the first one's stays
    assert view.look() == {1: 16}
    view.run(prompt(3, 8 * BLOCK_SIZE - 1))
    assert view.look() == {}
    assert len(view.residency) == 0


def test_a_name_on_several_blocks_falls_back_to_the_one_before():
    view = View()
    view.run(prompt(1, 40), labels((9, 16, 0), (9, 32, 1)))
    assert view.look() == {9: 32}
    view.run(prompt(2, 7 * BLOCK_SIZE))
    assert view.look() == {9: 16}


def test_a_short_name_stays_while_any_prompt_that_has_it_is_cached():
    view = View()
    view.run(prompt(1, 17), labels((7, 10, 0)))
    view.run(prompt(2, 17), labels((7, 10, 0)))
    view.run(prompt(3, 6 * BLOCK_SIZE))  # four blocks had nothing in them, two were the first one's
    assert view.look() == {7: 10}
    view.run(prompt(4, 8 * BLOCK_SIZE - 1))
    assert view.look() == {}


def test_blocks_behind_one_that_went_are_hidden_until_it_is_back():
    view = View()
    view.run(prompt(1, 40), A)
    cache = view.scheduler.kv.pool.cache
    first = next(
        b for b in view.scheduler.kv.pool.blocks if b.tokens and not cache_parent(cache, b)
    )
    cache.retract(first)
    assert view.look() == {}
    view.run(prompt(1, 40))  # computes the first block again; the second was there all the time
    assert view.look() == {2: 32, 3: 40}
    view.run(prompt(1, 40), A)
    assert view.look() == {1: 16, 2: 32, 3: 40}


def cache_parent(cache, block) -> bool:
    return cache.get(block.parent) is not None


def test_an_answer_is_labelled_after_its_end_and_once():
    view = View()
    request_id = view.run(prompt(1, 20), labels((1, 16, 0)), max_tokens=30)
    answer = labels((5, 32, 1), (6, 48, 2), (8, 64, 3))
    view.residency.label(request_id, answer)
    assert view.look() == {1: 16, 5: 32, 6: 48}  # 49 tokens were computed: three full blocks
    view.residency.label(request_id, labels((10, 32, 1)))
    assert 10 not in view.look()


def test_clearing_the_cache_clears_all_labels():
    view = View()
    view.run(prompt(1, 40), labels((1, 10, 0), (2, 32, 1)))
    assert view.look() == {1: 10, 2: 32}
    assert view.scheduler.reset_prefix_cache()
    assert view.look() == {}
    assert len(view.residency) == 0


def test_nothing_is_collected_while_not_watched():
    view = View()
    view.residency.watch(on=False)
    view.is_watching = False
    view.run(prompt(1, 40), A)
    assert view.residency.take() is None
    view.residency.watch(on=True)
    change = view.residency.take()
    assert change is not None
    assert (change.stored, change.evicted) == (b"", b"")
    assert dict(struct.iter_unpack("<QI", change.snapshot or b"")) == {1: 16, 2: 32, 3: 40}


class Tiers:
    """Which tier has a block: whatever the test says."""

    def __init__(self, place: int) -> None:
        self.place = place
        self.moved: dict[bytes, int] = {}
        self.changed: list[bytes] = []

    def place_of(self, digest: bytes) -> int:
        return self.moved.get(digest, self.place)

    def take_changed(self) -> list[bytes]:
        changed, self.changed = self.changed, []
        return changed

    def move(self, digest: bytes, place: int) -> None:
        self.moved[digest] = place
        self.changed.append(digest)


IN_HOST, ON_DISK = 1, 2


def outside(view: View) -> tuple[dict[int, int], dict[str, dict[int, int]]]:
    """What the pool has and what tiers have, by the changes since the last call."""
    change = view.residency.take()
    assert change is not None
    for (name,) in struct.iter_unpack("<Q", change.evicted):
        view.known.pop(name, None)
    view.known.update(struct.iter_unpack("<QI", change.stored))
    packed = view.residency.snapshot_tiers(view.residency.snapshot())
    for medium, entries in change.tiers.items():
        assert set(struct.iter_unpack("<QI", entries)) <= set(
            struct.iter_unpack("<QI", packed[medium])
        )
    return view.known, {m: dict(struct.iter_unpack("<QI", e)) for m, e in packed.items()}


def overflown(place: int) -> tuple[View, Tiers, list[bytes]]:
    """Its first prompt's two blocks have left the pool for a tier."""
    view, tiers = View(), Tiers(place)
    view.residency.use_tiers(tiers)
    view.run(prompt(1, 40), A)
    digests = [b.digest for b in view.scheduler.kv.pool.blocks if b.digest is not None]
    view.is_watching = False
    view.run(prompt(3, 8 * BLOCK_SIZE - 1))
    ordered = sorted(digests, key=lambda d: len(view.residency._outside.children(d)), reverse=True)
    return view, tiers, ordered


def test_labels_of_blocks_that_a_tier_holds_stay_with_its_medium():
    view, tiers, (first, second) = overflown(IN_HOST)
    assert outside(view) == ({}, {"CPU": {1: 16, 2: 32, 3: 40}})
    tiers.move(second, ON_DISK)
    assert outside(view) == ({}, {"CPU": {1: 16}, "DISK": {2: 32, 3: 40}})
    tiers.move(second, 0)
    assert outside(view) == ({}, {"CPU": {1: 16}})
    tiers.move(first, 0)
    assert outside(view) == ({}, {})
    assert len(view.residency) == 0


def test_what_lies_behind_a_block_that_no_tier_has_is_hidden_until_it_is_computed_again():
    view, tiers, (first, _) = overflown(ON_DISK)
    outside(view)
    tiers.move(first, 0)
    assert outside(view) == ({}, {})
    view.run(prompt(1, 17), labels((1, 16, 0)))
    assert outside(view) == ({1: 16}, {"DISK": {2: 32, 3: 40}})
    view.run(prompt(1, 40))  # computes the second as well, without labels of its own
    assert outside(view) == ({1: 16, 2: 32, 3: 40}, {})


def test_clearing_the_cache_forgets_what_lies_outside():
    view, _, _ = overflown(ON_DISK)
    outside(view)
    assert view.scheduler.reset_prefix_cache()
    assert outside(view) == ({}, {})
    assert len(view.residency) == 0


def test_one_block_holds_so_many_labels_and_no_more():
    view = View()
    view.run(prompt(1, 33), labels(*((100 + i, 33, 1) for i in range(MAX_LABELS + 8))))
    assert sorted(view.look()) == list(range(108, 108 + MAX_LABELS))
