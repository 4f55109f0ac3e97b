"""Device memory: what is free, what a step needs beside weights and KV, what is left for KV."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from octavo_engine.backends.torch.cuda_loader import DeviceLinear
from octavo_engine.backends.torch.packed import GroupedWeight
from octavo_engine.errors import ConfigError
from octavo_engine.models.recurrent_config import (
    ConvConfig,
    DeltaConfig,
    MambaConfig,
    SelectiveConfig,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from octavo_engine.backends.backend import BackendLimits
    from octavo_engine.models.config import ExpertsConfig
    from octavo_engine.models.recurrent_config import RecurrentConfig

# cuBLAS' workspace, compiled kernels and the allocator's rounding.
SPARE_BYTES = 768 << 20
# For KV, of what is free after loading, where nothing else was requested: nobody shares a device as
# programs share a host's memory.
DEVICE_FRACTION = 0.9
DELTA_CHUNK = 16  # numbers that a token has of its chunk's inverse: `triton/chunked_delta.py`
GRAPH_BYTES = 8 << 20  # of the driver's, for the launches that one graph holds


class StepShape(Protocol):
    """The widths that a step's values have; a ModelConfig has them."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def experts(self) -> ExpertsConfig | None: ...
    @property
    def recurrent(self) -> RecurrentConfig | None: ...


class DeviceMemory(NamedTuple):
    free_bytes: int
    total_bytes: int


def device_memory(device: torch.device) -> DeviceMemory:
    """What the device itself says, so that other processes' memory counts as taken; what our own
    allocator holds without using it counts as free."""
    free, total = torch.cuda.mem_get_info(device)
    idle = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return DeviceMemory(free + idle, total)


def require(device: torch.device, kv_bytes: int) -> None:
    """Raises ConfigError if a KV cache of that size does not fit beside what is there already."""
    free = device_memory(device).free_bytes
    if kv_bytes + SPARE_BYTES > free:
        raise ConfigError(
            f"a KV cache of {kv_bytes / 2**30:.2f} GiB does not fit on the device, which has "
            f"{free / 2**30:.2f} GiB free; lower --kv-cache-memory-bytes or --memory-fraction"
        )


def require_adapters(device: torch.device, num_bytes: int, num_slots: int, max_rank: int) -> None:
    """Raises ConfigError if slots for adapters do not fit beside the weights."""
    free = device_memory(device).free_bytes
    if num_bytes + SPARE_BYTES > free:
        raise ConfigError(
            f"{num_slots} slots for adapters of rank {max_rank} take {num_bytes / 2**30:.2f} GiB, "
            f"and the device has {free / 2**30:.2f} GiB free beside the weights; lower --max-loras "
            "or --max-lora-rank"
        )


def step_bytes(shape: StepShape, limits: BackendLimits, itemsize: int) -> int:
    """The most that the largest step holds at once: one layer's values, and the logits."""
    layer = limits.max_tokens * _token_bytes(shape, itemsize)
    # The logits in float32, and as much again in keys and masses when a row has unusual parameters.
    logits = limits.max_logit_rows * shape.vocab_size * (4 + 4 + 8 + 8)
    return layer + logits


def expanded_bytes(made: Iterable[object], itemsize: int) -> int:
    """What the largest weight takes that is expanded for steps of many rows, and gone after. The
    head, whose logits are float32, and experts never are."""
    linears = (each for each in made if isinstance(each, DeviceLinear) and not each.is_head)
    grouped = (each.weight for each in linears if isinstance(each.weight, GroupedWeight))
    return max((math.prod(weight.shape) * itemsize for weight in grouped), default=0)


def gather_bytes(shape: StepShape, limits: BackendLimits, itemsize: int, num_ranks: int) -> int:
    """The most that ranks take to show each other their columns: all parts, and the whole."""
    heads = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    widest = max(heads, 2 * shape.intermediate_size, num_ranks * shape.hidden_size)
    logits = 4 * limits.max_logit_rows * shape.vocab_size
    return 2 * max(limits.max_tokens * widest * itemsize, logits)


def count_bytes(shape: StepShape, limits: BackendLimits) -> int:
    """What penalties know of the tokens of all rows."""
    return limits.max_seqs * shape.vocab_size * 4


def graph_bytes(
    shape: StepShape,
    limits: BackendLimits,
    itemsize: int,
    *,
    num_graphs: int,
    max_tokens: int,
    max_logits: int = 0,
) -> int:
    """What captured graphs take beside it: the values of the largest captured step, which all share
    and nobody else may use; the results they leave, of `max_logits` rows where drafts are verified;
    and what the driver keeps of each."""
    tokens = max(limits.max_seqs, min(max_tokens, limits.max_tokens))
    values = tokens * _token_bytes(shape, itemsize)
    logits = max(limits.max_seqs, max_logits) * shape.vocab_size * (4 + 4 + itemsize)
    return values + logits + num_graphs * GRAPH_BYTES


def _token_bytes(shape: StepShape, itemsize: int) -> int:
    """Of one layer, for one token."""
    attention = (shape.num_heads * 3 + shape.num_kv_heads * 2) * shape.head_dim * itemsize
    mlp = shape.intermediate_size * 3 * itemsize
    if shape.experts is not None:
        e = shape.experts
        mlp = max(mlp, e.top_k * (e.width * 3 * itemsize + shape.hidden_size * (itemsize + 4)))
    residual = shape.hidden_size * (3 * 4 + 2 * itemsize)
    mixer = 0 if shape.recurrent is None else mixer_columns(shape.recurrent, shape.hidden_size)
    return residual + max(attention, mlp) + mixer * itemsize


def mixer_columns(recurrent: RecurrentConfig, hidden_size: int) -> int:
    """What a layer with a recurrent state has of one token, until its result is there: what goes
    into the convolution and the scan, and comes out of them, and what passes the gate."""
    match recurrent:
        case ConvConfig():
            return 6 * hidden_size
        case MambaConfig():
            return 2 * recurrent.conv_width + 4 * recurrent.width + 2 * hidden_size
        case DeltaConfig():
            inverses = 2 * DELTA_CHUNK * recurrent.num_value_heads  # in float32
            return 2 * recurrent.conv_width + 4 * recurrent.width + inverses + 2 * hidden_size
        case SelectiveConfig():
            return 7 * recurrent.width + recurrent.dt_rank + 2 * recurrent.state_size


def kv_budget(free_bytes: int, needed_bytes: int, *, fraction: float) -> int:
    """A share of the free memory for KV, but never what a step needs. Raises ConfigError."""
    left = free_bytes - needed_bytes - SPARE_BYTES
    if left <= 0:
        raise ConfigError(
            f"{free_bytes / 2**30:.2f} GiB of device memory are free after loading, and the "
            f"largest step alone needs {(needed_bytes + SPARE_BYTES) / 2**30:.2f} GiB; lower "
            "--max-num-batched-tokens or --max-num-seqs, or free memory on the device"
        )
    return min(left, int(free_bytes * fraction))
