"""Weights packed for the kernels, straight from the mapped file, so that no second copy exists."""

from __future__ import annotations

import re
from itertools import groupby
from typing import TYPE_CHECKING, cast

import numpy as np

from octavo_engine import _native
from octavo_engine.backends.adapters import AdapterSite, is_adaptable
from octavo_engine.backends.dequantize import to_float32
from octavo_engine.backends.latent_heads import latent_names, take_latent_heads
from octavo_engine.backends.ledger import WeightLedger
from octavo_engine.backends.native.expert_balance import first_slots
from octavo_engine.backends.native.graph import (
    LinearAdapters,
    NativeExperts,
    NativeHeads,
    NativeLinear,
)
from octavo_engine.backends.native.packing import PANEL_ROWS, choose_packings
from octavo_engine.backends.native.shard import (
    RowCut,
    Shard,
    cut_heads,
    cut_linear,
    pieces_of,
    split,
)
from octavo_engine.backends.native.stages import AbsentMatrix
from octavo_engine.backends.native.stored_form import form_of, in_form, rows_of
from octavo_engine.errors import ConfigError, ModelError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from numpy.typing import NDArray

    from octavo_engine.backends.native.graph import Dtype
    from octavo_engine.backends.native.packing import Packing
    from octavo_engine.config import Quantization
    from octavo_engine.ops import ExpertNames, ExpertSizes, Names, Sizes
    from octavo_engine.weights.checkpoint import Checkpoint, StoredTensor

_LAYER = re.compile(r"\blayers\.(\d+)\.")
# Rows among which the highest wins, as a head's do; a row is an expert.
_ROUTERS = (".mlp.gate", ".block_sparse_moe.gate")


