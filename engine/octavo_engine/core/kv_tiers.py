"""KV blocks beside the pool: saves what was computed, and brings it back for sequences that wait.

A block that was computed is copied to host memory and disk soon (`core.kv_saves`), so that it may
be overwritten. A waiting sequence whose prefix goes on outside the pool sits out while the blocks
are read, if that is quicker than computing them; they are then published in the pool, as many at a
time as can be copied there, and it is admitted like any other. Other engines are one more tier, but
only they know what they have: a sequence waits for their answer first. Where one is computing its
prompt at that moment, the blocks are fetched as they come. Whatever goes wrong with a tier costs a
computation and nothing else.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from octavo_engine.backends.backend import CopiesKV, MovesKV, NamesBuild
from octavo_engine.config import BLOCK_SIZE
from octavo_engine.core.direct_copies import DirectCopies
from octavo_engine.core.kv_saves import BlockSaves
from octavo_engine.core.kv_source import OwnBlocks
from octavo_engine.core.tier_places import StoredPlaces
from octavo_engine.encryption import read_encryption_keys
from octavo_engine.errors import ConfigError
from octavo_engine.kv.restore import place_blocks, wanted_blocks
from octavo_engine.protocol.kv_events import DISK_MEDIUM, HOST_MEDIUM
from octavo_engine.state.outputs import TierStats
from octavo_engine.tiers.disk_store import DiskStore
from octavo_engine.tiers.host_store import HostStore
from octavo_engine.tiers.page import block_name
from octavo_engine.tiers.peer_wire import MAX_NAMES
from octavo_engine.tiers.price import TierMeter, is_worth_loading

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from octavo_engine.backends.backend import Backend, BlockCopies, PageCopy
    from octavo_engine.config import EngineConfig
    from octavo_engine.core.kv_events.tier_events import TierEvents
    from octavo_engine.core.kv_peers import PeerBlocks, PeerEngines
    from octavo_engine.kv.manager import KVManager, PrefixMatch
    from octavo_engine.kv.restore import BlockTurn
    from octavo_engine.scheduling.scheduler import Scheduler
    from octavo_engine.scheduling.step_time import StepTimeModel
    from octavo_engine.state.sequence import Sequence
    from octavo_engine.tiers.block_server import BlockServer
    from octavo_engine.tiers.page import BlockName, Page
    from octavo_engine.tiers.peer_engine import PeerEngine

logger = logging.getLogger(__name__)

LEAST_PATIENCE_S = 1.0  # for a read; one that takes much longer than foreseen is given up
PATIENCE = 4.0  # times what it should have taken
LEAST_FOLLOW_S = 5.0  # without a further block of a prompt that another engine computes
# What is assumed before anything was read: low, so that no more than a little time can be lost.
DISK_LATENCY_S, DISK_BYTES_PER_S = 5e-3, 2e8
TRIED_BYTES = 8 << 20  # that are read once of a disk which seems too slow
FLUSH_S = 10.0  # for what is still to be saved when the engine ends or sleeps
GIB = 1 << 30


@dataclass(slots=True)
class TierRead:
    """Blocks that a thread reads from one tier."""

    tier: Literal["disk", "peer"]
    meter: TierMeter
    names: list[BlockName]
    started_at: float  # by the reading thread, where others are read first
    pages: dict[BlockName, Page] = field(default_factory=dict)  # grows, by the reading thread
    ended_at: float | None = None  # set last, by the reading thread
    is_followed: bool = False  # another engine is computing them
    num_seen: int = 0  # of a followed read's pages, when its patience began
    is_wanted: bool = True  # false: the thread need not go on


@dataclass(slots=True)
class TierFetch:
    """Blocks on their way to a sequence."""

    sequence: Sequence
    turns: list[BlockTurn]
    pages: dict[BlockName, Page]  # those that are there
    give_up_at: float
    patience_s: float
    reads: list[TierRead] = field(default_factory=list)
    rest: list[tuple[BlockTurn, Page]] | None = None  # to be placed, once all is read
    copy: PageCopy | None = None  # of the first of them


class KVTiers:
    """Host memory before disk before other engines; each may be missing. The engine's thread owns
    it."""

    def __init__(
        self,
        kv: KVManager,
        mover: MovesKV,
        *,
        page_bytes: int,
        host: HostStore | None = None,
        disk: DiskStore | None = None,
        will_compute: Callable[[Collection[bytes]], bool] = lambda digests: False,
        now: Callable[[], float] = time.monotonic,
        open_copies: Callable[[Callable[[], None]], BlockCopies] | None = None,
    ) -> None:
        """Other engines are added by `use_peers`. `will_compute`: as for OwnBlocks. `open_copies`
        gives copies that nobody waits for; it gets what they call when something is done."""
        self._kv, self._mover, self._page_bytes, self._now = kv, mover, page_bytes, now
        self.host, self.disk, self._will_compute = host, disk, will_compute
        self.stats = TierStats()
        self._disk_meter = TierMeter(latency_s=DISK_LATENCY_S, bytes_per_s=DISK_BYTES_PER_S)
        self._fetches: dict[str, TierFetch] = {}  # by request id
        self._trial: TierRead | None = None  # of the disk, once
        self._woken = threading.Event()
        self.wake: Callable[[], None] | None = None  # the engine's thread; called on other threads
        self._own: OwnBlocks | None = None
        self._server: BlockServer | None = None
        self._peers: PeerEngines | None = None
        copies = DirectCopies(mover) if open_copies is None else open_copies(self.woken)
        self._copies: BlockCopies = copies
        self._host_meter = TierMeter(latency_s=copies.latency_s, bytes_per_s=copies.bytes_per_s)
        self._saves = BlockSaves(kv.pool, copies, is_stored=self._is_everywhere, store=self._store)
        kv.saves = []
        if host is not None or disk is not None:
            kv.residency.use_tiers(StoredPlaces(host, disk))

    @property
    def is_fetching(self) -> bool:
        return bool(self._fetches) or (self._peers is not None and self._peers.is_waiting)

    @property
    def num_followed_tokens(self) -> int:
        """Of sequences whose prompts other engines are computing."""
        return sum(
            len(fetch.sequence.token_ids)
            for fetch in self._fetches.values()
            if any(read.is_followed for read in fetch.reads)
        )

    def use_peers(
        self, peers: PeerEngines | None, own: OwnBlocks | None, server: BlockServer | None
    ) -> None:
        """Get blocks from other engines, and serve `own` ones."""
        self._peers, self._own, self._server = peers, own, server

    def report_to(self, events: TierEvents) -> None:
        """Report what comes into the stores and leaves them."""
        if self.host is not None:
            self.host.listeners.append(events.reports_of(HOST_MEDIUM))
        if self.disk is not None:
            self.disk.listeners.append(events.reports_of(DISK_MEDIUM))

    def own_blocks(self) -> OwnBlocks:
        """What other engines can get from here."""
        return OwnBlocks(
            self._kv,
            self._mover,
            page_bytes=self._page_bytes,
            host=self.host,
            disk=self.disk,
            wake=self.woken,
            will_compute=self._will_compute,
        )

    def woken(self) -> None:
        """Something was read; called on other threads."""
        self._woken.set()
        if self.wake is not None:
            self.wake()

    def serve(self) -> None:
        """Copy blocks that other engines wait for, and take in what was copied."""
        self._saves.advance()
        if self._own is not None:
            self.stats.served_bytes += self._own.serve()

    def save(self) -> None:
        """Have copied what the last step computed; before the next one is planned."""
        if self._kv.spoiled:
            self._drop_spoiled()
        if self._kv.saves:
            self._saves.add(self._kv.saves)
            self._kv.saves = []
        self._saves.advance()

    def flush(self) -> None:
        """Wait until what the pool still has is saved; before it is forgotten."""
        self._saves.flush(FLUSH_S)

    def defers(self, sequence: Sequence, match: PrefixMatch, step_time: StepTimeModel) -> bool:
        """Whether blocks are being read for it; begins with that where it is worth it."""
        request_id, peers = sequence.request_id, self._peers
        if request_id in self._fetches or (peers is not None and peers.is_looking(request_id)):
            return True
        found = None if peers is None else peers.take_found(request_id)
        if found is not None:
            return self._begin(sequence, match, step_time, found) or self._begin(
                sequence, match, step_time, None
            )
        looks = sequence.num_preemptions + sequence.num_suspensions
        params = sequence.request.params
        if (
            sequence.tiers_looked == looks
            or params.skip_reading_prefix_cache
            or sequence.wants_prompt_scores
        ):
            return False
        sequence.tiers_looked = looks
        source = sequence.request.kv_source
        if peers is not None and source is not None and source.is_computing and looks == 0:
            return self._follow(sequence, match, step_time, peers) or self._begin(
                sequence, match, step_time, None
            )
        if peers is not None and self._look_up(sequence, match, step_time, peers):
            return True
        return self._begin(sequence, match, step_time, None)

    def settle(self) -> None:
        """Bring what was read into the pool, before a step is planned."""
        self._kv.saves = []  # of a step that failed
        self.serve()
        self._end_trial()
        if self._peers is not None:
            self._peers.settle()
        if not self._fetches:
            return
        now = self._now()
        for request_id, fetch in list(self._fetches.items()):
            if fetch.rest is not None:
                self._place(request_id, fetch)
                continue
            late = [read for read in fetch.reads if read.ended_at is None]
            if late and self._is_awaited(fetch, now):
                continue
            for read in late:
                read.is_wanted = False
                if read.is_followed:  # its time says nothing of the connection
                    continue
                self.stats.failed_reads += 1
                read.meter.observe(len(read.names) * self._page_bytes, now - read.started_at)
            fetch.rest = self._take(fetch)
            self._place(request_id, fetch)

    def wait(self, timeout_s: float) -> None:
        """Sleep until something was read, for a caller that has nothing else to do."""
        self._woken.wait(timeout_s)
        self._woken.clear()

    def read_stats(self) -> TierStats:
        """Where the tiers stand; the counters only grow."""
        stats = self.stats
        stats.saved_bytes = self._saves.num_saved * self._page_bytes
        stats.unsaved_blocks = self._saves.num_unsaved
        if self.host is not None:
            stats.host_blocks, stats.host_bytes = len(self.host), self.host.num_bytes
        if self.disk is not None:
            stats.disk_blocks, stats.disk_bytes = self.disk.num_blocks, self.disk.num_bytes
            stats.unsaved_blocks += self.disk.num_unsaved
        if self._peers is not None:
            stats.peer_failures = self._peers.num_failures
        return stats

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        if self._peers is not None:
            self._peers.close()
        self.flush()
        self._copies.close()
        if self.disk is not None:
            self.disk.close()

    def _is_awaited(self, fetch: TierFetch, now: float) -> bool:
        """Whether a read that has not ended may still."""
        for read in fetch.reads:
            if read.is_followed and fetch.sequence.finish_reason is not None:
                return False
            if read.is_followed and len(read.pages) > read.num_seen:
                read.num_seen = len(read.pages)
                fetch.give_up_at = now + fetch.patience_s
        return now < fetch.give_up_at

    def _follow(
        self, sequence: Sequence, match: PrefixMatch, step_time: StepTimeModel, peers: PeerEngines
    ) -> bool:
        """Begin to fetch the blocks of a prompt that another engine is computing, if they come
        quicker than this engine computes."""
        candidates = peers.candidates(sequence.request.kv_source)
        end, turns = wanted_blocks(self._kv, sequence, lambda digest, group: True)
        num_tokens = end * BLOCK_SIZE - match.num_tokens
        names = [block_name(turn.digest, turn.group) for turn in turns]
        pages: dict[BlockName, Page] = {}
        if self.host is not None:
            pages = {name: page for name in names if (page := self.host.get(name)) is not None}
        rest = [name for name in names if name not in pages]
        if not candidates or num_tokens <= 0 or not 0 < len(rest) <= MAX_NAMES:
            return False
        (peer,), recompute_s = candidates, step_time.prefill_s(num_tokens)
        load_s = peer.meter.seconds(len(rest) * self._page_bytes)
        if not is_worth_loading(load_s=load_s, recompute_s=recompute_s):
            self.stats.refused += 1
            peer.meter.refused()
            return False
        now = self._now()
        patience_s = max(LEAST_FOLLOW_S, PATIENCE * recompute_s)
        read = TierRead("peer", peer.meter, rest, now, is_followed=True)
        self._fetches[sequence.request_id] = TierFetch(
            sequence, turns, pages, now + patience_s, patience_s, [read]
        )

        def done() -> None:
            read.ended_at = self._now()
            self.woken()

        peers.follower(peer).follow(
            rest, read.pages.__setitem__, done, is_wanted=lambda: read.is_wanted
        )
        return True

    def _look_up(
        self, sequence: Sequence, match: PrefixMatch, step_time: StepTimeModel, peers: PeerEngines
    ) -> bool:
        """Begin to find out which other engine has its blocks, if any could be quicker than
        computing."""
        candidates = peers.candidates(sequence.request.kv_source)
        if not candidates:
            return False
        end, turns = wanted_blocks(self._kv, sequence, lambda digest, group: True)
        num_tokens = end * BLOCK_SIZE - match.num_tokens
        if num_tokens <= 0 or not turns:
            return False
        recompute_s = step_time.prefill_s(num_tokens)
        num_bytes = len(turns) * self._page_bytes
        quick = []
        for peer in candidates:
            if is_worth_loading(load_s=peer.meter.seconds(num_bytes), recompute_s=recompute_s):
                quick.append(peer)
            else:
                self.stats.refused += 1
                peer.meter.refused()
        # Of a window the blocks before the end are wanted, and where the end is nobody knows yet.
        names = [
            block_name(digest, group)
            for group in range(self._kv.num_groups)
            for digest in sequence.digests[:end]
            if self._kv.pool.caches[group].get(digest) is None
            and not self._is_outside(digest, group)
        ]
        if not quick or not names:
            return False
        peers.look_up(sequence, quick, names)
        return True

    def _begin(
        self,
        sequence: Sequence,
        match: PrefixMatch,
        step_time: StepTimeModel,
        found: PeerBlocks | None,
    ) -> bool:
        """Begin to read its blocks, if that is quicker than computing them."""
        at_peer: set[BlockName] = set() if found is None else found.names
        end, turns = wanted_blocks(
            self._kv,
            sequence,
            lambda digest, group: (
                self._is_outside(digest, group) or block_name(digest, group) in at_peer
            ),
        )
        num_tokens = end * BLOCK_SIZE - match.num_tokens
        if num_tokens <= 0 or not turns:
            return False
        names = [block_name(turn.digest, turn.group) for turn in turns]
        pages: dict[BlockName, Page] = {}
        if self.host is not None:
            pages = {name: page for name in names if (page := self.host.get(name)) is not None}
        now = self._now()
        reads: list[TierRead] = []
        rest = [name for name in names if name not in pages]
        if self.disk is not None and (there := [name for name in rest if name in self.disk]):
            reads.append(TierRead("disk", self._disk_meter, there, now))
            rest = [name for name in rest if name not in self.disk]
        if found is not None and rest:
            reads.append(TierRead("peer", found.peer.meter, rest, now))
        load_s = self._host_meter.seconds(len(pages) * self._page_bytes)
        load_s += sum(self._seconds(read) for read in reads)
        if not is_worth_loading(load_s=load_s, recompute_s=step_time.prefill_s(num_tokens)):
            self.stats.refused += 1
            for meter in [read.meter for read in reads] or [self._host_meter]:
                meter.refused()
            self._try_disk(reads)
            return False
        patience = max(LEAST_PATIENCE_S, PATIENCE * load_s)
        fetch = TierFetch(sequence, turns, pages, now + patience, patience, reads)
        self._fetches[sequence.request_id] = fetch
        for read in reads:
            if read.tier == "disk" and self.disk is not None:
                self._read_disk(read, self.disk)
            elif found is not None:
                self._read_peer(read, found.peer, patience)
        return True

    def _seconds(self, read: TierRead) -> float:
        """Until it is done. One engine is read from for one sequence after the other."""
        num_blocks = len(read.names)
        if read.tier == "peer":
            num_blocks += sum(
                len(other.names) - len(other.pages)
                for fetch in self._fetches.values()
                for other in fetch.reads
                if other.meter is read.meter and other.ended_at is None and not other.is_followed
            )
        return read.meter.seconds(num_blocks * self._page_bytes)

    def _try_disk(self, reads: list[TierRead]) -> None:
        """What was assumed of the disk spoke against it: read a little, to know better."""
        most = max(1, TRIED_BYTES // self._page_bytes)
        for read in reads:
            if read.tier != "disk" or self.disk is None or self._trial is not None:
                continue
            self._trial = TierRead("disk", self._disk_meter, read.names[:most], self._now())
            self._read_disk(self._trial, self.disk)

    def _end_trial(self) -> None:
        trial = self._trial
        if trial is None or trial.ended_at is None or not trial.pages:
            return
        num_bytes = len(trial.pages) * self._page_bytes
        trial.meter.replace(num_bytes, trial.ended_at - trial.started_at)
        trial.pages = {}

    def _read_disk(self, read: TierRead, disk: DiskStore) -> None:
        def done(pages: list[Page | None]) -> None:
            there = zip(read.names, pages, strict=True)
            read.pages.update((name, page) for name, page in there if page is not None)
            read.ended_at = self._now()
            self.woken()

        disk.fetch(read.names, done)

    def _read_peer(self, read: TierRead, peer: PeerEngine, timeout_s: float) -> None:
        def begun() -> None:
            read.started_at = self._now()  # what it waited for others says nothing of the peer

        def done() -> None:
            read.ended_at = self._now()
            self.woken()

        peer.fetch(read.names, timeout_s, read.pages.__setitem__, done, begun=begun)

    def _take(self, fetch: TierFetch) -> list[tuple[BlockTurn, Page]]:
        """What was read, as far as it is of use."""
        pages, sequence = dict(fetch.pages), fetch.sequence
        for read in fetch.reads:
            came = dict(read.pages)  # of a late one the thread may add more
            pages |= came
            if read.ended_at is None:
                continue
            self.stats.failed_reads += len(read.names) - len(came)
            if read.is_followed:
                continue
            seconds = read.ended_at - read.started_at
            read.meter.observe(len(came) * self._page_bytes, seconds)
            if read.tier == "disk":
                self.stats.disk_load_seconds += seconds
            else:
                self.stats.peer_load_seconds += seconds
        turns = [t for t in fetch.turns if block_name(t.digest, t.group) in pages]
        if sequence.finish_reason is not None or (self._kv.has_windows and turns != fetch.turns):
            self._keep(fetch, pages)
            return []
        return [(turn, pages[block_name(turn.digest, turn.group)]) for turn in turns]

    def _place(self, request_id: str, fetch: TierFetch) -> None:
        """Publish what was read and put its bytes there, as much at a time as is copied; all of it
        was when the fetch is forgotten."""
        while fetch.copy is not None or fetch.rest:
            if fetch.copy is None:
                assert fetch.rest is not None
                room = self._copies.num_loads_free
                if fetch.sequence.finish_reason is not None or not room:
                    break
                fetch.copy = self._copies.begin_load([page for _, page in fetch.rest[:room]])
            if not fetch.copy.is_done:
                return
            self._place_copied(fetch, fetch.copy)
            fetch.copy = None
        if fetch.rest and fetch.sequence.finish_reason is None:
            return  # until there is room again
        del self._fetches[request_id]

    def _place_copied(self, fetch: TierFetch, copy: PageCopy) -> None:
        """The first blocks that are left of a fetch. Without room in the pool the others go."""
        assert fetch.rest is not None
        count = len(copy.pages)
        turns = [turn for turn, _ in fetch.rest[:count]]
        fetch.rest = fetch.rest[count:]
        pages = {block_name(t.digest, t.group): p for t, p in zip(turns, copy.pages, strict=True)}
        self._keep(fetch, pages)
        if fetch.sequence.finish_reason is not None or copy.is_failed:
            self._copies.drop(copy)
            fetch.rest = []
            return
        started_at = self._now()
        placed = place_blocks(self._kv, fetch.sequence, turns)
        ids = {block_name(turn.digest, turn.group): block.id for turn, block in placed}
        try:
            self._copies.place(copy, [ids.get(name, -1) for name in pages])
        except Exception:
            for turn, block in placed:
                self._kv.pool.caches[turn.group].retract(block)
            logger.exception("KV blocks could not be copied into the pool")
            fetch.rest = []
            return
        if not placed:
            fetch.rest = []
        self._count(set(ids), fetch)
        seconds = copy.seconds + self._now() - started_at
        self._host_meter.observe(len(placed) * self._page_bytes, seconds)
        self.stats.host_load_seconds += seconds

    def _keep(self, fetch: TierFetch, pages: Mapping[BlockName, Page]) -> None:
        """In host memory, what came from elsewhere."""
        if self.host is None:
            return
        for name, page in pages.items():
            if name not in fetch.pages:
                self.host.put(name, page)

    def _store(self, name: BlockName, page: Page) -> None:
        if self.host is not None:
            self.host.put(name, page)
        if self.disk is not None:
            self.disk.put(name, page)

    def _count(self, placed_names: set[BlockName], fetch: TierFetch) -> None:
        stats = self.stats
        from_peer = sum(
            name in placed_names
            for read in fetch.reads
            if read.tier == "peer"
            for name in read.names
        )
        from_host = sum(name in fetch.pages for name in placed_names)
        stats.host_hit_blocks += from_host
        stats.peer_hit_blocks += from_peer
        stats.disk_hit_blocks += len(placed_names) - from_host - from_peer
        stats.loaded_bytes += len(placed_names) * self._page_bytes

    def _drop_spoiled(self) -> None:
        groups = range(self._kv.num_groups)
        names = [block_name(digest, group) for digest in self._kv.spoiled for group in groups]
        self._kv.spoiled = []
        self._saves.drop(names)
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
    is_alone = config.kv_transfer is None
    if is_alone and not config.kv_offloading_size and config.kv_disk_path is None:
        return None
    if config.device == "plugin":
        raise ConfigError(
            "--kv-offloading-size, --kv-disk-path and --kv-transfer-config are not supported by "
            "--device plugin yet: leave them out, or use --device cuda or cpu"
        )
    flags = "--kv-offloading-size and --kv-disk-path are"
    if not is_alone:
        flags = "--kv-offloading-size, --kv-disk-path and --kv-transfer-config are"
    if not isinstance(backend, MovesKV):
        raise ConfigError(
            f"{flags} not supported by the backend {backend.name}: leave them out; models with a "
            "page of ours have them with --device cpu and --tensor-parallel-size 1, cuda, torch or "
            "sim"
        )
    if scheduler.kv.states is not None:
        raise ConfigError(
            f"{flags} not supported for models with recurrent states: a prefix is found again by a "
            f"snapshot of the state; leave {'them' if is_alone else 'it'} out"
        )
    page_bytes = backend.kv_bytes_per_block
    host_bytes = int(config.kv_offloading_size * GIB)
    host = disk = None
    if config.kv_offloading_size:
        host = HostStore(host_bytes)
    open_copies = None
    if isinstance(backend, CopiesKV):
        open_copies = partial(
            _open_copies, backend, host_bytes, is_stored=config.kv_disk_path is not None
        )
    if config.kv_disk_path is not None:
        key = disk_key(cache_key, backend)
        max_bytes = int(config.kv_disk_size * GIB)
        try:
            disk = DiskStore(
                Path(config.kv_disk_path), key, page_bytes=page_bytes, max_bytes=max_bytes,
                encryption=read_encryption_keys(config.encryption_key_file),
            )  # fmt: skip
        except OSError as error:
            raise ConfigError(
                f"--kv-disk-path {config.kv_disk_path} cannot be used: {error.strerror or error}"
            ) from None
        logger.info("%d KV blocks are on disk in %s", disk.num_blocks, config.kv_disk_path)
    return KVTiers(
        scheduler.kv,
        backend,
        page_bytes=page_bytes,
        host=host,
        disk=disk,
        will_compute=scheduler.will_compute,
        now=now,
        open_copies=open_copies,
    )


def _open_copies(
    backend: CopiesKV, host_bytes: int, woken: Callable[[], None], *, is_stored: bool
) -> BlockCopies:
    return backend.open_copies(host_bytes=host_bytes, is_stored=is_stored, woken=woken)


def disk_key(cache_key: bytes, backend: Backend) -> bytes:
    """What separates files of engines whose blocks differ: the model's content and the settings
    (both in `cache_key`), the layout of a page, and the build of the kernels."""
    digest = hashlib.blake2b(cache_key, digest_size=16, person=b"octavo tier")
    digest.update(repr((backend.cache_layout, backend.kv_bytes_per_block)).encode())
    digest.update(build_digest(backend))
    return digest.digest()


def build_digest(backend: Backend) -> bytes:
    """Of what computes, where another build may round differently: the compiled module, or the
    kernels of a device."""
    if isinstance(backend, NamesBuild):
        return backend.build_digest()
    if not backend.name.startswith("native"):
        return b""
    from octavo_engine import _native

    assert _native.__file__ is not None
    with Path(_native.__file__).open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()
