"""Ranks of the torch backend: what each has of the columns, and how all of them come to all.

A rank computes some columns of a value, as `native/shard.py` divides them, and `gather` shows them
to the others. Nothing is added up on the way: what arrives are the bits that one rank computed
(docs/adr/0022-equal-bits-over-ranks.md).

They find each other through a file that only they have, and through no port that is known to
anybody; gloo then connects them over the loopback address, and NCCL over the devices.
"""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from contextlib import suppress
from datetime import timedelta
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn import functional

from octavo_engine.backends.native.shard import RowCut, cut_heads, cut_linear
from octavo_engine.errors import GatherFailed

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from torch import Tensor

    from octavo_engine.backends.native.shard import RankPlace
    from octavo_engine.ops import AttentionSpec

CONNECT_S = 60.0  # for all ranks to meet once all have loaded
WARM_UP_S = 900.0  # for kernels that one rank compiles while the others wait
FOREVER = timedelta(days=365)
LOOK_S = 0.25

Cuts = tuple[RowCut, ...]  # of each rank


class CutTable(NamedTuple):
    """A rank's rows of a table that is looked up by token or by position."""

    rows: Tensor
    cuts: Cuts


class OwnHeads(NamedTuple):
    """A rank's part of one layer's attention."""

    spec: AttentionSpec
    columns: tuple[slice, slice, slice]  # of q, k and v among those of all heads
    cuts: Cuts  # of the result

    def of(self, qkv: Tensor) -> Tensor:
        return torch.cat([qkv[:, own] for own in self.columns], dim=1)


class _Piece(NamedTuple):
    """Columns that one rank shows, from `first` to `end` among its own."""

    rank: int
    first: int
    end: int


