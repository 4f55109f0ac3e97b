"""How a matrix is held in memory: as numbers, or as 8- or 4-bit integers. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Set as AbstractSet

    from octavo_engine.backends.native.graph import Dtype
    from octavo_engine.config import Quantization

Packing: TypeAlias = Literal["f32", "bf16", "q8", "q4"]

# Stored types whose integers and scales a packing holds as they are.
_AS_STORED: dict[Packing, frozenset[str]] = {
    "q8": frozenset(("Q8_0",)),
    "q4": frozenset(("Q4_0", "Q4_1")),
}


def choose_packing(
    stored_types: AbstractSet[str],
    dtype: Dtype,
    quantization: Quantization,
    *,
    is_vocabulary: bool,
) -> Packing:
    """The packing of a matrix whose parts are stored as these types.

    `is_vocabulary` says that its rows are tokens, as the embedding's and the head's; those of a
    router, which are experts, count too.
    """
    match quantization:
        case "none":
            return dtype
        case "int8":
            return "q8"
        case "int4":
            # Each row is one token's only chance to be told from the others, and the largest
            # matrix of a small model: 8 bits here cost little and keep the answers.
            return "q8" if is_vocabulary else "q4"
        case "auto":
            if dtype == "f32":
                return "f32"  # asked for by name: the file's numbers, computed without rounding
            for packing, as_stored in _AS_STORED.items():
                if stored_types <= as_stored:
                    return packing
            return dtype
