"""Weights straight from the mapped file to the device, in the backend's dtype, or packed as stored
where the kernels take them so."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch
from torch.nn import functional

from octavo_engine.backends.adapters import AdapterSite, is_adaptable
from octavo_engine.backends.dequantize import to_float32
from octavo_engine.backends.latent_heads import take_latent_heads
from octavo_engine.backends.ledger import WeightLedger
from octavo_engine.backends.native.shard import pieces_of
from octavo_engine.backends.native.stored_form import rows_of
from octavo_engine.backends.torch import repack
from octavo_engine.backends.torch.packed import (
    FP8,
    BiasedExperts,
    GroupedWeight,
    PackedExperts,
    ScaledWeight,
    packed_product,
)
from octavo_engine.backends.torch.rank_group import CutTable, ranges_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray
    from torch import Tensor

    from octavo_engine.backends.torch.packed import DeviceExperts, Format
    from octavo_engine.backends.torch.rank_group import Cuts, RankGroup
    from octavo_engine.backends.torch.upload import Uploader
    from octavo_engine.ops import ExpertNames, ExpertSizes, Names, Sizes
    from octavo_engine.weights.checkpoint import Checkpoint, StoredTensor

Made = TypeVar("Made")

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True, eq=False)
class DeviceLinear:
    """A weight [out, in] with its bias. `is_head`: the result stays float32, as logits must."""

    weight: Tensor | GroupedWeight | ScaledWeight
    bias: Tensor | None = None
    is_head: bool = False
    site: int = -1  # of the adapters; -1: none may add to it
    cuts: Cuts | None = None  # which rank has which outputs; None: all are here

    def apply(self, x: Tensor) -> Tensor:
        """The product in torch alone."""
        if not isinstance(self.weight, torch.Tensor):
            y = packed_product(x, self.weight)
            y = y if self.bias is None else y + self.bias.float()
            return y if self.is_head else y.to(x.dtype)
        if not self.is_head or x.dtype == torch.float32:
            return functional.linear(x, self.weight, self.bias)
        # Two logits that differ must not be rounded into a tie.
        if x.is_cuda and _has_wide_product():
            y = torch.mm(x, self.weight.t(), out_dtype=torch.float32)
        elif x.is_cuda:
            y = functional.linear(x, self.weight).float()
        else:
            y = functional.linear(x.float(), self.weight.float())
        return y if self.bias is None else y + self.bias


@functools.cache
def _has_wide_product() -> bool:
    """Whether torch gives a product of 16-bit matrices in float32: since 2.8, on NVIDIA alone."""
    major, minor = torch.__version__.split(".")[:2]
    return (int(major), int(minor)) >= (2, 8) and torch.version.hip is None


class CudaLoader:
    """The Loader of a device. Nothing is held twice: a tensor's place is made, then filled."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        uploader: Uploader,
        dtype: torch.dtype,
        progress: Callable[[int, int], None] | None = None,
        *,
        formats: frozenset[Format] = frozenset(),
        ranks: RankGroup | None = None,
    ) -> None:
        """`formats` may stay packed; all else is expanded to `dtype`. With `ranks`, of each matrix
        this rank's rows only."""
        self._ranks = ranks
        self._ledger = WeightLedger(checkpoint, progress)
        self._uploader = uploader
        self._dtype = dtype
        # float32 is requested to compute with the file's numbers: no input is rounded then.
        rounding: frozenset[Format] = frozenset(("int8", "fp8"))
        self._formats = formats - rounding if dtype == torch.float32 else formats
        self.made: list[object] = []  # all that was handed out
        self.sites: list[AdapterSite] = []  # of the adapters

    def embedding(self, name: str, rows: int, columns: int) -> Tensor | CutTable:
        cuts = self._cuts(name, rows)
        table = self._noted(self._matrix([f"{name}.weight"], [rows], columns, cuts))
        return table if cuts is None else CutTable(table, cuts)

    def linear(
        self, names: Names, in_features: int, out_features: Sizes, *, bias: bool = False
    ) -> DeviceLinear:
        names = [names] if isinstance(names, str) else list(names)
        sizes = [out_features] if isinstance(out_features, int) else list(out_features)
        cuts = self._cuts(names[0], sum(sizes))
        weight = self._weight([f"{name}.weight" for name in names], sizes, in_features, cuts)
        total = self._matrix([f"{name}.bias" for name in names], sizes) if bias else None
        if total is not None and cuts is not None and self._ranks is not None:
            self._uploader.finish()  # what is under way cannot be copied yet
            total = ranges_of(total, self._ranks.own(cuts))
        if not is_adaptable(names):
            is_head = names == ["lm_head"]
            return self._noted(DeviceLinear(weight, total, is_head=is_head, cuts=cuts))
        self.sites.append(AdapterSite(tuple(names), tuple(sizes), in_features))
        return self._noted(DeviceLinear(weight, total, site=len(self.sites) - 1, cuts=cuts))

    def _cuts(self, name: str, total: int) -> Cuts | None:
        return None if self._ranks is None else self._ranks.cuts(name, total)

    def experts(
        self, names: ExpertNames, in_features: int, out_features: ExpertSizes, *, bias: bool = False
    ) -> DeviceExperts:
        """[experts, out, in] in the backend's dtype, or packed."""
        weights = self._expert_weights(names, in_features, out_features)
        if not bias:
            return weights
        sizes = list(out_features) * len(names)
        biases = self._matrix([f"{name}.bias" for own in names for name in own], sizes)
        return BiasedExperts(weights, self._noted(biases).view(len(names), -1))

    def _expert_weights(
        self, names: ExpertNames, in_features: int, out_features: ExpertSizes
    ) -> Tensor | PackedExperts:
        flat = [f"{name}.weight" for own in names for name in own]
        sizes = list(out_features) * len(names)
        parts = self._take(flat, sizes, (in_features,))
        packed = self._packed(parts) if self._ledger.is_complete else None
        if packed is not None:
            self._account(parts)
            return self._noted(PackedExperts(packed, len(names)))
        whole = self._noted(self._filled(parts, sizes, (in_features,)))
        self._account(parts)
        return whole.view(len(names), -1, in_features) if self._ledger.is_complete else whole

    def latent_heads(
        self, name: str, num_heads: int, nope_dim: int, value_dim: int, rank: int
    ) -> tuple[Tensor, Tensor]:
        """[heads, rank, nope_dim] and [heads, value_dim, rank] in the backend's dtype."""
        heads = take_latent_heads(self._ledger, name, num_heads, nope_dim, value_dim, rank)
        if heads is None:
            return torch.zeros(0), torch.zeros(0)  # `finish` will raise
        key_up, value_up = (
            torch.from_numpy(np.ascontiguousarray(values)).to(
                self._uploader.device, self._dtype, copy=True
            )
            for values in heads
        )
        return self._noted(key_up), self._noted(value_up)

    def tied(self, embedding: Tensor | CutTable) -> DeviceLinear:
        if isinstance(embedding, CutTable):
            return DeviceLinear(embedding.rows, is_head=True, cuts=embedding.cuts)
        return DeviceLinear(embedding, is_head=True)

    def vector(self, name: str, size: int, *, offset: float = 0.0) -> Tensor:
        return self._in_float32(name, (size,), offset)

    def array(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """As `vector`, of any shape."""
        return self._in_float32(name, shape, 0.0)

    def _in_float32(self, name: str, shape: tuple[int, ...], offset: float) -> Tensor:
        stored = self._ledger.take(name, shape)
        if stored is None:
            return torch.zeros(shape)
        values = torch.from_numpy(to_float32(stored)).add_(offset)
        self._ledger.account(stored)
        return self._noted(values.to(self._uploader.device, copy=True))

    def finish(self) -> None:
        """Wait for what is under way. Raises ModelError that lists what was missing."""
        self._uploader.finish()
        self._ledger.finish()

    def _noted(self, weight: Made) -> Made:
        self.made.append(weight)
        return weight

    def _weight(
        self, names: list[str], sizes: list[int], columns: int, cuts: Cuts | None
    ) -> Tensor | GroupedWeight | ScaledWeight:
        parts = self._take(names, sizes, (columns,))
        own, own_sizes = self._own(parts, sizes, cuts)
        packed = self._packed(own) if self._ledger.is_complete else None
        weight = self._filled(own, own_sizes, (columns,)) if packed is None else packed
        self._account(parts)
        return weight

    def _own(
        self, parts: list[StoredTensor | None], sizes: list[int], cuts: Cuts | None
    ) -> tuple[list[StoredTensor | None], list[int]]:
        """This rank's rows of stored matrices that lie one below the other; the others' bytes are
        not touched."""
        if cuts is None or self._ranks is None:
            return parts, sizes
        pieces = pieces_of(self._ranks.own(cuts), sizes)
        rows = [
            None if stored is None else rows_of(stored, piece.first, piece.end)
            for piece in pieces
            for stored in (parts[piece.matrix],)
        ]
        return rows, [piece.end - piece.first for piece in pieces]

    def _account(self, parts: list[StoredTensor | None]) -> None:
        if not self._ledger.is_complete:
            return
        for stored in parts:
            if stored is not None:
                self._ledger.account(stored)

    def _packed(self, parts: list[StoredTensor | None]) -> GroupedWeight | ScaledWeight | None:
        """As stored, if all parts are so and the kernels take it; they become one."""
        stored = [part for part in parts if part is not None]
        first = stored[0]
        order = _order_of(stored)
        if first.dtype == "F8_E4M3" and "fp8" in self._formats:
            return self._packed_float8(stored)
        if any(part.dtype not in repack.BLOCK_BYTES for part in stored) or order is None:
            return None
        if any((part.dtype == "Q8_0") != (first.dtype == "Q8_0") for part in stored):
            return None  # of 8 bits and of 4
        wants_int8 = "int8" in self._formats and all(p.input_dtype == "int8" for p in stored)
        if not wants_int8 and "grouped" not in self._formats:
            return None
        blocks = repack.stacked([self._blocks(part) for part in stored])
        if wants_int8 and not len(order):
            whole = repack.whole_rows(blocks)
            if whole is not None:
                return whole
        if "grouped" not in self._formats:
            return None
        device_order = None
        if len(order):  # a copy on a host too: memory that numpy owns cannot be parked
            device_order = torch.from_numpy(order).to(self._uploader.device, copy=True)
        return repack.grouped(blocks, device_order)

    def _packed_float8(self, stored: list[StoredTensor]) -> ScaledWeight | None:
        columns = stored[0].shape[1]
        values, scales, blocks = [], [], set()
        for part in stored:
            if part.dtype != "F8_E4M3" or part.scales is None or part.row_map is not None:
                return None
            factors, rows, block = part.scales
            blocks.add(block)
            by_row = factors.repeat(rows, axis=0)[: part.shape[0]]
            scales.append(torch.from_numpy(np.ascontiguousarray(by_row)).to(self._uploader.device))
            values.append(self._raw(part).view(FP8).view(part.shape))
        block = min(blocks)
        is_usual = block == columns or (block >= 32 and block & (block - 1) == 0)
        if len(blocks) != 1 or not is_usual:
            return None
        return repack.scaled(values, scales, block)

    def _blocks(self, stored: StoredTensor) -> repack.Blocks:
        blocks = repack.read_blocks(self._raw(stored), stored.dtype, stored.shape[0])
        if stored.row_map is None:
            return blocks
        rows = torch.from_numpy(stored.row_map).long().to(self._uploader.device)
        q, scales, minima = blocks
        return repack.Blocks(q[rows], scales[rows], None if minima is None else minima[rows])

    def _raw(self, stored: StoredTensor) -> Tensor:
        """The stored bytes on the device."""
        raw = torch.empty(stored.data.size, dtype=torch.uint8, device=self._uploader.device)
        self._uploader.copy(raw, stored.data)
        self._uploader.finish()
        return raw

    def _take(
        self, names: list[str], sizes: list[int], tail: tuple[int, ...]
    ) -> list[StoredTensor | None]:
        return [self._ledger.take(name, (n, *tail)) for name, n in zip(names, sizes, strict=True)]

    def _matrix(
        self,
        names: list[str],
        sizes: list[int],
        columns: int | None = None,
        cuts: Cuts | None = None,
    ) -> Tensor:
        """The stored tensors behind one another along their first dimension; of cut ones this
        rank's rows."""
        tail = () if columns is None else (columns,)
        parts = self._take(names, sizes, tail)
        own, own_sizes = self._own(parts, sizes, cuts)
        whole = self._filled(own, own_sizes, tail)
        self._account(parts)
        return whole

    def _filled(
        self, parts: list[StoredTensor | None], sizes: list[int], tail: tuple[int, ...]
    ) -> Tensor:
        if not self._ledger.is_complete:  # the load fails in the end: spare the device
            return torch.empty((0, *tail), dtype=self._dtype)
        shape = (sum(sizes), *tail)
        whole = torch.empty(shape, dtype=self._dtype, device=self._uploader.device)
        for place, stored in zip(torch.split(whole, sizes), parts, strict=True):
            if stored is not None:
                self._fill(place, stored)
        return whole

    def _fill(self, place: Tensor, stored: StoredTensor) -> None:
        dtype = _DTYPES.get(stored.dtype)
        is_plain = stored.row_map is None and stored.column_map is None and not stored.offset
        if dtype is None or not is_plain:
            values = torch.from_numpy(np.ascontiguousarray(to_float32(stored)))
            place.copy_(values)
        elif dtype == self._dtype:
            self._uploader.copy(place, stored.data)
        else:
            raw = torch.empty(stored.shape, dtype=dtype, device=place.device)
            self._uploader.copy(raw, stored.data)
            self._uploader.finish()
            place.copy_(raw)


def _order_of(stored: list[StoredTensor]) -> NDArray[np.int64] | None:
    """The input's column that meets each stored one; empty if they are in order, None if the parts
    do not agree."""
    maps = [part.column_map for part in stored]
    first = maps[0]
    if first is None:
        return np.empty(0, np.int64) if all(m is None for m in maps) else None
    if any(m is None or (m != first).any() for m in maps):
        return None
    return np.argsort(first)
