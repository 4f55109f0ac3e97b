"""Weights packed for the kernels, straight from the mapped file, so that no second copy exists."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import numpy as np

from octavo_engine import _native
from octavo_engine.backends.adapters import AdapterSite, is_adaptable
from octavo_engine.backends.dequantize import to_float32
from octavo_engine.backends.latent_heads import latent_names, take_latent_heads
from octavo_engine.backends.ledger import WeightLedger
from octavo_engine.backends.native.graph import (
    LinearAdapters,
    NativeExperts,
    NativeHeads,
    NativeLinear,
)
from octavo_engine.backends.native.packing import PANEL_ROWS, choose_packings
from octavo_engine.backends.native.shard import Shard, cut_heads, cut_rows, pieces_of
from octavo_engine.backends.native.stages import AbsentMatrix
from octavo_engine.backends.native.stored_form import form_of, in_form, rows_of
from octavo_engine.errors import ConfigError, ModelError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from numpy.typing import NDArray

    from octavo_engine.backends.native.graph import Dtype
    from octavo_engine.backends.native.packing import Packing
    from octavo_engine.backends.native.shard import RowCut
    from octavo_engine.config import Quantization
    from octavo_engine.ops import ExpertNames, ExpertSizes, Names, Sizes
    from octavo_engine.weights.checkpoint import Checkpoint

# Rows among which the highest wins, as a head's do; a row is an expert.
_ROUTERS = (".mlp.gate", ".block_sparse_moe.gate")
# The first of two halves of equal size, which meet column by column in a glu.
_GATED = (".gate_proj", ".gate_up_proj", ".w1")


class NativeLoader:
    """The Loader of the native backend: matrices packed as `choose_packings` says, and of each only
    the rows of this rank's shard. With `only`, those of other names are absent."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        team: _native.Team,
        dtype: Dtype,
        progress: Callable[[int, int], None] | None = None,
        *,
        quantization: Quantization = "auto",
        shard: Shard | None = None,
        adapters: _native.AdapterSlots | None = None,
        only: Collection[str] | None = None,
    ) -> None:
        self._only = only
        self._ledger = WeightLedger(checkpoint, progress)
        self._team = team
        self._dtype = dtype
        self._quantization = quantization
        self._shard = shard or Shard()
        self._has_integers = False
        self._adapters = adapters
        self.sites: list[AdapterSite] = []  # of the adapters

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
        adapters = self._add_site(names, sizes, in_features)
        if not bias:
            return NativeLinear(weight, adapters=adapters)
        return NativeLinear(weight, self._bias(names, sizes), adapters)

    def _bias(self, names: Sequence[str], sizes: Sequence[int]) -> NDArray[np.float32]:
        """The biases behind one another, of the rows of this rank's shard."""
        parts = [self.vector(f"{name}.bias", size) for name, size in zip(names, sizes, strict=True)]
        whole, cut = np.concatenate(parts), self._cut(names[0], sizes)
        return np.concatenate([whole[first:end] for first, end in cut.ranges])

    def _add_site(
        self, names: Sequence[str], sizes: Sequence[int], columns: int
    ) -> LinearAdapters | None:
        if self._adapters is None or not is_adaptable(names):
            return None
        self.sites.append(AdapterSite(tuple(names), tuple(sizes), columns))
        return LinearAdapters(self._adapters, self._adapters.add_site(list(sizes), columns))

    def experts(
        self, names: ExpertNames, in_features: int, out_features: ExpertSizes, *, bias: bool = False
    ) -> NativeExperts:
        halves = sum(out_features) // len(out_features)
        if len(out_features) == 2 and halves % PANEL_ROWS:
            raise ModelError(
                f"{names[0][0]}: experts of a width of {halves} cannot be computed on this device; "
                f"it must be a multiple of {PANEL_ROWS}"
            )
        packed = tuple(
            self._pack([f"{name}.weight" for name in own], out_features, in_features,
                       is_vocabulary=False)
            for own in names
        )  # fmt: skip
        kinds = {weight.dtype for weight in packed}
        if len(kinds) > 1:
            raise ModelError(
                f"{names[0][0]}: experts of one layer are stored in several types, which become "
                f"{' and '.join(sorted(kinds))}; --quantization none or int8 makes them one"
            )
        biases = [self._bias(own, out_features) for own in names] if bias else None
        return NativeExperts(packed, None if biases is None else np.concatenate(biases))

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
        self, names: Sequence[str], sizes: Sequence[int], columns: int, *, is_vocabulary: bool
    ) -> _native.Packed:
        """The matrices one below the other."""
        if self._is_absent(names):
            return self._absent(names, sum(sizes), columns)
        parts = [
            self._ledger.take(name, (size, columns))
            for name, size in zip(names, sizes, strict=True)
        ]
        if not self._ledger.is_complete:
            return _native.Packed(1, 1, self._dtype)  # never used: `finish` will raise
        packings = choose_packings(
            [form_of(stored) for stored in parts if stored is not None],
            sizes,
            self._dtype,
            self._quantization,
            is_vocabulary=is_vocabulary,
        )
        self._has_integers |= not {"f32", "bf16"}.issuperset(packings)
        cut = self._cut(names[0].removesuffix(".weight"), sizes)
        pieces = pieces_of(cut, sizes)
        runs = [(end - first, packings[matrix]) for matrix, first, end in pieces]
        packed = _allocate(names[0], runs, columns, cut)
        first_row = 0
        for matrix, first, end in pieces:
            stored = parts[matrix]
            assert stored is not None  # since nothing is missing
            if stored.offset:
                raise ModelError(f"{stored.name}: a matrix with an offset cannot be packed")
            form = in_form(rows_of(stored, first, end))
            try:
                packed.pack(self._team, first_row, form.data, form.dtype, end - first, form.row_map)
            except ValueError as error:
                raise ModelError(f"{stored.name} cannot be packed: {error}") from error
            first_row += end - first
        for stored in filter(None, parts):
            self._ledger.account(stored)
        return packed

    def _is_absent(self, names: Sequence[str]) -> bool:
        return self._only is not None and not set(names) <= set(self._only)

    def _absent(self, names: Sequence[str], rows: int, columns: int) -> _native.Packed:
        for name in names:
            self._ledger.leave(name)
        return cast("_native.Packed", AbsentMatrix(tuple(names), rows, columns))

    def _cut(self, name: str, sizes: Sequence[int]) -> RowCut:
        return cut_rows(sum(sizes), self._shard, of_halves=name.endswith(_GATED))


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