class RankGroup:
    """One of several ranks, which compute the same steps and gather in the same order."""

    def __init__(self, place: RankPlace, device: torch.device, *, shares_device: bool) -> None:
        """`shares_device`: all ranks compute on one, where NCCL refuses to connect them."""
        self.shard = place.shard
        self.shares_device = shares_device
        self._patience_s = place.patience_s
        self._file = os.dup(place.file)
        self._device = device
        self._uses_nccl = device.type == "cuda" and not shares_device
        self._backend: Any = None
        self._has_failed = False
        self._heads: dict[int, tuple[AttentionSpec, OwnHeads]] = {}  # by id, which is kept
        self._owners: dict[Cuts, tuple[Tensor, Tensor]] = {}
        self._deadline: float | None = None
        self._watch: threading.Thread | None = None

    @property
    def can_capture(self) -> bool:
        """Whether a graph can hold a gather: gloo is the host's work."""
        return self._uses_nccl

    # ── what a rank has ──

    def cuts(self, name: str, total: int) -> Cuts | None:
        """Who has which outputs of the linear layer; None: each rank has all."""
        cuts = tuple(cut_linear(name, total, shard) for shard in self.shard.all())
        return None if cuts[0].is_whole else cuts

    def own(self, cuts: Cuts) -> RowCut:
        return cuts[self.shard.rank]

    def heads(self, spec: AttentionSpec, *, is_normed: bool = False) -> OwnHeads:
        """The rank's part of a layer. `is_normed`: heads are normed before they are divided."""
        known = self._heads.get(id(spec))
        if known is None:
            known = self._heads[id(spec)] = (spec, self._divide(spec, is_normed=is_normed))
        return known[1]

    def _divide(self, spec: AttentionSpec, *, is_normed: bool) -> OwnHeads:
        sizes, dim = (spec.num_heads, spec.num_kv_heads), spec.head_dim
        own = cut_heads(*sizes, self.shard)
        heads = slice(own.first_head, own.first_head + own.num_heads)
        part = dataclasses.replace(
            spec,
            num_heads=own.num_heads,
            num_kv_heads=own.num_kv_heads,
            q_norm=None if is_normed else _norm_of(spec.q_norm, dim, heads.start, heads.stop),
            k_norm=None if is_normed else _norm_of(
                spec.k_norm, dim, own.first_kv_head, own.first_kv_head + own.num_kv_heads),
            alibi=None if spec.alibi is None else spec.alibi[heads].copy(),
            sinks=None if spec.sinks is None else spec.sinks[heads].contiguous(),
        )  # fmt: skip
        k, v = (
            slice((first + own.first_kv_head) * dim,
                  (first + own.first_kv_head + own.num_kv_heads) * dim)
            for first in (spec.num_heads, spec.num_heads + spec.num_kv_heads)
        )  # fmt: skip
        total = spec.num_heads * dim
        cuts = []
        for shard in self.shard.all():
            each = cut_heads(*sizes, shard)
            first = each.first_head * dim
            cuts.append(RowCut(((first, first + each.num_heads * dim),), total))
        columns = (slice(heads.start * dim, heads.stop * dim), k, v)
        return OwnHeads(part, columns, tuple(cuts))

    # ── what all ranks get ──

    def gather(self, own: Tensor, cuts: Cuts) -> Tensor:
        """[T, all columns] from [T, the rank's]. Raises GatherFailed."""
        width, pieces = _layout(cuts)
        parts = self._exchange(functional.pad(own, (0, width - own.shape[1])))
        return torch.cat([parts[rank, :, first:end] for rank, first, end in pieces], dim=1)

    def look_up(self, table: CutTable, ids: Tensor) -> Tensor:
        """Rows of the whole table, each from the rank that has it. Raises GatherFailed."""
        firsts, ends = self._bounds(table.cuts)
        place = (ids - firsts[self.shard.rank]).clamp(0, len(table.rows) - 1)
        parts = self._exchange(functional.embedding(place, table.rows))
        owners = torch.bucketize(ids, ends, right=True)
        return parts[owners, torch.arange(len(ids), device=ids.device)]

    def _bounds(self, cuts: Cuts) -> tuple[Tensor, Tensor]:
        known = self._owners.get(cuts)
        if known is None:
            bounds = torch.tensor([cut.ranges[0] for cut in cuts], device=self._device)
            known = self._owners[cuts] = bounds[:, 0].contiguous(), bounds[:, 1].contiguous()
        return known

    def _exchange(self, own: Tensor) -> Tensor:
        """[ranks, T, columns]"""
        size, own = self.shard.size, own.contiguous()
        if not own.numel():
            return own.new_empty((size, *own.shape))
        if self._uses_nccl or self._device.type == "cpu":
            parts = own.new_empty((size * len(own), own.shape[1]))
            self._run(parts.view(torch.uint8), own.view(torch.uint8))
            return parts.view(size, *own.shape)
        host = own.cpu()  # the device is one that NCCL does not connect
        parts = host.new_empty((size * len(own), own.shape[1]))
        self._run(parts.view(torch.uint8), host.view(torch.uint8))
        return parts.view(size, *own.shape).to(own.device)

    def _run(self, parts: Tensor, own: Tensor) -> None:
        if self._has_failed:
            raise GatherFailed("a gather failed before")
        assert self._backend is not None, "connect() comes first"
        options = _gather_options()
        if not self._uses_nccl:
            options.timeout = timedelta(seconds=self._patience_s)
        try:
            self._backend._allgather_base(parts, own, options).wait()
        except RuntimeError as error:
            # gloo passes rows on from rank to rank: those behind a rank that knows of the loss see
            # it once our connections close, as they do when nobody holds the group.
            self._has_failed = True
            backend, self._backend = self._backend, None
            _abort(backend)
            del backend
            raise GatherFailed(str(error)) from error

    # ── meeting, waiting and parting ──

    def connect(self) -> None:
        """Once all ranks have loaded. Raises GatherFailed if they do not meet."""
        if self._backend is not None:
            return
        try:
            store = dist.FileStore(  # type: ignore[attr-defined]  # torch's
                f"/proc/self/fd/{self._file}", self.shard.size
            )
            store.set_timeout(timedelta(seconds=CONNECT_S))
            make = self._connect_nccl if self._uses_nccl else self._connect_gloo
            self._backend = make(store)
        except RuntimeError as error:
            self._has_failed = True
            raise GatherFailed(str(error)) from error
        if self._device.type == "cuda":
            self._watch = threading.Thread(
                target=self._watch_device, name="octavo-gathers", daemon=True
            )
            self._watch.start()
        # NCCL opens its channels in the first one, which no graph may hold.
        with self.patient(), self.waiting():
            self.gather(torch.zeros((1, 1), device=self._device), _even(self.shard.size))
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)

    def _connect_gloo(self, store: Any) -> Any:
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # likewise
        options._timeout = timedelta(seconds=CONNECT_S)
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        return dist.ProcessGroupGloo(store, *self.shard, options)

    def _connect_nccl(self, store: Any) -> Any:
        # A rank that is lost is noticed here and named by rank 0; torch's own watch would end this
        # process without a word.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        os.environ.setdefault("TORCH_NCCL_ENABLE_MONITORING", "0")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")  # the ranks are on one host
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = FOREVER
        return dist.ProcessGroupNCCL(store, *self.shard, options)

    def patient(self) -> AbstractContextManager[None]:
        """While kernels are compiled, for which others wait longer."""
        return _Patience(self)

    def waiting(self) -> AbstractContextManager[None]:
        """While the host waits for the device: too long, and the gathers there are ended. Raises
        GatherFailed where they were."""
        return _Waiting(self)

    def fail(self) -> None:
        """End what the device, or this process, waits for. On any thread; a second call does
        nothing."""
        if self._has_failed:
            return
        self._has_failed = True
        _abort(self._backend)

    def close(self) -> None:
        if self._file < 0:
            return
        backend, self._backend = self._backend, None
        if not self._has_failed:
            _abort(backend)  # an orderly end would wait for ranks that may be gone
        os.close(self._file)
        self._file = -1

    def _watch_device(self) -> None:
        while self._file >= 0 and not self._has_failed:
            deadline = self._deadline
            if deadline is not None and time.monotonic() > deadline:
                self.fail()
            time.sleep(LOOK_S)


