"""Groups of layers with windows: what a sequence holds, is promised, gives back and finds again."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from octavo_engine.backends.native.kv_format import settle_kv_format
from octavo_engine.caches import KVSpec, group_layers, one_group
from octavo_engine.kv.group_match import match_groups
from octavo_engine.kv.manager import KVManager
from octavo_engine.kv.needs import KVNeeds
from octavo_engine.kv.pool import BlockPool
from octavo_engine.protocol.prefix_hash import chain_digests, pack_tokens
from tests.fakes.requests import make_prompt, make_sequence

if TYPE_CHECKING:
    from octavo_engine.config import KVCacheDType
    from octavo_engine.state.batch import BlockCopy
    from octavo_engine.state.sequence import Sequence

STEP = 32
MIXED = (None, 33)  # the second sees two blocks before the one under way


def manager(num_blocks: int = 40, windows: tuple[int | None, ...] = MIXED) -> KVManager:
    return KVManager(num_blocks, windows=windows, max_step_tokens=STEP)


def admit(kv: KVManager, sequence: Sequence) -> list[BlockCopy]:
    kv.name_blocks(sequence)
    return kv.admit(sequence, kv.match(sequence))


def compute(kv: KVManager, sequence: Sequence, num_tokens: int, step: int = STEP) -> None:
    """As steps would."""
    while sequence.num_computed_tokens < num_tokens:
        end = min(num_tokens, sequence.num_computed_tokens + step)
        kv.extend(sequence, end)
        sequence.num_computed_tokens = end
        kv.publish(sequence)
        kv.trim(sequence)


def held(sequence: Sequence, group: int) -> list[int]:
    """Places that have blocks."""
    return [i for i, block in enumerate(sequence.block_tables[group]) if block >= 0]


# -- needs


def test_needs_are_all_blocks_or_those_that_a_window_and_a_step_span():
    needs = KVNeeds((None, 33, 1), max_step_tokens=32)
    assert [group.behind for group in needs.groups] == [None, 2, 0]
    assert [group.most for group in needs.groups] == [None, 5, 3]
    assert [needs.blocks(n) for n in (1, 16, 17, 80, 160, 1600)] == [3, 3, 6, 13, 18, 108]
    assert needs.growth(16, 160) == 10 + 2 + 0


@pytest.mark.parametrize("windows", [(None,), (None, None), (33,), MIXED, (None, 33, 33, 33)])
@pytest.mark.parametrize("num_blocks", [1, 4, 7, 30])
def test_so_many_tokens_are_the_most_that_fit(windows: tuple[int | None, ...], num_blocks: int):
    needs = KVNeeds(windows, max_step_tokens=32)
    tokens = needs.tokens(num_blocks, 1000)
    assert tokens == 0 or needs.blocks(tokens) <= num_blocks
    assert tokens == 1000 or needs.blocks(tokens + 1) > num_blocks


@pytest.mark.parametrize("window", [1, 2, 16, 17, 18, 33, 100])
@pytest.mark.parametrize("step", [1, 5, 16, 40])
def test_no_step_wherever_it_begins_holds_more_or_sees_what_is_gone(window: int, step: int):
    (needs,) = KVNeeds((window,), step).groups
    assert needs.most is not None
    for start in range(200):
        first = needs.first(start)
        assert first <= max(0, start - window + 1) // 16
        assert -(-(start + step) // 16) - first <= needs.most


# -- one sequence


def test_a_prompt_holds_its_windows_and_is_promised_what_it_gave_back():
    kv = manager()
    sequence = make_sequence(160)
    assert admit(kv, sequence) == []
    assert (held(sequence, 0), held(sequence, 1)) == ([*range(10)], [0, 1, 2, 3, 4])
    assert kv.num_available == kv.pool.num_free == 25
    compute(kv, sequence, 32)
    assert (held(sequence, 1), kv.num_available) == ([0, 1, 2, 3, 4], 25)
    compute(kv, sequence, 64)  # sees the blocks 2 and 3 from there on
    assert held(sequence, 1) == [2, 3, 4]
    assert (kv.pool.num_free, sequence.num_promised_blocks, kv.num_available) == (27, 2, 25)
    compute(kv, sequence, 96)
    assert held(sequence, 1) == [4, 5]
    assert (kv.pool.num_free, sequence.num_promised_blocks, kv.num_available) == (28, 3, 25)
    compute(kv, sequence, 160)
    assert (held(sequence, 1), sequence.num_promised_blocks) == ([8, 9], 0)
    assert kv.num_available == kv.pool.num_free == 28
    sequence.token_ids.append(1)
    assert [(g.group, g.place) for g in kv.grow(sequence)] == [(0, 10), (1, 10)]
    kv.release(sequence)
    assert kv.num_available == kv.pool.num_free == 40


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_layers", "kv_dtype", "share"),
    [(26, "bfloat16", 0.175), (26, "int8", 0.1), (34, "int8", 0.1)],
    ids=["gemma-3-1b", "gemma-3-1b-int8", "gemma-3-4b-int8"],
)
def test_a_long_text_of_gemma_3s_shape_is_computed_in_a_tenth_of_the_memory(
    num_layers: int, kv_dtype: KVCacheDType, share: float
) -> None:
    """128k tokens, of what all layers' bf16 keys and values would take: the layers that see all
    of them are 15 % by themselves, so that a tenth needs 8 bits too."""
    specs = [
        KVSpec(1, 256, window=None if (layer + 1) % 6 == 0 else 512) for layer in range(num_layers)
    ]
    layout, length, step = group_layers(specs), 131072, 2048
    num_blocks = KVNeeds(layout.windows, max_step_tokens=step).blocks(length)
    kv = KVManager(num_blocks, windows=layout.windows, max_step_tokens=step)
    sequence = make_sequence(length)
    admit(kv, sequence)
    compute(kv, sequence, length, step)
    assert len(held(sequence, 0)) == length // 16
    assert all(len(held(sequence, group)) <= 33 for group in range(1, len(layout.groups)))

    whole = settle_kv_format("bfloat16", "bf16").bytes_of
    all_kept = length // 16 * one_group(specs).page_bytes(whole)
    taken = num_blocks * layout.page_bytes(settle_kv_format(kv_dtype, "bf16").bytes_of)
    assert taken <= share * all_kept


def test_growth_takes_a_block_in_each_group_or_none():
    kv = manager(num_blocks=5)
    sequence = make_sequence(32)
    admit(kv, sequence)
    assert kv.pool.num_free == 1
    assert kv.grow(sequence) == []
    assert [len(table) for table in sequence.block_tables] == [2, 2]


def test_a_shared_block_is_not_taken_for_memory_that_comes_free():
    """Whoever gives it back first gets nothing for it: the other pays for it from the start."""
    kv = manager(windows=(33,))
    first, second = make_sequence(100), make_sequence(160)
    admit(kv, first)
    compute(kv, first, 100)
    assert held(first, 0) == [4, 5, 6]
    available = kv.num_available
    kv.name_blocks(second)
    match = kv.match(second)
    assert (match.prefix.first, match.prefix.num_full) == (4, 6)
    kv.admit(second, match)
    shared = first.block_tables[0][4:6]
    assert second.block_tables[0][4:6] == shared
    copied = 1  # the source of a copy is held for a step
    assert kv.num_available == available - 5 - copied
    kv.end_step()
    assert kv.num_available == available - 5
    compute(kv, second, 128)
    compute(kv, second, 160)
    assert kv.num_available >= available - 5
    kv.release(first)
    kv.release(second)
    assert kv.num_available == kv.pool.num_free == 40


def test_a_hit_needs_the_whole_window_in_every_group():
    kv = manager()
    first = make_sequence(160)
    admit(kv, first)
    compute(kv, first, 64)
    compute(kv, first, 160)
    kv.release(first)
    again = make_sequence(160)
    kv.name_blocks(again)
    match = kv.match(again)
    assert match.num_tokens == 159
    full, window = match.prefixes
    assert (full.first, full.num_full) == (0, 9)
    assert (window.first, window.num_full) == (7, 9)
    block = kv.pool.caches[1].get(first.digests[7])
    assert block is not None
    kv.pool.caches[1].retract(block)  # as if its memory had been needed
    assert kv.match(again).prefix.num_full == 7  # sees 5 and 6
    assert kv.match(again).num_tokens == 7 * 16


def test_the_partly_filled_block_is_copied_in_each_group():
    kv = manager()
    first = make_sequence(100)
    admit(kv, first)
    compute(kv, first, 100)
    kv.release(first)
    prompt = [*make_prompt(98), 499, 498, 497]
    again = make_sequence(prompt)
    copies = admit(kv, again)
    assert [copy.num_tokens for copy in copies] == [2, 2]
    assert [copy.target for copy in copies] == [table[6] for table in again.block_tables]
    assert {kv.pool.blocks[copy.source].group for copy in copies} == {0, 1}
    assert again.num_computed_tokens == 98


def test_what_a_spoiled_sequence_gave_back_is_forgotten_too():
    kv = manager()
    sequence, reader = make_sequence(160), make_sequence(160)
    admit(kv, sequence)
    compute(kv, sequence, 64)
    compute(kv, sequence, 128)
    assert held(sequence, 1)[0] > 0
    kv.release_spoiled(sequence)
    assert [len(cache) for cache in kv.pool.caches] == [0, 0]
    kv.name_blocks(reader)
    assert kv.match(reader).num_tokens == 0


# -- matches against the obvious


@pytest.mark.parametrize("seed", range(200))
def test_the_longest_prefix_that_all_groups_have(seed: int) -> None:
    rng = random.Random(seed)
    windows = tuple(rng.choice([None, 1, 17, 33, 50]) for _ in range(rng.randint(1, 4)))
    needs = KVNeeds(windows, 1).groups
    tokens = make_prompt(16 * 8)
    digests = chain_digests(b"root", tokens, block_size=16)
    pool = BlockPool(100, len(windows))
    for group, cache in enumerate(pool.caches):
        for index, digest in enumerate(digests):
            if rng.random() < 0.8:
                (block,) = pool.allocate(1, group)
                parent = digests[index - 1] if index else b"root"
                packed = pack_tokens(tokens[index * 16 : index * 16 + 16])
                cache.publish(block, parent, packed, digest)
    best = max(
        end
        for end in range(8)
        if all(
            cache.get(digests[place]) is not None
            for cache, window in zip(pool.caches, windows, strict=True)
            for place in range(end)
            if window is None or place >= end - -(-(window - 1) // 16)
        )
    )
    matches = match_groups(pool.caches, needs, b"root", digests, tokens, len(tokens) - 1)
    assert {match.num_full for match in matches} == {best}
    assert len({match.num_copied for match in matches}) == 1
