"""What must hold between steps: blocks are accounted for, sequences are in one place each."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Protocol

from octavo_engine.config import BLOCK_SIZE
from octavo_engine.kv.manager import GIVEN_BACK
from octavo_engine.kv.media_names import extras_of, packed_block
from octavo_engine.protocol.prefix_hash import block_digest

if TYPE_CHECKING:
    from collections.abc import Iterable

    from octavo_engine.config import SchedulerConfig
    from octavo_engine.kv.manager import KVManager
    from octavo_engine.kv.states import StateSnapshots
    from octavo_engine.scheduling.adapter_slots import AdapterSlots
    from octavo_engine.scheduling.policy import WaitingQueue
    from octavo_engine.state.sequence import Sequence


class SchedulerState(Protocol):
    """What of a scheduler is checked."""

    config: SchedulerConfig
    kv: KVManager
    sequences: dict[str, Sequence]
    waiting: WaitingQueue
    running: list[Sequence]
    suspended: dict[str, Sequence]
    free_rows: list[int]
    adapter_slots: AdapterSlots


def check_invariants(scheduler: SchedulerState) -> None:
    """Raises AssertionError that says what is wrong."""
    check_sequences(scheduler)
    check_blocks(scheduler.kv, scheduler.running)
    check_cache(scheduler.kv)
    for sequence in scheduler.running:
        check_contents(scheduler.kv, sequence)
    if scheduler.kv.states is not None:
        check_states(scheduler.kv.states, scheduler.sequences.values())
    if not scheduler.sequences and not scheduler.kv.pinned:
        assert scheduler.kv.pool.num_free == len(scheduler.kv.pool.blocks), (
            "idle, yet blocks are held"
        )
        assert not scheduler.kv.computing, "idle, yet something counts as being computed"


def check_sequences(scheduler: SchedulerState) -> None:
    """Each live sequence waits or is suspended and holds nothing, or runs in a row of its own."""
    config, running, waiting = scheduler.config, scheduler.running, list(scheduler.waiting)
    suspended = list(scheduler.suspended.values())
    everywhere = [*running, *waiting, *suspended]
    assert {id(s) for s in everywhere} == {id(s) for s in scheduler.sequences.values()}
    assert len(everywhere) == len(scheduler.sequences), "a sequence is in two places"
    assert len(running) <= config.max_num_seqs
    for line in (running, waiting):
        assert [s.order for s in line] == sorted(s.order for s in line), "out of policy order"
    rows = [s.row for s in running] + scheduler.free_rows
    assert sorted(rows) == list(range(config.max_num_seqs)), "rows are lost or shared"
    assert scheduler.waiting.num_tokens == sum(s.num_tokens for s in waiting)
    scheduler.adapter_slots.check(running)
    for sequence in [*waiting, *suspended]:
        assert sequence.row == sequence.adapter_slot == -1
        assert not any(sequence.block_tables)
        assert sequence.num_computed_tokens == 0
    for sequence in scheduler.sequences.values():
        assert not sequence.is_finished
        assert sequence.num_computed_tokens < sequence.num_tokens < sequence.max_num_tokens
        assert sequence.max_num_tokens <= config.max_model_len


def check_blocks(kv: KVManager, running: Iterable[Sequence]) -> None:
    """Every block is counted by exactly those that hold it, and free if none does."""
    pool = kv.pool
    running = list(running)
    holders = Counter(
        block_id
        for sequence in running
        for table in sequence.block_tables
        for block_id in table
        if block_id != GIVEN_BACK
    )
    holders.update(block.id for block in kv.pinned)
    free = pool.free_blocks()
    assert len(free) == pool.num_free == len({block.id for block in free})
    for block in pool.blocks:
        assert block.ref_count == holders[block.id], f"{block} is held {holders[block.id]} times"
        assert (block.previous is not None) == (block.ref_count == 0), f"{block} is free, or is it?"
    assert len(free) == sum(block.ref_count == 0 for block in pool.blocks)
    check_promises(kv, running)


def check_promises(kv: KVManager, running: Iterable[Sequence]) -> None:
    """What prompts under way were promised is free, whichever sequence gives up what is shared."""
    promised = 0
    for sequence in running:
        num_blocks = -(-sequence.num_admitted_tokens // BLOCK_SIZE)
        of_sequence = 0
        for index, table in enumerate(sequence.block_tables):
            needs = kv.needs.groups[index]
            num_held = len(table) - table.count(GIVEN_BACK)
            of_sequence += needs.promised(num_held, num_blocks - len(table))
        assert of_sequence == sequence.num_promised_blocks
        promised += of_sequence
    is_windowed = [needs.behind is not None for needs in kv.needs.groups]
    promised += sum(max(0, b.ref_count - 1) for b in kv.pool.blocks if is_windowed[b.group])
    num_retained = sum(block.is_retained and not block.ref_count for block in kv.pool.blocks)
    assert kv.num_available == kv.pool.num_free - num_retained - promised >= 0
    check_retained(kv)


def check_retained(kv: KVManager) -> None:
    """Retained blocks can be found, and are those that are counted."""
    retained = [block for block in kv.pool.blocks if block.is_retained]
    assert len(retained) == (0 if kv.retained is None else len(kv.retained))
    assert all(block.digest is not None for block in retained), "a retained block has no name"


def check_states(states: StateSnapshots, sequences: Iterable[Sequence]) -> None:
    """Every slot behind the rows' own is free, holds one snapshot, or is being saved to or gone
    back to."""
    saving = [
        slot
        for sequence in sequences
        for saves in (sequence.state_saves, sequence.draft_saves)
        for slot in saves.values()
    ]
    slots = [*states.free, *states.cached.values(), *saving]
    assert len(slots) == len(set(slots)) == states.num_snapshots


def check_cache(kv: KVManager) -> None:
    """Every published block is found under its name, and the name is right."""
    published = [block for block in kv.pool.blocks if block.is_published]
    assert sum(map(len, kv.pool.caches)) == len(published)
    for block in published:
        assert block.parent is not None
        if block.digest is not None:
            assert len(block.tokens) == 4 * BLOCK_SIZE
            assert block.digest == block_digest(
                block.parent, block.tokens, extras=extras_of(block.media)
            )
            assert kv.pool.caches[block.group].get(block.digest) is block


def check_contents(kv: KVManager, sequence: Sequence) -> None:
    """A running sequence's tables hold its tokens as far as they are seen, and no other sequence
    could write where it does."""
    for group in range(kv.num_groups):
        check_table(kv, sequence, group)
    for digest in kv.computing:
        assert kv.computing[digest].row >= 0, "a sequence that does not run is waited for"


def check_table(kv: KVManager, sequence: Sequence, group: int) -> None:
    table, needs = sequence.block_tables[group], kv.needs.groups[group]
    assert len(table) * BLOCK_SIZE >= sequence.num_computed_tokens
    num_gone = sequence.held_from[group] if sequence.held_from else 0
    assert num_gone <= needs.first(sequence.num_computed_tokens), "what is seen was given back"
    assert set(table[:num_gone]) <= {GIVEN_BACK}
    held = table[num_gone:]
    assert GIVEN_BACK not in held
    assert len(set(held)) == len(held), "a block stands twice in one table"
    for index, block_id in enumerate(held, num_gone):
        block = kv.pool.blocks[block_id]
        assert block.group == group
        begin = index * BLOCK_SIZE
        if begin + BLOCK_SIZE > sequence.num_computed_tokens:
            num_holders = block.ref_count - kv.pinned.count(block)
            assert num_holders == 1, f"{block} is written by one sequence and shared with others"
        if block.is_published:
            end = begin + len(block.tokens) // 4
            assert end <= sequence.num_computed_tokens, (
                f"{block} was published before it was computed"
            )
            assert block.tokens == packed_block(sequence, index)[: 4 * (end - begin)]