class NativeLoader:
    """The Loader of the native backend: matrices packed as `choose_packings` says, and of each only
    the rows of this rank's shard. With `expert_shard` it has those experts as a whole instead of
    some rows of each, and of all ranks together so many `redundant_experts` beside them. With
    `only`, matrices of other names are absent."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        team: _native.Team,
        dtype: Dtype,
        progress: Callable[[int, int], None] | None = None,
        *,
        quantization: Quantization = "auto",
        shard: Shard | None = None,
        expert_shard: Shard | None = None,
        redundant_experts: int = 0,
        adapters: _native.AdapterSlots | None = None,
        only: Collection[str] | None = None,
    ) -> None:
        self._only = only
        self._ledger = WeightLedger(checkpoint, progress)
        self._team = team
        self._dtype = dtype
        self._quantization = quantization
        self._shard = shard or Shard()
        self._expert_shard = expert_shard
        self._redundant_experts = redundant_experts
        self._has_integers = False
        self._adapters = adapters
        self.sites: list[AdapterSite] = []  # of the adapters
        self.expert_layers: list[int] = []  # that are mixtures, in their order

    def embedding(self, name: str, rows: int, columns: int) -> _native.Packed:
        return self._pack([f"{name}.weight"], [rows], columns, is_vocabulary=True)

    def linear(
        self, names: Names, in_features: int, out_features: Sizes, *, bias: bool = False
    ) -> NativeLinear:
        names = [names] if isinstance(names, str) else names
        sizes = [out_features] if isinstance(out_features, int) else out_features
        weight = self._pack(
            [f"{name}.weight" for name in names],
            sizes,
            in_features,
            is_vocabulary=list(names) == ["lm_head"] or names[0].endswith(_ROUTERS),
        )
        is_absent = self._is_absent([f"{name}.weight" for name in names])
        own = () if is_absent else self._cut(names[0], sizes).ranges
        adapters = self._add_site(names, sizes, in_features, own)
        if not bias:
            return NativeLinear(weight, adapters=adapters)
        return NativeLinear(weight, self._bias(names, sizes), adapters)

    def _bias(self, names: Sequence[str], sizes: Sequence[int]) -> NDArray[np.float32]:
        """The biases behind one another, of the rows of this rank's shard."""
        whole, cut = self._whole_bias(names, sizes), self._cut(names[0], sizes)
        return np.concatenate([whole[first:end] for first, end in cut.ranges])

    def _whole_bias(self, names: Sequence[str], sizes: Sequence[int]) -> NDArray[np.float32]:
        parts = [self.vector(f"{name}.bias", size) for name, size in zip(names, sizes, strict=True)]
        return np.concatenate(parts)

    def _add_site(
        self,
        names: Sequence[str],
        sizes: Sequence[int],
        columns: int,
        own: Sequence[tuple[int, int]],
    ) -> LinearAdapters | None:
        """`own`: the outputs that this rank or stage has, from which on to which end."""
        if self._adapters is None or not is_adaptable(names):
            return None
        self.sites.append(AdapterSite(tuple(names), tuple(sizes), columns, bool(own)))
        number = self._adapters.add_site(list(sizes), columns, list(own))
        return LinearAdapters(self._adapters, number)

    def experts(
        self, names: ExpertNames, in_features: int, out_features: ExpertSizes, *, bias: bool = False
    ) -> NativeExperts:
        if not self._is_absent([f"{name}.weight" for name in names[0]]):
            self._note_layer(names[0][0])
        halves = sum(out_features) // len(out_features)
        if len(out_features) == 2 and halves % PANEL_ROWS:
            raise ModelError(
                f"{names[0][0]}: experts of a width of {halves} cannot be computed on this device; "
                f"it must be a multiple of {PANEL_ROWS}"
            )
        if self._expert_shard is not None:
            return self._own_experts(names, in_features, out_features, bias=bias)
        packed = tuple(
            self._pack([f"{name}.weight" for name in own], out_features, in_features,
                       is_vocabulary=False)
            for own in names
        )  # fmt: skip
        _check_alike(names[0][0], {weight.dtype for weight in packed})
        biases = [self._bias(own, out_features) for own in names] if bias else None
        whole_bias = None if biases is None else np.concatenate(biases)
        return NativeExperts(packed, 0, len(names), len(names), whole_bias)

    def _note_layer(self, name: str) -> None:
        """That it has experts here; it takes their two matrices one after the other."""
        found = _LAYER.search(name)
        layer = int(found[1]) if found else len(self.expert_layers)
        if layer not in self.expert_layers:
            self.expert_layers.append(layer)

    def _own_experts(
        self, names: ExpertNames, columns: int, sizes: ExpertSizes, *, bias: bool
    ) -> NativeExperts:
        """Those of this rank. Of the first one of all, which another rank may have, all ranks see
        how it is stored: what they compute together is in one form."""
        assert self._expert_shard is not None
        slots = first_slots(len(names) + self._redundant_experts, len(names))
        first, end = split(len(slots), self._expert_shard)
        packed, biases, forms = [], [], set()
        for number, own in enumerate(names):
            if number in slots[first:end]:
                continue
            weights = [f"{name}.weight" for name in own]
            if number == 0 and (parts := self._stored(weights, sizes, columns)) is not None:
                forms.add("+".join(form for form, _ in groupby(self._packings(parts, sizes))))
            for name in (*weights, *(f"{name}.bias" for name in own if bias)):
                self._ledger.leave(name)
        for expert in slots[first:end]:
            weights = [f"{name}.weight" for name in names[expert]]
            packed.append(self._pack(weights, sizes, columns, is_vocabulary=False, whole=True))
            forms.add(packed[-1].dtype)
            if bias:
                biases.append(self._whole_bias(names[expert], sizes))
        if self._ledger.is_complete:
            _check_alike(names[0][0], forms)
        whole_bias = np.concatenate(biases) if bias else None
        return NativeExperts(tuple(packed), first, len(slots), len(names), whole_bias)

    def latent_heads(
        self, name: str, num_heads: int, nope_dim: int, value_dim: int, rank: int
    ) -> tuple[NativeHeads, NativeHeads]:
        """In the model's numbers, whatever they are stored in: the first are transposed."""
        own = cut_heads(num_heads, 1, self._shard)
        names = latent_names(self._ledger, name)
        if self._is_absent(names):
            up = self._absent(names, rank, nope_dim)
            down = self._absent(names, value_dim, rank)
            return NativeHeads((up,) * own.num_heads), NativeHeads((down,) * own.num_heads)
        heads = take_latent_heads(self._ledger, name, num_heads, nope_dim, value_dim, rank)
        if heads is None:
            return NativeHeads(()), NativeHeads(())  # never used: `finish` will raise
        rows = slice(own.first_head, own.first_head + own.num_heads)
        key_up = [self._pack_numbers(head) for head in heads.key_up[rows]]
        value_up = [self._pack_numbers(head) for head in heads.value_up[rows]]
        return NativeHeads(tuple(key_up)), NativeHeads(tuple(value_up))

    def _pack_numbers(self, values: NDArray[np.float32]) -> _native.Packed:
        rows, columns = values.shape
        packed = _native.Packed(rows, columns, self._dtype)
        data = np.ascontiguousarray(values).view(np.uint8).reshape(-1)
        packed.pack(self._team, 0, data, "F32", rows)
        return packed

    def tied(self, embedding: _native.Packed) -> NativeLinear:
        return NativeLinear(embedding)

    def vector(self, name: str, size: int, *, offset: float = 0.0) -> NDArray[np.float32]:
        return self.array(name, (size,), offset=offset)

    def array(
        self, name: str, shape: tuple[int, ...], *, offset: float = 0.0
    ) -> NDArray[np.float32]:
        stored = self._ledger.take(name, shape)
        if stored is None:
            return np.zeros(shape, np.float32)
        values = to_float32(stored) + np.float32(offset)
        self._ledger.account(stored)
        return values

    def finish(self) -> None:
        """Raises ModelError that lists the missing tensors."""
        self._ledger.finish()

    def check_integers(self) -> None:
        """Raises ConfigError where no matrix is held as integers."""
        if not self._has_integers:
            raise ConfigError(
                "--activation-bits 8 is for weights held as integers, and this model has none: "
                "add --quantization int8 or int4, or leave it out"
            )

    def _pack(
        self,
        names: Sequence[str],
        sizes: Sequence[int],
        columns: int,
        *,
        is_vocabulary: bool,
        whole: bool = False,
    ) -> _native.Packed:
        """The matrices one below the other: the rows of this rank's shard, or all."""
        if self._is_absent(names):
            return self._absent(names, sum(sizes), columns)
        parts = self._stored(names, sizes, columns)
        if parts is None:
            return _native.Packed(1, 1, self._dtype)  # never used: `finish` will raise
        packings = self._packings(parts, sizes, is_vocabulary=is_vocabulary)
        self._has_integers |= not {"f32", "bf16"}.issuperset(packings)
        if whole:
            cut = RowCut(((0, sum(sizes)),), sum(sizes))
        else:
            cut = self._cut(names[0].removesuffix(".weight"), sizes)
        pieces = pieces_of(cut, sizes)
        runs = [(end - first, packings[matrix]) for matrix, first, end in pieces]
        packed = _allocate(names[0], runs, columns, cut)
        first_row = 0
        for matrix, first, end in pieces:
            stored = parts[matrix]
            if stored.offset:
                raise ModelError(f"{stored.name}: a matrix with an offset cannot be packed")
            form = in_form(rows_of(stored, first, end))
            try:
                packed.pack(self._team, first_row, form.data, form.dtype, end - first, form.row_map)
            except ValueError as error:
                raise ModelError(f"{stored.name} cannot be packed: {error}") from error
            first_row += end - first
        for stored in parts:
            self._ledger.account(stored)
        return packed

    def _stored(
        self, names: Sequence[str], sizes: Sequence[int], columns: int
    ) -> list[StoredTensor] | None:
        """None where something is missing, here or before."""
        parts = [
            self._ledger.take(name, (size, columns))
            for name, size in zip(names, sizes, strict=True)
        ]
        found = [stored for stored in parts if stored is not None]
        return found if self._ledger.is_complete else None

    def _packings(
        self, parts: Sequence[StoredTensor], sizes: Sequence[int], *, is_vocabulary: bool = False
    ) -> list[Packing]:
        return choose_packings(
            [form_of(stored) for stored in parts],
            sizes,
            self._dtype,
            self._quantization,
            is_vocabulary=is_vocabulary,
        )

    def _is_absent(self, names: Sequence[str]) -> bool:
        return self._only is not None and not set(names) <= set(self._only)

    def _absent(self, names: Sequence[str], rows: int, columns: int) -> _native.Packed:
        for name in names:
            self._ledger.leave(name)
        return cast("_native.Packed", AbsentMatrix(tuple(names), rows, columns))

    def _cut(self, name: str, sizes: Sequence[int]) -> RowCut:
        return cut_linear(name, sum(sizes), self._shard)


def _check_alike(name: str, forms: Collection[str]) -> None:
    """Raises ModelError where experts of one layer would be packed in several forms."""
    if len(forms) > 1:
        raise ModelError(
            f"{name}: experts of one layer are stored in several types, which become "
            f"{' and '.join(sorted(forms))}; --quantization none or int8 makes them one"
        )


def _allocate(
    name: str, parts: list[tuple[int, Packing]], columns: int, cut: RowCut
) -> _native.Packed:
    try:
        if cut.is_whole:
            return _native.Packed(parts, columns)
        return _native.Packed(
            parts,
            columns,
            first_row=cut.ranges[0][0],
            total_rows=cut.total,
            of_halves=cut.of_halves,
        )
    except MemoryError as error:
        rows = sum(count for count, _ in parts)
        raise ModelError(
            f"{name}: no memory for a matrix of {rows} x {columns}; "
            "the model needs a machine, or a container limit, with more of it"
        ) from error