class _Patience:
    def __init__(self, group: RankGroup) -> None:
        self._group, self._usual = group, group._patience_s

    def __enter__(self) -> None:
        self._group._patience_s = max(self._usual, WARM_UP_S)

    def __exit__(self, *_: object) -> None:
        self._group._patience_s = self._usual


class _Waiting:
    def __init__(self, group: RankGroup) -> None:
        self._group = group

    def __enter__(self) -> None:
        self._group._deadline = time.monotonic() + self._group._patience_s

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._group._deadline = None
        if kind is None and self._group._has_failed:
            raise GatherFailed("a gather was ended: not all ranks came to it")


@lru_cache
def _layout(cuts: Cuts) -> tuple[int, tuple[_Piece, ...]]:
    """How many columns each rank shows, padding too, and where the whole's lie in their order."""
    found: list[tuple[int, _Piece]] = []
    widths = []
    for rank, cut in enumerate(cuts):
        at = 0
        for first, end in cut.ranges:
            found.append((first, _Piece(rank, at, at + end - first)))
            at += end - first
        widths.append(at)
    return max(widths), tuple(piece for _, piece in sorted(found))


def _even(size: int) -> Cuts:
    return tuple(RowCut(((rank, rank + 1),), size) for rank in range(size))


def half_of(cuts: Cuts) -> Cuts:
    """What becomes of cuts in both halves once a glu has made one of them."""
    return tuple(RowCut((cut.ranges[0],), cut.total // 2) for cut in cuts)


def _norm_of(weight: Tensor | None, dim: int, first: int, end: int) -> Tensor | None:
    """Of those heads; a weight of one head's columns is of each."""
    if weight is None or len(weight) == dim:
        return weight
    return weight[first * dim : end * dim]


def _abort(backend: Any) -> None:
    """An older gloo cannot be ended so: its gathers end by themselves."""
    if backend is not None:
        with suppress(RuntimeError):
            backend.abort()


def _gather_options() -> Any:
    from torch._C._distributed_c10d import AllgatherOptions

    return AllgatherOptions()


def ranges_of(values: Tensor, cut: RowCut) -> Tensor:
    """The rank's entries of a vector that is whole, such as a bias."""
    return torch.cat([values[first:end] for first, end in cut.ranges])
