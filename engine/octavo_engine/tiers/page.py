"""How a KV block is named and held outside the pool: bytes that no tier looks into.

    full block    digest of its tokens and all before them | group of layers
    state         the same digest | STATE_GROUP
    tail          digest of the block before it | group | its tokens, fewer than a block's

A *state* is what all layers with recurrent states remember behind a full block. A *tail* is a
partly filled block. Only engines that send each other blocks know such names: a tier that keeps
blocks has full ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from octavo_engine.caches import STATE_GROUP

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy as np
    from numpy.typing import NDArray

    Page: TypeAlias = NDArray[np.uint8]  # all bytes of one name; never changed once it is one

BlockName: TypeAlias = bytes
OnChange: TypeAlias = Callable[[BlockName, bool], None]  # a block came to a store, or left it
NAME_BYTES = 17  # of a full block; those of tails are longer


def block_name(digest: bytes, group: int) -> BlockName:
    """A block holds tokens of one group of layers, so the digest of its tokens is not enough."""
    return digest + bytes((group,))


def split_name(name: BlockName) -> tuple[bytes, int]:
    """The digest and the group of layers."""
    return name[:-1], name[-1]


def is_state(name: BlockName) -> bool:
    return name[NAME_BYTES - 1] == STATE_GROUP


class PageSizes(NamedTuple):
    """Bytes of the pages of an engine, by what they hold."""

    block: int  # 0 where no layer lies in pages: such blocks are names, and never copied
    state: int = 0

    def of(self, name: BlockName) -> int:
        return self.state if is_state(name) else self.block

    def sum(self, names: Iterable[BlockName]) -> int:
        return sum(map(self.of, names))

    def blocks_in(self, num_bytes: int) -> int:
        """How many blocks are about so many bytes; one at least."""
        return max(1, num_bytes // max(1, self.block))


def tail_name(parent: bytes, group: int, tokens: bytes) -> BlockName:
    """`parent` is the digest of the block before it, `tokens` are packed."""
    return parent + bytes((group,)) + tokens


def is_tail(name: BlockName) -> bool:
    return len(name) > NAME_BYTES


def split_tail(name: BlockName) -> tuple[bytes, int, bytes]:
    """The digest of the block before it, the group of layers and the packed tokens."""
    return name[: NAME_BYTES - 1], name[NAME_BYTES - 1], name[NAME_BYTES:]
