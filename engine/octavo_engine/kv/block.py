"""One KV block, and the queue of free blocks in the order in which they will be reused."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from octavo_engine.kv.media_names import MediaPart


class Block:
    """Sixteen token positions of KV memory: how many use it, and under which name it is cached.

    `is_retained`: it may not be evicted yet (`kv.retention`).
    `parent` and `tokens` are set while it is published in a prefix cache, that of `group`; `digest`
    too if it is full, and `media` if pictures are in it.
    """

    __slots__ = (
        "digest",
        "group",
        "id",
        "is_retained",
        "media",
        "next",
        "parent",
        "previous",
        "ref_count",
        "tokens",
    )

    def __init__(self, block_id: int) -> None:
        self.id = block_id
        self.ref_count = 0
        self.is_retained = False
        self.group = 0
        self.parent: bytes | None = None
        self.tokens = b""
        self.digest: bytes | None = None
        self.media: tuple[MediaPart, ...] = ()
        self.previous: Block | None = None  # both None when it is in no queue
        self.next: Block | None = None

    @property
    def is_published(self) -> bool:
        return self.parent is not None

    def __repr__(self) -> str:
        return f"Block({self.id}, ref={self.ref_count}, tokens={len(self.tokens) // 4})"


class FreeBlockQueue:
    """Free blocks as a doubly linked list through the blocks themselves.

    A free block may still hold cached tokens, and a prefix hit takes it back out of the *middle* of
    the queue; a deque would need a search for that, an ordered dict an allocation for every free.
    Here every operation is O(1) and allocates nothing. The front is reused first: blocks that hold
    nothing of worth are put there, cached ones go to the back, so that from front to back they are
    in LRU order.
    """

    def __init__(self) -> None:
        self._head, self._tail = Block(-1), Block(-1)  # sentinels: no operation has an edge case
        self._head.next, self._tail.previous = self._tail, self._head
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Block]:
        block = self._head.next
        while block is not self._tail:
            assert block is not None
            yield block
            block = block.next

    def append(self, block: Block) -> None:
        last = self._tail.previous
        assert last is not None
        self._link(last, block, self._tail)

    def append_left(self, block: Block) -> None:
        first = self._head.next
        assert first is not None
        self._link(self._head, block, first)

    def pop_left(self) -> Block:
        block = self._head.next
        assert block is not None
        assert block is not self._tail, "no free block"
        self.remove(block)
        return block

    def remove(self, block: Block) -> None:
        before, after = block.previous, block.next
        assert before is not None, "the block is not in the queue"
        assert after is not None
        before.next, after.previous = after, before
        block.previous = block.next = None
        self._size -= 1

    def _link(self, before: Block, block: Block, after: Block) -> None:
        assert block.next is None, "the block is in the queue already"
        before.next = after.previous = block
        block.previous, block.next = before, after
        self._size += 1
