"""Products with quantised weights and mixtures of experts, each against the same one in bf16."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from octavo.measure.device_limits import replayed_ms
from octavo_engine.backends.torch.cuda_loader import DeviceLinear
from octavo_engine.backends.torch.kernels import choose_kernels
from octavo_engine.backends.torch.operands import ExpertPair
from octavo_engine.backends.torch.packed import FP8, GroupedWeight, PackedExperts, ScaledWeight
from octavo_engine.backends.torch.repack import by_groups
from octavo_engine.models.config import ModelConfig
from octavo_engine.ops import ExpertsSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from benchmarks.gpu.measure import Ceilings
    from octavo_engine.backends.torch.kernels import Kernels
    from octavo_engine.config import KernelChoice

# The largest layer of an 8B model, gate and up; and the experts of Mixtral 8x7B and Qwen3-30B-A3B.
OUTPUTS, INPUTS = 28672, 4096
MIXTURES = {"mixtral": (8, 2, 4096, 14336), "qwen3_30b": (128, 8, 2048, 768)}
ROWS = (1, 4, 16, 64, 256, 2048)
# What is multiplied in turn, so that no product finds its weights in the cache.
ROTATED_BYTES = 256 << 20


def random_weight(
    kind: str, num_outputs: int, num_inputs: int, device: torch.device
) -> Tensor | GroupedWeight | ScaledWeight:
    """Numbers of any size will do; zeros would be faster than real ones."""
    shape = (num_outputs, num_inputs)
    if kind == "bf16":
        values = torch.randn(shape, dtype=torch.bfloat16, device=device)
        return values.mul_(num_inputs**-0.5)
    if kind in ("int8", "fp8_rows", "fp8_blocks"):
        values = torch.randint(-127, 128, shape, dtype=torch.int8, device=device)
        block = min(128, num_inputs) if kind == "fp8_blocks" else num_inputs
        scales = torch.rand((num_outputs, num_inputs // block), device=device) / 127
        return ScaledWeight(values if kind == "int8" else (values / 32).to(FP8), scales, block)
    bits, group = (8, 32) if kind == "int8_weight" else (4, 32 if kind == "int4_by_32" else 128)
    packed_shape = (num_outputs, num_inputs * bits // 8)
    packed = torch.randint(-128, 128, packed_shape, dtype=torch.int8, device=device)
    groups = (num_outputs, num_inputs // group)
    scales = by_groups(torch.rand(groups, device=device).half() / 100)
    minima = None if kind in ("int4_symmetric", "int8_weight") else scales * -7
    return GroupedWeight(packed, scales, minima, bits, 32 if group == 32 else 64)


def packed_experts(
    kind: str, num_experts: int, num_outputs: int, num_inputs: int, device: torch.device
) -> PackedExperts:
    made = random_weight(kind, num_experts * num_outputs, num_inputs, device)
    assert not isinstance(made, torch.Tensor)
    return PackedExperts(made, num_experts)


# Names of figures and the form of the experts' weights.
EXPERT_KINDS = {"int4": "int4_by_32", "fp8": "fp8_blocks"}
KINDS = (
    "bf16", "int4", "int4_symmetric", "int4_by_32", "int8_weight", "int8", "fp8_rows", "fp8_blocks",
)  # fmt: skip


def quantized(
    best: Ceilings,
    *,
    device: torch.device,
    shape: tuple[int, int] = (OUTPUTS, INPUTS),
    rows: tuple[int, ...] = ROWS,
    kernels: KernelChoice = "triton",
    timer: Callable[[Sequence[Callable[[], object]]], float] = replayed_ms,
    rotated_bytes: int = ROTATED_BYTES,
) -> dict[str, Any]:
    """Milliseconds of one product; for one row the share of bandwidth, for many that of peak."""
    chosen = _kernels(device, kernels)
    found: dict[str, Any] = {}
    for kind in KINDS:
        if kind.startswith("fp8") and "fp8" not in chosen.formats:
            continue
        layers = [DeviceLinear(random_weight(kind, *shape, device))]
        num_bytes = layers[0].weight.nbytes
        while len(layers) * num_bytes < rotated_bytes:
            layers.append(DeviceLinear(random_weight(kind, *shape, device)))
        for num_rows in rows:
            x = torch.randn((num_rows, shape[1]), dtype=torch.bfloat16, device=device)
            ms = timer([functools.partial(chosen.linear, x, layer) for layer in layers])
            found[f"{kind}_{num_rows}_ms"] = ms
            if num_rows == 1:
                share = num_bytes / (ms * 1e-3) / best.bytes_per_s
                found[f"{kind}_1_bandwidth_share"] = share
            elif num_rows == max(rows):
                flops = 2 * num_rows * shape[0] * shape[1]
                found[f"{kind}_{num_rows}_bf16_peak_share"] = flops / (ms * 1e-3) / best.flops_per_s
    return found


def mixtures(
    best: Ceilings,
    *,
    device: torch.device,
    shapes: dict[str, tuple[int, int, int, int]] | None = None,
    rows: tuple[int, ...] = ROWS,
    kernels: KernelChoice = "auto",
    timer: Callable[[Sequence[Callable[[], object]]], float] = replayed_ms,
) -> dict[str, Any]:
    """Milliseconds of one layer's experts, the routing included."""
    chosen = _kernels(device, kernels)
    found: dict[str, Any] = {}
    for name, (num_experts, top_k, columns, width) in (shapes or MIXTURES).items():
        spec = ExpertsSpec(top_k, renormalise=True, activation="silu")
        wide = random_weight("bf16", num_experts * 2 * width, columns, device)
        narrow = random_weight("bf16", num_experts * columns, width, device)
        assert isinstance(wide, torch.Tensor) and isinstance(narrow, torch.Tensor)
        gate_up = wide.view(num_experts, 2 * width, columns)
        down = narrow.view(num_experts, columns, width)
        weights: dict[str, ExpertPair] = {
            f"{name}_{label}": ExpertPair(
                packed_experts(kind, num_experts, 2 * width, columns, device),
                packed_experts(kind, num_experts, columns, width, device),
            )
            for label, kind in EXPERT_KINDS.items()
            if label != "fp8" or "fp8" in chosen.formats
        }
        weights[name] = ExpertPair(gate_up, down)
        for num_rows in rows:
            x = torch.randn((num_rows, columns), dtype=torch.bfloat16, device=device)
            scores = torch.randn((num_rows, num_experts), device=device)
            for label, layers in weights.items():
                ms = timer([functools.partial(chosen.experts, x, scores, layers, spec)])
                found[f"{label}_{num_rows}_ms"] = ms
        flops = 2 * max(rows) * top_k * 3 * columns * width
        found[f"{name}_{max(rows)}_peak_share"] = flops / (ms * 1e-3) / best.flops_per_s
    return found


def _kernels(device: torch.device, choice: KernelChoice) -> Kernels:
    from benchmarks.gpu.random_model import LLAMA_8B

    shape = ModelConfig.from_hf(LLAMA_8B)
    return choose_kernels(device, torch.bfloat16, shape, choice=choice)
