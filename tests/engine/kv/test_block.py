"""The queue of free blocks: order in, order out, and removal from anywhere."""

from __future__ import annotations

import random

import pytest

from octavo_engine.kv.block import Block, FreeBlockQueue


def make_queue(num_blocks: int) -> tuple[FreeBlockQueue, list[Block]]:
    queue, blocks = FreeBlockQueue(), [Block(i) for i in range(num_blocks)]
    for block in blocks:
        queue.append(block)
    return queue, blocks


def test_first_in_first_out():
    queue, _ = make_queue(3)
    assert [queue.pop_left().id for _ in range(3)] == [0, 1, 2]
    assert len(queue) == 0


def test_the_front_can_be_jumped():
    queue, _ = make_queue(2)
    queue.append_left(Block(9))
    assert [block.id for block in queue] == [9, 0, 1]


@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_block_is_removed_from_anywhere_and_can_come_back(index):
    queue, blocks = make_queue(3)
    queue.remove(blocks[index])
    assert [block.id for block in queue] == [i for i in range(3) if i != index]
    queue.append(blocks[index])
    assert [block.id for block in queue] == [*(i for i in range(3) if i != index), index]


def test_misuse_is_caught():
    queue, blocks = make_queue(1)
    with pytest.raises(AssertionError, match="already"):
        queue.append(blocks[0])
    queue.pop_left()
    with pytest.raises(AssertionError, match="no free block"):
        queue.pop_left()
    with pytest.raises(AssertionError, match="not in the queue"):
        queue.remove(blocks[0])


def test_it_behaves_as_a_list_does():
    rng = random.Random(1)
    queue, blocks = make_queue(8)
    model = list(blocks)
    for _ in range(5000):
        out = [block for block in blocks if block not in model]
        kind = rng.randrange(4)
        if kind == 0 and model:
            assert queue.pop_left() is model.pop(0)
        elif kind == 1 and model:
            model.remove(block := rng.choice(model))
            queue.remove(block)
        elif kind == 2 and out:
            model.append(block := rng.choice(out))
            queue.append(block)
        elif out:
            model.insert(0, block := rng.choice(out))
            queue.append_left(block)
        assert list(queue) == model
        assert len(queue) == len(model)
