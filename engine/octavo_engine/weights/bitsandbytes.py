"""The 4-bit matrices of bitsandbytes (nf4, fp4): widened when they are read."""

from __future__ import annotations

import json
import logging
import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from octavo_engine.weights.bfloat16 import to_bfloat16
from octavo_engine.weights.checkpoint import StoredTensor

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from octavo_engine.weights.safetensors import SafetensorsCheckpoint

logger = logging.getLogger(__name__)

FOUR_BIT_TYPES = ("nf4", "fp4")
FOUR_BIT_PARTS = (
    ".weight.absmax", ".weight.quant_map", ".weight.nested_absmax", ".weight.nested_quant_map",
    *(f".weight.quant_state.bitsandbytes__{kind}" for kind in FOUR_BIT_TYPES),
)  # fmt: skip
_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_LEVELS, _NESTED_LEVELS = 16, 256
_MAX_BLOCK = 2**20


class _State(NamedTuple):
    """What a matrix's quant_state says."""

    dtype: str
    shape: tuple[int, ...]
    block: int
    nested_block: int
    nested_offset: float


class BitsAndBytes4:
    """Each value is one of 16 levels times its block's largest magnitude, which may itself be one
    of 256 levels. No packed kernel has these levels, so matrices get the dtype they came from."""

    suffix = ".weight"
    stored_types: tuple[str, ...] = ("F32", "F16", "BF16")

    def __init__(self, quant_type: str) -> None:
        self.scale = f".weight.quant_state.bitsandbytes__{quant_type}"

    def read(
        self, checkpoint: SafetensorsCheckpoint, name: str, module: str, shape: tuple[int, ...]
    ) -> StoredTensor:
        state = self._state(checkpoint, module)
        if state.shape != tuple(shape):
            raise checkpoint.error(
                name, f"has shape {list(state.shape)}; the model's config asks for {list(shape)}"
            )
        packed = checkpoint.array(name, ("U8",), 2).reshape(-1)
        count = math.prod(shape)
        if len(packed) != -(-count // 2):
            raise checkpoint.error(name, f"has {len(packed)} bytes for {count} values of 4 bits")
        indices = np.stack([packed >> 4, packed & 15], axis=-1).reshape(-1)[:count]
        levels = _levels(checkpoint, f"{name}.quant_map", _LEVELS)
        factors = _factors(checkpoint, name, state, -(-count // state.block))
        values = levels[indices] * factors.repeat(state.block)[:count]
        return StoredTensor(name, state.dtype, tuple(shape), _as_bytes(values, state.dtype))

    def log_size(self, checkpoint: SafetensorsCheckpoint, modules: Iterable[str]) -> None:
        """A line with the memory that the widened matrices take."""
        states = [self._state(checkpoint, module) for module in modules]
        packed = sum(math.prod(state.shape) for state in states) // 2
        widened = sum(
            math.prod(state.shape) * (4 if state.dtype == "F32" else 2) for state in states
        )
        logger.info(
            "%d bitsandbytes matrices of 4 bits are widened: they take %.1f MiB in place of %.1f "
            "MiB; --quantization int4 keeps them in 4 bits, rounded again",
            len(states), widened / 2**20, packed / 2**20,
        )  # fmt: skip

    def _state(self, checkpoint: SafetensorsCheckpoint, module: str) -> _State:
        name = module + self.scale
        try:
            fields = json.loads(checkpoint.array(name, ("U8",), 1).tobytes())
            state = _parsed(fields)
        except (ValueError, RecursionError):
            state = None
        if state is None:
            raise checkpoint.error(name, "does not describe 4-bit values that can be read")
        return state


def _parsed(fields: Any) -> _State | None:
    match fields:
        case {
            "dtype": str(dtype),
            "shape": [int(rows), int(columns)],
            "blocksize": int(block),
        } if dtype in _DTYPES and rows >= 1 and columns >= 1 and 1 <= block <= _MAX_BLOCK:
            nested, offset = fields.get("nested_blocksize", 0), fields.get("nested_offset", 0.0)
            if not isinstance(nested, int) or not 0 <= nested <= _MAX_BLOCK:
                return None
            if not isinstance(offset, (int, float)) or not math.isfinite(offset):
                return None
            return _State(_DTYPES[dtype], (rows, columns), block, nested, float(offset))
    return None


def _levels(checkpoint: SafetensorsCheckpoint, name: str, count: int) -> NDArray[np.float32]:
    levels = checkpoint.numbers(name, 1)
    if len(levels) != count:
        raise checkpoint.error(name, f"has {len(levels)} levels; there must be {count}")
    return levels


def _factors(
    checkpoint: SafetensorsCheckpoint, name: str, state: _State, count: int
) -> NDArray[np.float32]:
    """The largest magnitude of each block."""
    absmax = f"{name}.absmax"
    if not state.nested_block:
        factors = checkpoint.numbers(absmax, 1)
    else:
        indices = checkpoint.array(absmax, ("U8",), 1)
        levels = _levels(checkpoint, f"{name}.nested_quant_map", _NESTED_LEVELS)
        scales = checkpoint.numbers(f"{name}.nested_absmax", 1)
        if len(scales) != -(-len(indices) // state.nested_block):
            raise checkpoint.error(
                f"{name}.nested_absmax", f"has {len(scales)} scales for {len(indices)} blocks"
            )
        whole = scales.repeat(state.nested_block)[: len(indices)]
        factors = levels[indices] * whole + np.float32(state.nested_offset)
    if len(factors) != count:
        raise checkpoint.error(absmax, f"has {len(factors)} blocks; there must be {count}")
    return factors


def _as_bytes(values: NDArray[np.float32], dtype: str) -> NDArray[np.uint8]:
    if dtype == "F16":
        return values.astype(np.float16).view(np.uint8)
    if dtype == "F32":
        return np.ascontiguousarray(values).view(np.uint8)
    return to_bfloat16(values).view(np.uint8)
