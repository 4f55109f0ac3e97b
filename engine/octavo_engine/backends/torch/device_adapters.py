"""LoRA adapters on a device: where their matrices lie, and how they come there.

An arena has room for one adapter of the highest rank, at a place that never changes, so that graphs
stay valid. It begins with a table, an entry for each part of a linear layer: rank, where A and B
lie, scale. Behind it lie the matrices as files have them: A [rank, inputs], B [outputs, rank],
ranks padded.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from octavo_engine.backends.adapters import in_float32, match_sites
from octavo_engine.backends.torch import memory
from octavo_engine.backends.torch.adapter_tiles import (
    BLOCK_OUTPUTS,
    ENTRY_WORDS,
    UNIT,
    AdapterCut,
    cut_rows,
    padded,
)
from octavo_engine.backends.torch.adapter_upload import AdapterUploader
from octavo_engine.backends.torch.arena_book import ArenaBook

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from concurrent.futures import Future

    from torch import Tensor

    from octavo_engine.backends.adapters import AdapterLimits, AdapterSite, SitePart
    from octavo_engine.backends.backend import BackendLimits, BackendStep
    from octavo_engine.backends.torch.adapter_tiles import AdapterTiles
    from octavo_engine.backends.torch.device_step import StepSizes
    from octavo_engine.backends.torch.landing import StreamMark
    from octavo_engine.models.config import ModelConfig
    from octavo_engine.weights.adapter import AdapterFiles

SPARE_ARENAS = 2  # beside one for each slot


class DeviceSite(NamedTuple):
    """A linear layer that adapters may add to."""

    first_part: int  # its entries in the table begin there
    sizes: tuple[int, ...]  # outputs of each part
    columns: int
    # [blocks, 4]: the outputs of each program, as part, first output within it, and within the
    # layer, and outputs of the part
    blocks: Tensor

    @property
    def num_parts(self) -> int:
        return len(self.sizes)


@dataclass(frozen=True, slots=True, eq=False)
class HostAdapter:
    """An adapter as an arena takes it."""

    data: Tensor  # uint8


@dataclass(frozen=True, slots=True, eq=False)
class Arenas:
    """The memory of all adapters as kernels see it."""

    values: Tensor  # [arenas, values]
    words: Tensor  # int32 [arenas, words]: the same bytes
    floats: Tensor  # float32 [arenas, words]: the same bytes
    partials: Tensor  # float32: what the parts of one product leave
    ranks: int  # of the highest adapter, padded
    cut: AdapterCut


class DeviceAdapters:
    """Of one backend. Steps are launched by one thread; adapters are packed in any."""

    def __init__(
        self,
        config: ModelConfig,
        sites: Sequence[AdapterSite],
        limits: AdapterLimits,
        *,
        device: torch.device,
        dtype: torch.dtype,
        batch_invariant: bool,
        make_mark: Callable[[], StreamMark],
    ) -> None:
        """Raises ConfigError if there is no room for as many and as high ones."""
        self._config, self._sites = config, list(sites)
        self.cut = AdapterCut(limits.num_slots, batch_invariant)
        self._device, self._dtype = device, dtype
        self._ranks = padded(limits.max_rank)
        self.sites = _device_sites(sites, device)
        self._num_entries = sum(site.num_parts for site in self.sites)
        self.arena_bytes = self._size_of(
            [(self._ranks, site.columns, size) for site in sites for size in site.sizes]
        )
        self._num_arenas = limits.num_slots + SPARE_ARENAS
        if device.type == "cuda":
            memory.require_adapters(device, self.num_bytes, limits.num_slots, limits.max_rank)
        self._make_mark = make_mark
        self._lock = threading.Lock()
        self._book = ArenaBook(limits.num_slots, self._num_arenas)
        self._free_from: dict[int, StreamMark] = {}  # by arena: when its last reader is done
        self._uploads: dict[int, Future[None]] = {}  # by arena
        self._uploader = AdapterUploader(device)
        self._partials = torch.empty(0, dtype=torch.float32, device=device)
        self._arenas: Arenas | None = None
        self.restore()

    @property
    def num_bytes(self) -> int:
        """Of all arenas."""
        return self._num_arenas * self.arena_bytes

    @property
    def arenas(self) -> Arenas:
        assert self._arenas is not None, "the adapters sleep"
        return self._arenas

    def workspace_bytes(self, limits: BackendLimits) -> int:
        """What `prepare` takes."""
        most = max(limits.max_tokens, limits.max_seqs)
        values = (
            self.cut.workspace_values(site.columns, site.num_parts * self._ranks, most)
            for site in self.sites
        )
        return 4 * max(values, default=0)

    def prepare(self, limits: BackendLimits) -> None:
        size = self.workspace_bytes(limits) // 4
        self._partials = torch.empty(size, dtype=torch.float32, device=self._device)
        self._arenas = self._views(self.arenas.values)

    def pack(self, files: AdapterFiles) -> HostAdapter:
        """Raises ModelError where it does not fit the model."""
        packed = self.pack_parts(in_float32(match_sites(files, self._config, self._sites)))
        self.expect(packed)
        return packed

    def pack_parts(self, parts: Mapping[int, Sequence[SitePart]]) -> HostAdapter:
        """By the number of the site."""
        shapes = [
            (padded(len(part.down)), self._sites[number].columns, len(part.up))
            for number, own in parts.items()
            for part in own
        ]
        data = torch.empty(self._size_of(shapes), dtype=torch.uint8)
        head = data[: self._head_bytes].zero_()
        entries = head.view(torch.int32).view(-1, ENTRY_WORDS)
        scales = head.view(torch.float32).view(-1, ENTRY_WORDS)
        values = data.view(self._dtype)
        place = self._head_bytes // self._dtype.itemsize
        for number, own in parts.items():
            for part in own:
                rank, (size, own) = padded(len(part.down)), part.up.shape
                columns = part.down.shape[1]
                first_up = place + padded(rank * columns, UNIT)
                down = values[place:][: rank * columns].view(rank, columns)
                up = values[first_up:][: rank * size].view(size, rank)
                down[:own].copy_(_tensor(part.down))
                up[:, :own].copy_(_tensor(part.up))
                down[own:].zero_()
                up[:, own:].zero_()
                entry = self.sites[number].first_part + part.part
                entries[entry, :3] = torch.tensor([rank, place // UNIT, first_up // UNIT])
                scales[entry, 3] = part.scale
                place = first_up + rank * size
        return HostAdapter(data)

    def expect(self, adapter: HostAdapter) -> None:
        """It is wanted soon: begin to send it, if there is a place."""
        with self._lock:
            if self._arenas is None:
                return
            arena = self._book.expect(adapter)
            if arena is not None:
                self._fill(arena, adapter)

    def place(self, slot: int, adapter: HostAdapter | None) -> None:
        """What the slot holds from the next step on."""
        with self._lock:
            if adapter is None:
                released = self._book.empty(slot)
                if released >= 0:
                    self._free_from[released] = self._make_mark()
                return
            placed = self._book.place(slot, adapter)
            if placed.released >= 0:
                self._free_from[placed.released] = self._make_mark()
            if placed.must_fill:
                self._fill(placed.arena, adapter)

    @contextmanager
    def without_ranks(self) -> Iterator[None]:
        """Slot 0 holds an adapter that changes nothing meanwhile: for steps of a warm-up."""
        self.place(0, self.pack_parts({}))
        try:
            yield
        finally:
            self.place(0, None)

    def cut_step(
        self, step: BackendStep, sizes: StepSizes
    ) -> tuple[StepSizes, AdapterTiles | None]:
        """Tiles, and sizes with room for them; None if the step has no adapters. Waits for
        adapters that are still on their way. Raises ValueError for an empty slot."""
        if step.adapters is None or int(step.adapters.max(initial=-1)) < 0:
            return sizes, None
        slots = step.adapters
        arenas = np.where(slots >= 0, self._book.of_slots[slots], np.int32(-1))
        if (arenas[slots >= 0] < 0).any():
            empty = int(slots[(slots >= 0) & (arenas < 0)][0])
            raise ValueError(f"a sequence has the adapter in slot {empty}, which is empty")
        self._wait(set(arenas[arenas >= 0].tolist()))
        if len(arenas) != len(step.token_ids):
            arenas = np.repeat(arenas, np.diff(step.seq_starts))
        per_tile = self.cut.rows_per_tile(sizes.tokens)
        num_tiles = self.cut.tiles(sizes.tokens, sizes.seqs)
        sizes = sizes._replace(adapter_tiles=num_tiles, adapter_rows=num_tiles * per_tile)
        return sizes, cut_rows(arenas, per_tile)

    def release(self) -> None:
        """Give the device's memory back; what slots hold is sent again by `restore`."""
        with self._lock:
            self._finish()
            self._book.forget_idle()
            self._arenas = None
            self._free_from.clear()

    def restore(self) -> None:
        with self._lock:
            if self._arenas is not None:
                return
            shape = (self._num_arenas, self.arena_bytes // self._dtype.itemsize)
            # Tables of zeros: what is there before its adapter has no ranks.
            self._arenas = self._views(torch.zeros(shape, dtype=self._dtype, device=self._device))
            self._make_mark().wait()  # uploads have a stream of their own: they must come after it
            for arena, adapter in self._book.placed.items():
                assert isinstance(adapter, HostAdapter)
                self._fill(arena, adapter)

    def close(self) -> None:
        with self._lock:
            self._uploader.close()
            self._arenas = None
            self._uploads.clear()
            self._partials = torch.empty(0)

    def _fill(self, arena: int, adapter: HostAdapter) -> None:
        place = self.arenas.values[arena].view(torch.uint8)[: len(adapter.data)]
        free_from = self._free_from.pop(arena, None)
        self._uploads[arena] = self._uploader.begin(place, adapter.data, free_from)

    def _wait(self, arenas: set[int]) -> None:
        with self._lock:
            uploads = {a: self._uploads.pop(a) for a in arenas if a in self._uploads}
        for arena, upload in uploads.items():
            try:
                upload.result()
            except BaseException:
                with self._lock:
                    self._book.lose(arena)
                raise

    def _finish(self) -> None:
        """Wait for all uploads, whatever comes of them."""
        for upload in self._uploads.values():
            upload.exception()
        self._uploads.clear()

    def _views(self, values: Tensor) -> Arenas:
        words, floats = values.view(torch.int32), values.view(torch.float32)
        return Arenas(values, words, floats, self._partials, self._ranks, self.cut)

    @property
    def _head_bytes(self) -> int:
        return padded(4 * ENTRY_WORDS * self._num_entries, 4 * UNIT)

    def _size_of(self, shapes: Sequence[tuple[int, int, int]]) -> int:
        """Bytes of an adapter with parts of so many ranks, columns and outputs."""
        values = sum(padded(rank * columns, UNIT) + rank * size for rank, columns, size in shapes)
        return padded(self._head_bytes + values * self._dtype.itemsize, 4 * UNIT)


def _device_sites(sites: Sequence[AdapterSite], device: torch.device) -> list[DeviceSite]:
    found, first_part = [], 0
    for site in sites:
        blocks, place = [], 0
        for part, size in enumerate(site.sizes):
            blocks += [(part, n, place + n, size) for n in range(0, size, BLOCK_OUTPUTS)]
            place += size
        table = torch.tensor(blocks, dtype=torch.int32).to(device)
        found.append(DeviceSite(first_part, site.sizes, site.columns, table))
        first_part += len(site.sizes)
    return found


def _tensor(values: np.ndarray[tuple[int, ...], np.dtype[np.float32]]) -> Tensor:
    """Of the file itself, which nobody may write to."""
    return torch.from_numpy(values if values.flags.writeable else values.copy())
