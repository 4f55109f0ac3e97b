"""How a matrix is held in memory: as numbers, or as integers in one of many forms. Pure."""

from __future__ import annotations

from itertools import accumulate, groupby
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Sequence

    from octavo_engine.backends.native.graph import Dtype
    from octavo_engine.config import Quantization

Packing: TypeAlias = Literal[
    "f32", "bf16", "q8", "q4", "q4_0", "q5_0", "q5_1", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k",
    "iq4_nl", "iq4_xs", "mxfp4", "nvfp4",
]  # fmt: skip

# The packing that a stored type is computed in unless another is requested. It holds the type's
# integers and scales as they are, but 8-bit floats become integers: by groups of 32 their rounding
# is small beside the floats' own, while 16 bits would double memory and time.
_AS_STORED: dict[str, Packing] = {
    "Q8_0": "q8", "Q4_0": "q4_0", "Q4_1": "q4", "Q5_0": "q5_0", "Q5_1": "q5_1",
    "Q2_K": "q2_k", "Q3_K": "q3_k", "Q4_K": "q4_k", "Q5_K": "q5_k", "Q6_K": "q6_k",
    "IQ4_NL": "iq4_nl", "IQ4_XS": "iq4_xs", "MXFP4": "mxfp4", "NVFP4": "nvfp4",
    "F8_E4M3": "q8",
}  # fmt: skip
_WIDER_THAN_4_BITS = frozenset(("Q8_0", "Q5_0", "Q5_1", "Q5_K", "Q6_K", "F8_E4M3"))

PANEL_ROWS = 16
MAX_RUNS = 4  # of panels that are packed alike


def choose_packings(
    stored_types: Sequence[str],
    sizes: Sequence[int],
    dtype: Dtype,
    quantization: Quantization,
    *,
    is_vocabulary: bool,
) -> list[Packing]:
    """The packing of each of a matrix's parts, which are stored as these types, of so many rows.

    `is_vocabulary` says that its rows are tokens, as the embedding's and the head's; those of a
    router, which are experts, count too.
    """
    match quantization:
        case "none":
            return [dtype] * len(sizes)
        case "int8":
            return ["q8"] * len(sizes)
        case "int4":
            # Each row is one token's only chance to differ from the others, and the largest
            # matrix of a small model: 8 bits here cost little and keep the answers.
            default: Packing = "q8" if is_vocabulary else "q4"
            kept = [
                default if kind in _WIDER_THAN_4_BITS else _AS_STORED.get(kind, default)
                for kind in stored_types
            ]
            return kept if _fits(kept, sizes) else [default] * len(sizes)
        case "auto":
            as_stored = [_AS_STORED.get(kind, dtype) for kind in stored_types]
            # Requested by name, f32 means the file's numbers, computed without rounding.
            if dtype == "f32" or not _fits(as_stored, sizes):
                return [dtype] * len(sizes)
            return as_stored


def _fits(packings: Sequence[Packing], sizes: Sequence[int]) -> bool:
    """Whether one matrix can be packed so: different forms are integers, and begin with a panel."""
    runs = [packing for packing, _ in groupby(packings)]
    if len(runs) == 1:
        return True
    if len(runs) > MAX_RUNS or "bf16" in runs:
        return False
    starts = list(accumulate(sizes, initial=0))
    changes = [i for i in range(1, len(packings)) if packings[i] != packings[i - 1]]
    return all(starts[i] % PANEL_ROWS == 0 for i in changes)
