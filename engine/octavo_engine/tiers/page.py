"""How a KV block is named and held outside the pool: bytes that no tier looks into."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Page: TypeAlias = NDArray[np.uint8]  # all bytes of one block; never changed once it is one

BlockName: TypeAlias = bytes
OnChange: TypeAlias = Callable[[BlockName, bool], None]  # a block came to a store, or left it
NAME_BYTES = 17


def block_name(digest: bytes, group: int) -> BlockName:
    """A block holds tokens of one group of layers, so the digest of its tokens is not enough."""
    return digest + bytes((group,))


def split_name(name: BlockName) -> tuple[bytes, int]:
    """The digest and the group of layers."""
    return name[:-1], name[-1]
