"""Attention of prompts by FlashInfer, where it is installed and requested.

It plans on the host, once a step for each kind of layer, which a captured graph cannot hold: steps
of single tokens stay with Triton's kernel.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from octavo_engine.config import BLOCK_SIZE
from octavo_engine.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from octavo_engine.backends.backend import BackendStep
    from octavo_engine.backends.torch.device_step import DeviceStep
    from octavo_engine.backends.torch.head_shape import HeadShape
    from octavo_engine.backends.torch.operands import LayerKV
    from octavo_engine.config import AttentionBackend
    from octavo_engine.ops import AttentionSpec

WORKSPACE_BYTES = 128 << 20
HEAD_DIMS = (64, 128, 256)


class AttentionChoice(NamedTuple):
    name: str
    reason: str


def choose_attention(
    requested: AttentionBackend, dtype: torch.dtype, shape: HeadShape, *, batch_invariant: bool
) -> AttentionChoice:
    """Who attends for prompts. Raises ConfigError if what was requested cannot be."""
    is_installed = importlib.util.find_spec("flashinfer") is not None
    if requested == "auto":
        # NOTE: not yet seen to work on a device; until then only who asks for it gets it.
        offer = "; --attention-backend flashinfer is there too" if is_installed else ""
        return AttentionChoice("triton", f"for prompts and single tokens alike{offer}")
    if requested == "triton":
        return AttentionChoice("triton", "requested")
    problem = None
    if not is_installed:
        problem = "the package flashinfer: pip install flashinfer-python"
    elif batch_invariant:
        problem = "results that may depend on the batch: leave out --batch-invariant"
    elif dtype not in (torch.float16, torch.bfloat16):
        problem = f"a --dtype of 16 bits, not {str(dtype).removeprefix('torch.')}"
    elif shape.head_dim not in HEAD_DIMS:
        sizes = ", ".join(map(str, HEAD_DIMS))
        problem = f"heads of {sizes} columns; this model's have {shape.head_dim}"
    if problem is not None:
        raise ConfigError(f"--attention-backend flashinfer needs {problem}")
    return AttentionChoice("flashinfer", "requested, for prompts; single tokens stay with triton")


class _Kind(NamedTuple):
    """What a plan is made for."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None
    soft_cap: float | None


class FlashInferAttention:
    """Plans and runs; `module` is the package, or what answers like it."""

    def __init__(self, device: torch.device, module: Any = None) -> None:  # it has no types
        self._module = importlib.import_module("flashinfer") if module is None else module
        self._workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._wrappers: dict[_Kind, Any] = {}
        self._planned: set[_Kind] = set()
        self._step: BackendStep | None = None  # that the plans are for

    def attend(self, q: Tensor, kv: LayerKV, step: DeviceStep, spec: AttentionSpec) -> Tensor:
        """As `Kernels.attend`, for a step whose arrays are on the host too."""
        assert step.host is not None, "plans are made on the host"
        kind = _Kind(
            spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.scale, spec.window, spec.soft_cap
        )
        if step.host is not self._step:
            self._step = step.host
            self._planned.clear()
        if kind not in self._planned:
            self._plan(kind, step.host, q.dtype)
            self._planned.add(kind)
        heads = q.view(len(q), spec.num_heads, spec.head_dim)
        out: Tensor = self._wrappers[kind].run(heads, (kv.k, kv.v))
        return out.reshape(len(q), -1)

    def _plan(self, kind: _Kind, step: BackendStep, dtype: torch.dtype) -> None:
        wrapper = self._wrappers.get(kind)
        if wrapper is None:
            wrapper = self._module.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "NHD")
            self._wrappers[kind] = wrapper
        counts = -(-step.seq_lens // BLOCK_SIZE)
        pages = [step.block_tables[0, row, :n] for row, n in zip(step.rows, counts, strict=True)]
        wrapper.plan(
            torch.from_numpy(step.seq_starts),
            torch.from_numpy(np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)),
            torch.from_numpy(np.concatenate(pages).astype(np.int32)).to(self._workspace.device),
            torch.from_numpy(((step.seq_lens - 1) % BLOCK_SIZE + 1).astype(np.int32)),
            kind.num_heads,
            kind.num_kv_heads,
            kind.head_dim,
            BLOCK_SIZE,
            causal=True,
            sm_scale=kind.scale,
            window_left=-1 if kind.window is None else kind.window - 1,
            logits_soft_cap=kind.soft_cap,
            q_data_type=dtype,
            kv_data_type=dtype,
        )
