"""Weights as plain torch tensors, whatever format they are stored in."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from octavo_engine.backends.adapters import AdapterSite, is_adaptable
from octavo_engine.backends.dequantize import to_float32
from octavo_engine.backends.latent_heads import take_latent_heads
from octavo_engine.backends.ledger import WeightLedger
from octavo_engine.backends.native.shard import pieces_of
from octavo_engine.backends.native.stored_form import rows_of
from octavo_engine.backends.torch.rank_group import CutTable, ranges_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from octavo_engine.backends.torch.precision import Precision
    from octavo_engine.backends.torch.rank_group import Cuts, RankGroup
    from octavo_engine.ops import ExpertNames, ExpertSizes, Names, Sizes
    from octavo_engine.weights.checkpoint import Checkpoint


class TorchLinear(NamedTuple):
    weight: Tensor  # [out, in]
    bias: Tensor | None  # [out]
    site: int = -1  # of the adapters; -1: none may add to it
    cuts: Cuts | None = None  # which rank has which outputs; None: all are here


class TorchExperts(NamedTuple):
    weights: Tensor  # [experts, out, in]
    bias: Tensor | None = None  # [experts, out]


class TorchHeads(NamedTuple):
    weights: Tensor  # [heads, out, in]


class TorchLoader:
    """The Loader of the reference."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        precision: Precision,
        progress: Callable[[int, int], None] | None = None,
        ranks: RankGroup | None = None,
    ) -> None:
        """With `ranks`, of each matrix this rank's rows only."""
        self._ranks = ranks
        self._ledger = WeightLedger(checkpoint, progress)
        self._precision = precision
        self.sites: list[AdapterSite] = []  # of the adapters

    def embedding(self, name: str, rows: int, columns: int) -> Tensor | CutTable:
        cuts = self._cuts(name, rows)
        table = self._precision.stored(self._matrix([f"{name}.weight"], [rows], columns, cuts))
        return table if cuts is None else CutTable(table, cuts)

    def linear(
        self, names: Names, in_features: int, out_features: Sizes, *, bias: bool = False
    ) -> TorchLinear:
        names = [names] if isinstance(names, str) else names
        sizes = [out_features] if isinstance(out_features, int) else out_features
        parts = list(zip(names, sizes, strict=True))
        cuts = self._cuts(names[0], sum(sizes))
        weight = self._matrix([f"{name}.weight" for name in names], sizes, in_features, cuts)
        total = torch.cat([self._read(f"{name}.bias", (n,)) for name, n in parts]) if bias else None
        if total is not None and cuts is not None and self._ranks is not None:
            total = ranges_of(total, self._ranks.own(cuts))
        if not is_adaptable(names):
            return TorchLinear(self._precision.stored(weight), total, cuts=cuts)
        self.sites.append(AdapterSite(tuple(names), tuple(sizes), in_features))
        return TorchLinear(self._precision.stored(weight), total, len(self.sites) - 1, cuts)

    def _cuts(self, name: str, total: int) -> Cuts | None:
        return None if self._ranks is None else self._ranks.cuts(name, total)

    def _matrix(
        self, names: Sequence[str], sizes: Sequence[int], columns: int, cuts: Cuts | None
    ) -> Tensor:
        """The stored matrices one below the other: of cut ones this rank's rows."""
        if cuts is None or self._ranks is None:
            parts = zip(names, sizes, strict=True)
            return torch.cat([self._read(name, (size, columns)) for name, size in parts])
        whole = [
            self._ledger.take(name, (n, columns)) for name, n in zip(names, sizes, strict=True)
        ]
        found = []
        for piece in pieces_of(self._ranks.own(cuts), sizes):
            stored = whole[piece.matrix]
            if stored is not None:
                found.append(self._tensor(to_float32(rows_of(stored, piece.first, piece.end))))
        for stored in whole:
            if stored is not None:
                self._ledger.account(stored)
        if not self._ledger.is_complete:
            return torch.zeros((0, columns))  # `finish` will raise
        return torch.cat(found)

    def experts(
        self, names: ExpertNames, in_features: int, out_features: ExpertSizes, *, bias: bool = False
    ) -> TorchExperts:
        experts = [
            torch.cat(
                [
                    self._read(f"{name}.weight", (size, in_features))
                    for name, size in zip(own, out_features, strict=True)
                ]
            )
            for own in names
        ]
        weights = torch.stack([self._precision.stored(weight) for weight in experts])
        if not bias:
            return TorchExperts(weights)
        biases = [
            torch.cat(
                [
                    self._read(f"{name}.bias", (size,))
                    for name, size in zip(own, out_features, strict=True)
                ]
            )
            for own in names
        ]
        return TorchExperts(weights, torch.stack(biases))

    def latent_heads(
        self, name: str, num_heads: int, nope_dim: int, value_dim: int, rank: int
    ) -> tuple[TorchHeads, TorchHeads]:
        heads = take_latent_heads(self._ledger, name, num_heads, nope_dim, value_dim, rank)
        if heads is None:
            return TorchHeads(torch.zeros(0)), TorchHeads(torch.zeros(0))  # `finish` will raise
        key_up, value_up = (
            TorchHeads(self._precision.stored(self._tensor(values))) for values in heads
        )
        return key_up, value_up

    def tied(self, embedding: Tensor | CutTable) -> TorchLinear:
        if isinstance(embedding, CutTable):
            return TorchLinear(embedding.rows, None, cuts=embedding.cuts)
        return TorchLinear(embedding, None)

    def vector(self, name: str, size: int, *, offset: float = 0.0) -> Tensor:
        return self._read(name, (size,)) + offset

    def array(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return self._read(name, shape)

    def finish(self) -> None:
        self._ledger.finish()

    def _read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        stored = self._ledger.take(name, shape)
        if stored is None:
            return torch.zeros(shape, dtype=self._precision.dtype)
        values = self._tensor(to_float32(stored))
        self._ledger.account(stored)
        return values

    def _tensor(self, values: NDArray[np.float32]) -> Tensor:
        return torch.from_numpy(values).to(self._precision.dtype)
