"""Weights that stay quantised on the device: their values, and what they mean in plain torch.

A `GroupedWeight` holds integers of 4 or 8 bits; its input stays in 16 bits. A `ScaledWeight` holds
int8 or FP8 that meet inputs of their own kind, rounded token by token.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

import torch

if TYPE_CHECKING:
    from torch import Tensor

Format = Literal["grouped", "int8", "fp8"]
ALL_FORMATS: frozenset[Format] = frozenset(("grouped", "int8", "fp8"))

FP8 = torch.float8_e4m3fn
LARGEST = {torch.int8: 127.0, FP8: 448.0}


@dataclass(frozen=True, slots=True, eq=False)
class GroupedWeight:
    """value = integer * scale + minimum, scale and minimum shared by `group_size` columns.

    Four bits are stored in tiles of 2 * half columns: byte j has column j in its low bits and
    column half + j in its high ones, so that each half is a matrix as it stands. Without minima the
    integers are signed: 4 bits less 8.
    """

    packed: Tensor  # int8 [out, in * bits / 8]
    scales: Tensor  # float16 [out, groups], one group's side by side
    minima: Tensor | None  # the same
    bits: int
    half: int
    order: Tensor | None = None  # the input's column that meets column i

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.packed), self.packed.shape[1] * 8 // self.bits

    @property
    def group_size(self) -> int:
        return self.shape[1] // self.scales.shape[1]

    @property
    def nbytes(self) -> int:
        minima = 0 if self.minima is None else self.minima.nbytes
        return self.packed.nbytes + self.scales.nbytes + minima

    def arranged(self, x: Tensor) -> Tensor:
        """x [T, in] with its columns as the weight's lie."""
        return x if self.order is None else x[:, self.order]


@dataclass(frozen=True, slots=True, eq=False)
class ScaledWeight:
    """value = stored * scale. One scale for each row and block of columns."""

    values: Tensor  # int8 or float8_e4m3fn [out, in]
    scales: Tensor  # float32 [out, column blocks]
    block: int  # columns that share a scale, here and in the rounded input

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.values), self.values.shape[1]

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.scales.nbytes


@dataclass(frozen=True, slots=True, eq=False)
class PackedExperts:
    """The weights of a mixture's experts as one, the rows of each below those before."""

    weight: GroupedWeight | ScaledWeight
    num_experts: int

    def __len__(self) -> int:
        return self.num_experts

    @property
    def shape(self) -> tuple[int, int, int]:
        rows, columns = self.weight.shape
        return self.num_experts, rows // self.num_experts, columns

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes

    def expert(self, index: int) -> GroupedWeight | ScaledWeight:
        whole, (_, count, _) = self.weight, self.shape
        own = slice(index * count, (index + 1) * count)
        if isinstance(whole, ScaledWeight):
            return replace(whole, values=whole.values[own], scales=whole.scales[own])
        return replace(
            whole,
            packed=whole.packed[own],
            scales=whole.scales[own],
            minima=None if whole.minima is None else whole.minima[own],
        )


@dataclass(frozen=True, slots=True, eq=False)
class BiasedExperts:
    """Experts whose products gain a bias."""

    weights: Tensor | PackedExperts  # or [experts, out, in]
    bias: Tensor  # [experts, out]

    def __len__(self) -> int:
        return len(self.bias)

    @property
    def shape(self) -> tuple[int, int, int]:
        num_experts, rows, columns = self.weights.shape
        return num_experts, rows, columns

    @property
    def nbytes(self) -> int:
        return self.weights.nbytes + self.bias.nbytes


DeviceExperts: TypeAlias = "Tensor | PackedExperts | BiasedExperts"  # or [experts, out, in]


def expert_product(x: Tensor, experts: DeviceExperts, index: int) -> Tensor:
    """x · the expert's weightᵀ + its bias, in x's dtype."""
    if isinstance(experts, BiasedExperts):
        y = expert_product(x, experts.weights, index)
        return (y.float() + experts.bias[index].float()).to(x.dtype)
    if isinstance(experts, PackedExperts):
        return packed_product(x, experts.expert(index)).to(x.dtype)
    return torch.nn.functional.linear(x, experts[index])


def packed_product(x: Tensor, weight: GroupedWeight | ScaledWeight) -> Tensor:
    """x · weightᵀ, in float32."""
    if isinstance(weight, GroupedWeight):
        return grouped_product(x, weight)
    return scaled_product(x, weight)


class RoundedRows(NamedTuple):
    values: Tensor  # [T, columns]
    scales: Tensor  # float32 [T, column blocks]


def grouped_product(x: Tensor, weight: GroupedWeight) -> Tensor:
    """x · weightᵀ, in float32."""
    return weight.arranged(x).float() @ dequantize(weight).t()


def dequantize(weight: GroupedWeight) -> Tensor:
    """The weight's values in float32, columns as they lie."""
    rows, columns = weight.shape
    if weight.bits == 4:
        words = weight.packed.view(torch.uint8).view(rows, -1, 1, weight.half)
        q = torch.cat([words & 15, words >> 4], dim=2).view(rows, columns).float()
        q = q - 8 if weight.minima is None else q
    else:
        q = weight.packed.float()
    grouped = q.view(rows, -1, weight.group_size) * weight.scales.float()[..., None]
    if weight.minima is not None:
        grouped = grouped + weight.minima.float()[..., None]
    return grouped.view(rows, columns)


def round_rows(x: Tensor, dtype: torch.dtype, block: int) -> RoundedRows:
    """Each row's blocks of columns as `dtype`, the largest value of a block as its largest."""
    num_rows, columns = x.shape
    num_blocks = -(-columns // block)
    padded = torch.nn.functional.pad(x.float(), (0, num_blocks * block - columns))
    blocks = padded.view(num_rows, num_blocks, block)
    # A device divides by a number of the host's by multiplying with its inverse: another rounding.
    scales = blocks.abs().amax(-1) / blocks.new_full((), LARGEST[dtype])
    scales = torch.where(scales > 0, scales, 1.0)
    scaled = (blocks / scales[..., None]).flatten(1)[:, :columns]
    values = scaled.round().to(dtype) if dtype == torch.int8 else scaled.to(dtype)
    return RoundedRows(values, scales)


def scaled_product(x: Tensor, weight: ScaledWeight) -> Tensor:
    """x, rounded, · weightᵀ, in float32."""
    rounded = round_rows(x, weight.values.dtype, weight.block)
    return _spread(*rounded, weight.block) @ _spread(weight.values, weight.scales, weight.block).t()


def _spread(values: Tensor, scales: Tensor, block: int) -> Tensor:
    columns = values.shape[1]
    return values.float() * scales.repeat_interleave(block, dim=1)[:, :columns]
