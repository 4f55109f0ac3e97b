"""A model's stored tensors by Hugging Face name, mapped: safetensors, GGUF or dummy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy as np
    from numpy.typing import NDArray


class Scales(NamedTuple):
    """What blocks of a matrix are multiplied by; the last ones may be cut off."""

    values: NDArray[np.float32]  # [block rows, block columns]
    rows: int  # of the matrix in a block
    columns: int


@dataclass(frozen=True, slots=True, eq=False)
class StoredTensor:
    """A tensor as it lies in the file: nothing is copied until a backend packs it."""

    name: str  # Hugging Face name, e.g. model.layers.0.self_attn.q_proj.weight
    dtype: str  # F32, F16, BF16, F8_E4M3, NVFP4, or one of gguf_types.READABLE
    shape: tuple[int, ...]  # [out, in] for a matrix
    data: NDArray[np.uint8]  # the raw bytes, a view of the mapped file
    row_map: NDArray[np.int32] | None = (
        None  # stored row that is row i, where the file permutes rows
    )
    offset: float = 0.0  # to add to every value (GGUF stores Gemma's norms as 1 + w: offset -1)
    # Stored column that is column i, where the file sorts columns by their group.
    column_map: NDArray[np.int32] | None = None
    scales: Scales | None = None  # of F8_E4M3
    # What the model was made to have its input rounded to in a product, each token by itself.
    input_dtype: Literal["int8", "fp8"] | None = None


class Checkpoint(Protocol):
    """Raises ModelError that names the file and tensor."""

    def names(self) -> Iterable[str]: ...

    def read(self, name: str, shape: tuple[int, ...]) -> StoredTensor:
        """The tensor, whose shape must be the one requested."""

    @property
    def total_bytes(self) -> int:
        """Stored bytes of all tensors, for progress."""
