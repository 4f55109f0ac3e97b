"""KV blocks beside the pool: saves what was computed, and brings it back for sequences that wait.

A block that was computed is copied to host memory and disk at once, so that it may be overwritten
at any time. A waiting sequence whose prefix goes on outside the pool sits out while the blocks are
read, if that is quicker than computing them; they are then published in the pool, and it is
admitted like any other. Whatever goes wrong with a tier costs a computation and nothing else.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from octavo_engine.backends.backend import MovesKV
from octavo_engine.config import BLOCK_SIZE
from octavo_engine.errors import ConfigError
from octavo_engine.kv.restore import place_blocks, wanted_blocks
from octavo_engine.state.outputs import TierStats
from octavo_engine.tiers.disk_store import DiskStore
from octavo_engine.tiers.host_store import HostStore
from octavo_engine.tiers.page import block_name
from octavo_engine.tiers.price import TierMeter, is_worth_loading

if TYPE_CHECKING:
    from collections.abc import Callable

    from octavo_engine.backends.backend import Backend
    from octavo_engine.config import EngineConfig
    from octavo_engine.kv.manager import KVManager, PrefixMatch
    from octavo_engine.kv.restore import BlockTurn
    from octavo_engine.scheduling.scheduler import Scheduler
    from octavo_engine.scheduling.step_time import StepTimeModel
    from octavo_engine.state.sequence import Sequence
    from octavo_engine.tiers.page import BlockName, Page

logger = logging.getLogger(__name__)

LEAST_PATIENCE_S = 1.0  # for a read; one that takes much longer than foreseen is given up
PATIENCE = 4.0  # times what it should have taken
# What is assumed before anything was read: low, so that no more than a little time can be lost.
HOST_LATENCY_S, HOST_BYTES_PER_S = 1e-3, 2e9
DISK_LATENCY_S, DISK_BYTES_PER_S = 5e-3, 2e8
GIB = 1 << 30


@dataclass(slots=True)
class TierFetch:
    """Blocks on their way to a sequence."""

    sequence: Sequence
    turns: list[BlockTurn]
    pages: dict[BlockName, Page]  # those that are there
    started_at: float
    give_up_at: float
    num_disk_blocks: int = 0
    read_at: float | None = None  # set last, by the reading thread
    read: list[tuple[BlockName, Page | None]] = field(default_factory=list)


class KVTiers:
    """Host memory before disk; either may be missing. The engine's thread owns it."""

    def __init__(
        self,
        kv: KVManager,
        mover: MovesKV,
        *,
        page_bytes: int,
        host: HostStore | None = None,
        disk: DiskStore | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._kv, self._mover, self._page_bytes, self._now = kv, mover, page_bytes, now
        self.host, self.disk = host, disk
        self.stats = TierStats()
        self._host_meter = TierMeter(latency_s=HOST_LATENCY_S, bytes_per_s=HOST_BYTES_PER_S)
        self._disk_meter = TierMeter(latency_s=DISK_LATENCY_S, bytes_per_s=DISK_BYTES_PER_S)
        self._fetches: dict[str, TierFetch] = {}  # by request id
        self._woken = threading.Event()
        kv.saves = []

    @property
    def is_fetching(self) -> bool:
        return bool(self._fetches)

    def save(self) -> None:
        """Copy what the last step computed; before the next one is planned."""
        saves = self._kv.saves
        if self._kv.spoiled:
            self._drop_spoiled()
        if not saves:
            return
        self._kv.saves = []
        wanted = [
            (name, save.block_id)
            for save in saves
            if not self._is_everywhere(name := block_name(save.digest, save.group))
            and self._kv.pool.blocks[save.block_id].digest == save.digest
        ]
        if not wanted:
            return
        pages = self._mover.save_blocks([block_id for _, block_id in wanted])
        self.stats.saved_bytes += len(pages) * self._page_bytes
        for (name, _), page in zip(wanted, pages, strict=True):
            if self.host is not None:
                self.host.put(name, page)
            if self.disk is not None:
                self.disk.put(name, page)

    def defers(self, sequence: Sequence, match: PrefixMatch, step_time: StepTimeModel) -> bool:
        """Whether blocks are being read for it; begins with that where it is worth it."""
        if sequence.request_id in self._fetches:
            return True
        looks = sequence.num_preemptions + sequence.num_suspensions
        params = sequence.request.params
        if (
            sequence.tiers_looked == looks
            or params.skip_reading_prefix_cache
            or sequence.wants_prompt_scores
        ):
            return False
        sequence.tiers_looked = looks
        end, turns = wanted_blocks(self._kv, sequence, self._is_outside)
        num_tokens = end * BLOCK_SIZE - match.num_tokens
        if num_tokens <= 0 or not turns:
            return False
        return self._begin(sequence, turns, step_time.prefill_s(num_tokens))

    def settle(self) -> None:
        """Bring what was read into the pool, before a step is planned."""
        self._kv.saves = []  # of a step that failed
        if not self._fetches:
            return
        now = self._now()
        for request_id, fetch in list(self._fetches.items()):
            if fetch.read_at is None:
                if now < fetch.give_up_at:
                    continue
                self.stats.failed_reads += 1
                self._disk_meter.observe(
                    fetch.num_disk_blocks * self._page_bytes, now - fetch.started_at
                )
            else:
                self._take(fetch, fetch.read_at)
            del self._fetches[request_id]

    def wait(self, timeout_s: float) -> None:
        """Sleep until something was read, for a caller that has nothing else to do."""
        self._woken.wait(timeout_s)
        self._woken.clear()

    def read_stats(self) -> TierStats:
        """Where the tiers stand; the counters only grow."""
        stats = self.stats
        if self.host is not None:
            stats.host_blocks, stats.host_bytes = len(self.host), self.host.num_bytes
        if self.disk is not None:
            stats.disk_blocks, stats.disk_bytes = self.disk.num_blocks, self.disk.num_bytes
            stats.unsaved_blocks = self.disk.num_unsaved
        return stats

    def close(self) -> None:
        if self.disk is not None:
            self.disk.close()

    def _begin(self, sequence: Sequence, turns: list[BlockTurn], recompute_s: float) -> bool:
        names = [block_name(turn.digest, turn.group) for turn in turns]
        pages: dict[BlockName, Page] = {}
        if self.host is not None:
            pages = {name: page for name in names if (page := self.host.get(name)) is not None}
        rest = [name for name in names if name not in pages]
        load_s = self._host_meter.seconds(len(pages) * self._page_bytes)
        load_s += self._disk_meter.seconds(len(rest) * self._page_bytes)
        if not is_worth_loading(load_s=load_s, recompute_s=recompute_s):
            self.stats.refused += 1
            (self._disk_meter if rest else self._host_meter).refused()
            return False
        now = self._now()
        patience = max(LEAST_PATIENCE_S, PATIENCE * load_s)
        fetch = TierFetch(sequence, turns, pages, now, now + patience, num_disk_blocks=len(rest))
        self._fetches[sequence.request_id] = fetch
        if rest and self.disk is not None:
            self._read(fetch, rest, self.disk)
        else:
            fetch.read_at = now
        return True

    def _read(self, fetch: TierFetch, names: list[BlockName], disk: DiskStore) -> None:
        def done(pages: list[Page | None]) -> None:
            fetch.read = list(zip(names, pages, strict=True))
            fetch.read_at = self._now()
            self._woken.set()

        disk.fetch(names, done)

    def _take(self, fetch: TierFetch, read_at: float) -> None:
        """Publish what was read and put its bytes there, as far as it goes."""
        pages, sequence = dict(fetch.pages), fetch.sequence
        for name, page in fetch.read:
            if page is None:
                self.stats.failed_reads += 1
                continue
            pages[name] = page
            if self.host is not None:
                self.host.put(name, page)
        num_read = fetch.num_disk_blocks * self._page_bytes
        self._disk_meter.observe(num_read, read_at - fetch.started_at)
        self.stats.disk_load_seconds += read_at - fetch.started_at if num_read else 0.0
        turns = [t for t in fetch.turns if block_name(t.digest, t.group) in pages]
        if sequence.finish_reason is not None or (self._kv.has_windows and turns != fetch.turns):
            return
        started_at = self._now()
        placed = place_blocks(self._kv, sequence, turns)
        content = [pages[block_name(turn.digest, turn.group)] for turn, _ in placed]
        try:
            self._mover.load_blocks([block.id for _, block in placed], content)
        except Exception:
            for turn, block in placed:
                self._kv.pool.caches[turn.group].retract(block)
            logger.exception("KV blocks could not be copied into the pool")
            return
        self._count(placed_names={block_name(t.digest, t.group) for t, _ in placed}, fetch=fetch)
        seconds = self._now() - started_at
        self._host_meter.observe(len(placed) * self._page_bytes, seconds)
        self.stats.host_load_seconds += seconds

    def _count(self, placed_names: set[BlockName], fetch: TierFetch) -> None:
        from_host = sum(name in fetch.pages for name in placed_names)
        self.stats.host_hit_blocks += from_host
        self.stats.disk_hit_blocks += len(placed_names) - from_host
        self.stats.loaded_bytes += len(placed_names) * self._page_bytes

    def _drop_spoiled(self) -> None:
        groups = range(self._kv.num_groups)
        names = [block_name(digest, group) for digest in self._kv.spoiled for group in groups]
        self._kv.spoiled = []
        if self.host is not None:
            self.host.drop(names)
        if self.disk is not None:
            self.disk.drop(names)

    def _is_outside(self, digest: bytes, group: int) -> bool:
        name = block_name(digest, group)
        return any(store is not None and name in store for store in (self.host, self.disk))

    def _is_everywhere(self, name: BlockName) -> bool:
        return all(store is None or name in store for store in (self.host, self.disk))


def make_tiers(
    config: EngineConfig,
    backend: Backend,
    scheduler: Scheduler,
    cache_key: bytes,
    now: Callable[[], float] = time.monotonic,
) -> KVTiers | None:
    """The tiers that the settings name; None without any. Raises ConfigError."""
    if not config.kv_offloading_size and config.kv_disk_path is None:
        return None
    if not isinstance(backend, MovesKV):
        raise ConfigError(
            f"--kv-offloading-size and --kv-disk-path are not supported by the backend "
            f"{backend.name}: leave them out; models with a page of ours have them with "
            "--device cpu and --tensor-parallel-size 1, torch or sim"
        )
    if scheduler.kv.states is not None:
        raise ConfigError(
            "--kv-offloading-size and --kv-disk-path are not supported for models with recurrent "
            "states: a prefix is found again by a snapshot of the state; leave them out"
        )
    page_bytes = backend.kv_bytes_per_block
    host = disk = None
    if config.kv_offloading_size:
        host = HostStore(int(config.kv_offloading_size * GIB))
    if config.kv_disk_path is not None:
        key = disk_key(cache_key, backend)
        max_bytes = int(config.kv_disk_size * GIB)
        try:
            disk = DiskStore(
                Path(config.kv_disk_path), key, page_bytes=page_bytes, max_bytes=max_bytes
            )
        except OSError as error:
            raise ConfigError(
                f"--kv-disk-path {config.kv_disk_path} cannot be used: {error.strerror or error}"
            ) from None
        logger.info("%d KV blocks are on disk in %s", disk.num_blocks, config.kv_disk_path)
    return KVTiers(scheduler.kv, backend, page_bytes=page_bytes, host=host, disk=disk, now=now)


def disk_key(cache_key: bytes, backend: Backend) -> bytes:
    """What separates files of engines whose blocks differ: the model's content and the settings
    (both in `cache_key`), the layout of a page, and the build of the kernels."""
    digest = hashlib.blake2b(cache_key, digest_size=16, person=b"octavo tier")
    digest.update(repr((backend.cache_layout, backend.kv_bytes_per_block)).encode())
    digest.update(_build_digest() if backend.name.startswith("native") else b"")
    return digest.digest()


def _build_digest() -> bytes:
    """Of the compiled module: another build may round differently."""
    from octavo_engine import _native

    assert _native.__file__ is not None
    with Path(_native.__file__).open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()
