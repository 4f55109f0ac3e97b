"""How a KV block is named and held outside the pool: bytes that no tier looks into.

    full block    digest of its tokens and all before them | group of layers
    tail          digest of the block before it | group | its tokens, fewer than a block's

A *tail* is a partly filled block. Only engines that send each other blocks know such names: a tier
that keeps blocks has full ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Page: TypeAlias = NDArray[np.uint8]  # all bytes of one block; never changed once it is one

BlockName: TypeAlias = bytes
OnChange: TypeAlias = Callable[[BlockName, bool], None]  # a block came to a store, or left it
NAME_BYTES = 17  # of a full block; those of tails are longer


def block_name(digest: bytes, group: int) -> BlockName:
    """A block holds tokens of one group of layers, so the digest of its tokens is not enough."""
    return digest + bytes((group,))


def split_name(name: BlockName) -> tuple[bytes, int]:
    """The digest and the group of layers."""
    return name[:-1], name[-1]


def tail_name(parent: bytes, group: int, tokens: bytes) -> BlockName:
    """`parent` is the digest of the block before it, `tokens` are packed."""
    return parent + bytes((group,)) + tokens


def is_tail(name: BlockName) -> bool:
    return len(name) > NAME_BYTES


def split_tail(name: BlockName) -> tuple[bytes, int, bytes]:
    """The digest of the block before it, the group of layers and the packed tokens."""
    return name[: NAME_BYTES - 1], name[NAME_BYTES - 1], name[NAME_BYTES:]
