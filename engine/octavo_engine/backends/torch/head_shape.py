"""The attention heads of a model, as far as kernels need to know them."""

from __future__ import annotations

from typing import NamedTuple, Protocol


class HeadShape(Protocol):
    """What the kernels' tiles are cut by; a ModelConfig has it."""

    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...


class OwnShape(NamedTuple):
    """The heads of one of several ranks."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
