"""A sequence's blocks from admission to release, with exact block ids and queue orders."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo_engine.kv.manager import KVManager
from octavo_engine.state.batch import BlockCopy, BlockGrowth
from tests.fakes.requests import make_prompt, make_sequence

if TYPE_CHECKING:
    from octavo_engine.state.sequence import Sequence


def admit(kv: KVManager, sequence: Sequence) -> list[BlockCopy]:
    kv.name_blocks(sequence)
    return kv.admit(sequence, kv.match(sequence))


def compute(kv: KVManager, sequence: Sequence, num_tokens: int) -> None:
    sequence.num_computed_tokens = num_tokens
    kv.publish(sequence)


def free_ids(kv: KVManager) -> list[int]:
    return [block.id for block in kv.pool.free_blocks()]


def test_blocks_come_at_admission_and_one_by_one_afterwards():
    kv = KVManager(6)
    sequence = make_sequence(40)
    assert admit(kv, sequence) == []
    assert sequence.block_table == [0, 1, 2]
    assert kv.grow(sequence) == [BlockGrowth(sequence.row, place=3, block_id=3)]
    assert sequence.block_table == [0, 1, 2, 3]
    grown = [[growth.block_id for growth in kv.grow(sequence)] for _ in range(3)]
    assert grown == [[4], [5], []]


def test_the_end_of_a_prefix_is_reused_before_its_beginning():
    kv = KVManager(6)
    sequence = make_sequence(40)
    admit(kv, sequence)
    compute(kv, sequence, 40)
    kv.release(sequence)
    assert free_ids(kv) == [3, 4, 5, 2, 1, 0]
    kv.pool.allocate(4)  # takes the three that hold nothing, and the tail
    again = make_sequence(40)
    kv.name_blocks(again)
    assert [block.id for block in kv.match(again).prefix.blocks] == [0, 1]


def test_who_reads_nothing_from_the_cache_computes_all_and_leaves_it_to_others():
    kv = KVManager(12)
    first = make_sequence(40)
    admit(kv, first)
    compute(kv, first, 40)
    unread = make_sequence(40, skip_reading_prefix_cache=True)
    kv.name_blocks(unread)
    match = kv.match(unread)
    assert (match.num_tokens, match.awaits, match.num_blocks) == (0, None, 3)
    kv.admit(unread, match)
    compute(kv, unread, 40)
    kv.release(first)
    kv.release(unread)
    again = make_sequence(40)
    kv.name_blocks(again)
    assert kv.match(again).num_tokens == 39


def test_blocks_that_hold_nothing_computed_are_reused_first():
    kv = KVManager(6)
    sequence = make_sequence(40)
    admit(kv, sequence)
    compute(kv, sequence, 16)
    kv.release(sequence)
    assert free_ids(kv) == [1, 2, 3, 4, 5, 0]


def test_nothing_is_found_before_it_is_computed():
    kv = KVManager(9)
    author, reader = make_sequence(40), make_sequence(40)
    admit(kv, author)
    kv.name_blocks(reader)
    for num_computed, num_found in ((0, 0), (5, 0), (16, 16), (20, 16), (32, 32), (40, 39)):
        compute(kv, author, num_computed)
        match = kv.match(reader)
        assert match.num_tokens == num_found
        assert (match.awaits is None) == (num_found == 39)


def test_a_copy_holds_its_source_until_the_step_is_over():
    kv = KVManager(3)
    first = make_sequence(20)
    admit(kv, first)
    compute(kv, first, 20)
    kv.release(first)
    assert free_ids(kv) == [2, 1, 0]
    again = make_sequence(20)
    assert admit(kv, again) == [BlockCopy(source=1, target=2, num_tokens=3)]
    assert again.block_table == [0, 2]
    assert (again.num_computed_tokens, free_ids(kv)) == (19, [])
    kv.end_step()
    assert free_ids(kv) == [1]
    assert kv.pool.blocks[1].is_published


def test_without_room_for_source_and_target_the_tokens_are_computed():
    kv = KVManager(2)
    first = make_sequence(20)
    admit(kv, first)
    compute(kv, first, 20)
    kv.release(first)
    again = make_sequence(20)
    assert admit(kv, again) == []
    assert again.block_table == [0, 1]
    assert again.num_computed_tokens == 16


def test_a_full_block_computed_twice_is_kept_once():
    kv = KVManager(6)
    first, second = make_sequence(16), make_sequence(16)
    admit(kv, first)
    compute(kv, first, 0)
    admit(kv, second)  # the caller need not wait
    compute(kv, first, 16)
    compute(kv, second, 16)
    kv.release(first)
    kv.release(second)
    assert free_ids(kv)[0] == 1  # the second copy is worth nothing
    assert free_ids(kv)[-1] == 0


def test_what_a_spoiled_sequence_holds_is_forgotten_even_if_it_was_published():
    kv = KVManager(6)
    sequence, reader = make_sequence(40), make_sequence(40)
    admit(kv, sequence)
    compute(kv, sequence, 32)
    kv.release_spoiled(sequence)
    kv.name_blocks(reader)
    assert kv.match(reader).num_tokens == 0
    assert len(kv.pool.cache) == 0
    assert not kv.computing


def test_generated_blocks_continue_the_chain_of_the_prompt():
    kv = KVManager(6)
    tokens = make_prompt(50)
    sequence = make_sequence(tokens[:30])
    admit(kv, sequence)
    compute(kv, sequence, 30)
    for num_tokens in range(31, 50):
        sequence.token_ids.append(tokens[num_tokens - 1])
        if len(sequence.block_table) * 16 < num_tokens:
            kv.grow(sequence)
        compute(kv, sequence, num_tokens)
    kv.release(sequence)
    reader = make_sequence(tokens)
    kv.name_blocks(reader)
    match = kv.match(reader)
    assert len(match.prefix.blocks) == 3
    assert match.num_tokens == 49
