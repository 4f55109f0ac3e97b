"""What brings queries into latent space and sums back out of it, as checkpoints hold it: one
matrix, or two of which the first lies as it is used (newer GGUF files)."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from octavo_engine.backends.dequantize import to_float32

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from octavo_engine.backends.ledger import WeightLedger


class LatentHeads(NamedTuple):
    """In numbers, whatever they are stored in."""

    key_up: NDArray[np.float32]  # [heads, rank, nope_dim]
    value_up: NDArray[np.float32]  # [heads, value_dim, rank]


def latent_names(ledger: WeightLedger, name: str) -> tuple[str, ...]:
    """Of the tensors that hold `name`, which ends in kv_b_proj."""
    split = tuple(f"{name.removesuffix('kv_b_proj')}{part}_b_proj.weight" for part in "kv")
    return split if any(ledger.has(part) for part in split) else (f"{name}.weight",)


def take_latent_heads(
    ledger: WeightLedger, name: str, num_heads: int, nope_dim: int, value_dim: int, rank: int
) -> LatentHeads | None:
    """None if a tensor is missing, which `finish` will report."""
    names = latent_names(ledger, name)
    if len(names) == 1:
        stored = ledger.take(names[0], (num_heads * (nope_dim + value_dim), rank))
        if stored is None:
            return None
        heads = to_float32(stored).reshape(num_heads, nope_dim + value_dim, rank)
        ledger.account(stored)
        return LatentHeads(heads[:, :nope_dim].swapaxes(1, 2), heads[:, nope_dim:])
    keys = ledger.take(names[0], (num_heads, rank, nope_dim))
    values = ledger.take(names[1], (num_heads, value_dim, rank))
    if keys is None or values is None:
        return None
    result = LatentHeads(to_float32(keys), to_float32(values))
    ledger.account(keys)
    ledger.account(values)
    return result
