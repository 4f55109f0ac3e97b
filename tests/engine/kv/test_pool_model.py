"""The pool against a model so plain that it is obviously right, over 10^5 random operations.

Red when: free() forgets a decrement or counts twice; a block that is free stays in nobody's list;
allocate() hands out a block with its old name; touch() leaves a block in the queue; freed blocks
queue up in another order; a partly filled block is found with tokens it does not have.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from octavo_engine.config import BLOCK_SIZE
from octavo_engine.kv.pool import BlockPool
from octavo_engine.protocol.prefix_hash import block_digest, pack_tokens

ROOT = b"root"
NUM_GROUPS = 2  # of layers: one's blocks are never found by the other


@dataclass
class Model:
    """Lists and dicts, searched from end to end."""

    num_blocks: int
    free: list[int] = field(default_factory=list)
    counts: dict[int, int] = field(default_factory=dict)
    published: dict[int, tuple[bytes, tuple[int, ...]]] = field(default_factory=dict)
    groups: dict[int, int] = field(default_factory=dict)  # whose a block was last

    def __post_init__(self) -> None:
        self.free = list(range(self.num_blocks))
        self.counts = dict.fromkeys(self.free, 0)
        self.groups = dict.fromkeys(self.free, 0)

    def allocate(self, count: int, group: int) -> list[int]:
        taken, self.free = self.free[:count], self.free[count:]
        for block_id in taken:
            self.published.pop(block_id, None)
            self.counts[block_id] = 1
            self.groups[block_id] = group
        return taken

    def touch(self, block_id: int) -> None:
        if self.counts[block_id] == 0:
            self.free.remove(block_id)
        self.counts[block_id] += 1

    def release(self, block_id: int) -> None:
        self.counts[block_id] -= 1
        if self.counts[block_id] == 0:
            if block_id in self.published:
                self.free.append(block_id)
            else:
                self.free.insert(0, block_id)

    def publish(self, block_id: int, parent: bytes, tokens: tuple[int, ...]) -> bool:
        self.published.pop(block_id, None)
        for other_id, (other_parent, other) in self.published.items():
            if self.groups[other_id] != self.groups[block_id]:
                continue
            is_full = len(tokens) == BLOCK_SIZE
            is_known = other == tokens if is_full else other[: len(tokens)] == tokens
            if other_parent == parent and is_known:
                return False
        self.published[block_id] = (parent, tokens)
        return True

    def longest(self, parent: bytes, tokens: tuple[int, ...], group: int) -> int:
        siblings = [
            other
            for block_id, (p, other) in self.published.items()
            if p == parent and self.groups[block_id] == group
        ]
        return max((common(other, tokens) for other in siblings), default=0)


def common(left: tuple[int, ...], right: tuple[int, ...]) -> int:
    length = 0
    while length < min(len(left), len(right)) and left[length] == right[length]:
        length += 1
    return length


class Pair:
    """The pool and its model, moved together and compared after every move."""

    def __init__(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks, NUM_GROUPS)
        self.model = Model(num_blocks)

    def allocate(self, count: int, group: int = 0) -> None:
        taken = [block.id for block in self.pool.allocate(count, group)]
        assert taken == self.model.allocate(count, group)

    def touch(self, block_id: int) -> None:
        self.pool.touch([self.pool.blocks[block_id]])
        self.model.touch(block_id)

    def free(self, block_ids: list[int]) -> None:
        self.pool.free(self.pool.blocks[block_id] for block_id in block_ids)
        for block_id in block_ids:
            self.model.release(block_id)

    def publish(self, block_id: int, parent: bytes, tokens: tuple[int, ...]) -> None:
        packed = pack_tokens(tokens)
        digest = block_digest(parent, packed) if len(tokens) == BLOCK_SIZE else None
        block = self.pool.blocks[block_id]
        done = self.pool.caches[block.group].publish(block, parent, packed, digest)
        assert done == self.model.publish(block_id, parent, tokens)

    def retract(self, block_id: int) -> None:
        block = self.pool.blocks[block_id]
        self.pool.caches[block.group].retract(block)
        del self.model.published[block_id]

    def match(self, parent: bytes, tokens: tuple[int, ...]) -> None:
        """A match of less than a block, which finds the best sibling."""
        for group, cache in enumerate(self.pool.caches):
            found = cache.match(parent, [], tokens, len(tokens))
            assert found.blocks == []
            assert found.num_copied == self.model.longest(parent, tokens, group)
            if found.source is not None:
                held_by, held = self.model.published[found.source.id]
                assert held_by == parent
                assert held[: found.num_copied] == tokens[: found.num_copied]

    def compare(self) -> None:
        pool, model = self.pool, self.model
        assert [block.id for block in pool.free_blocks()] == model.free
        assert pool.num_free == len(model.free)
        assert sum(map(len, pool.caches)) == len(model.published)
        for block in pool.blocks:
            assert block.ref_count == model.counts[block.id]
            assert block.group == model.groups[block.id]
            assert block.is_published == (block.id in model.published)
            if block.is_published:
                parent, tokens = model.published[block.id]
                assert (block.parent, block.tokens) == (parent, pack_tokens(tokens))
                if block.digest is not None:
                    assert pool.caches[block.group].get(block.digest) is block

    @property
    def held(self) -> list[int]:
        return [block_id for block_id, count in self.model.counts.items() if count]


def random_tokens(rng: random.Random) -> tuple[int, ...]:
    """Few different ones, so that prefixes are shared all the time."""
    length = rng.choice([1, 2, 7, 15, BLOCK_SIZE, BLOCK_SIZE])
    return tuple(rng.randrange(2) if i < 3 else i for i in range(length))


@pytest.mark.parametrize("seed", range(4))
def test_thirty_thousand_random_operations_match_the_model(seed):
    rng = random.Random(seed)
    pair = Pair(rng.choice([1, 5, 12]))
    for _ in range(30_000):
        kind, held, published = rng.randrange(7), pair.held, list(pair.model.published)
        parent = rng.choice([ROOT, b"other", b"third"])
        if kind <= 1:
            pair.allocate(rng.randint(0, min(3, pair.pool.num_free)), rng.randrange(NUM_GROUPS))
        elif kind == 2 and published:
            pair.touch(rng.choice(published))
        elif kind == 3 and held:
            pair.free(rng.sample(held, rng.randint(1, min(3, len(held)))))
        elif kind == 4 and held:
            pair.publish(rng.choice(held), parent, random_tokens(rng))
        elif kind == 5:
            pair.match(parent, random_tokens(rng)[:15])
        elif kind == 6 and published and rng.random() < 0.2:
            pair.retract(rng.choice(published))
        pair.compare()


class PoolMachine(RuleBasedStateMachine):
    """The same, but hypothesis chooses, and shrinks what fails to a few lines."""

    tokens = st.tuples(st.integers(0, 1), st.integers(0, 1)) | st.just((0, 1, *range(2, 16)))
    parents = st.sampled_from([ROOT, b"other"])

    @initialize(num_blocks=st.integers(1, 6))
    def begin(self, num_blocks):
        self.pair = Pair(num_blocks)

    @rule(data=st.data())
    def allocate(self, data):
        count = data.draw(st.integers(0, self.pair.pool.num_free))
        self.pair.allocate(count, data.draw(st.integers(0, NUM_GROUPS - 1)))

    @precondition(lambda self: self.pair.model.published)
    @rule(data=st.data())
    def touch(self, data):
        self.pair.touch(data.draw(st.sampled_from(sorted(self.pair.model.published))))

    @precondition(lambda self: self.pair.held)
    @rule(data=st.data())
    def free(self, data):
        self.pair.free(
            data.draw(st.lists(st.sampled_from(self.pair.held), min_size=1, unique=True))
        )

    @precondition(lambda self: self.pair.held)
    @rule(data=st.data(), parent=parents, tokens=tokens)
    def publish(self, data, parent, tokens):
        self.pair.publish(data.draw(st.sampled_from(self.pair.held)), parent, tokens)

    @precondition(lambda self: self.pair.model.published)
    @rule(data=st.data())
    def retract(self, data):
        self.pair.retract(data.draw(st.sampled_from(sorted(self.pair.model.published))))

    @rule(parent=parents, tokens=tokens)
    def match(self, parent, tokens):
        self.pair.match(parent, tokens[:15])

    @invariant()
    def agree(self):
        if hasattr(self, "pair"):
            self.pair.compare()


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(
    max_examples=60, stateful_step_count=40, derandomize=True, deadline=None
)
