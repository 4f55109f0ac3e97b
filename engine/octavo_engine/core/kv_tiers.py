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

import logging
import threading
import time
from typing import TYPE_CHECKING

import numpy as np

from octavo_engine.caches import STATE_GROUP
from octavo_engine.config import BLOCK_SIZE
from octavo_engine.core.direct_copies import DirectCopies
from octavo_engine.core.kv_peers import PeerBlocks
from octavo_engine.core.kv_saves import BlockSaves
from octavo_engine.core.kv_source import OwnBlocks
from octavo_engine.core.tier_fetch import TierFetch, TierRead, came_of, turn_name
from octavo_engine.core.tier_places import StoredPlaces
from octavo_engine.kv.restore import place_blocks, wanted_blocks, wanted_tail
from octavo_engine.protocol.kv_events import HOST_MEDIUM
from octavo_engine.state.outputs import TierStats
from octavo_engine.tiers.page import block_name, is_tail
from octavo_engine.tiers.peer_wire import MAX_NAMES
from octavo_engine.tiers.price import TierMeter, is_worth_loading

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from octavo_engine.backends.backend import BlockCopies, MovesKV, MovesStates, PageCopy
    from octavo_engine.core.kv_events.tier_events import TierEvents
    from octavo_engine.core.kv_peers import BlockPeer, PeerEngines
    from octavo_engine.core.tier_fetch import StoredTier
    from octavo_engine.kv.manager import BlockSave, KVManager, PrefixMatch
    from octavo_engine.kv.restore import BlockTurn
    from octavo_engine.scheduling.step_time import StepTimeModel
    from octavo_engine.state.sequence import Sequence
    from octavo_engine.tiers.block_server import BlockServer
    from octavo_engine.tiers.connector_blocks import ConnectorStore
    from octavo_engine.tiers.host_store import HostStore
    from octavo_engine.tiers.page import BlockName, Page, PageSizes
    from octavo_engine.tiers.peer_engine import PeerEngine
    from octavo_engine.tiers.run_store import RunStore

logger = logging.getLogger(__name__)

LEAST_PATIENCE_S = 1.0  # for a read; one that takes much longer than foreseen is given up
PATIENCE = 4.0  # times what it should have taken
LEAST_FOLLOW_S = 5.0  # without a further block of a prompt that another engine computes
TOGETHER_BYTES = 8 << 20  # of copies that are one piece of memory
TOUCHED_BYTES = 512 << 20  # of the pool, when the engine starts
_EMPTY = np.empty(0, np.uint8)
FLUSH_S = 10.0  # for what is still to be saved when the engine ends or sleeps


class KVTiers:
    """Host memory before files on disk, then in a shared store, before other engines; each may be
    missing. The engine's thread owns it."""

    def __init__(
        self,
        kv: KVManager,
        mover: MovesKV,
        *,
        sizes: PageSizes,
        states: MovesStates | None = None,
        host: HostStore | None = None,
        stored: tuple[StoredTier, ...] = (),
        will_compute: Callable[[Collection[bytes]], bool] = lambda digests: False,
        publish_tails: Callable[[], None] = lambda: None,
        now: Callable[[], float] = time.monotonic,
        open_copies: Callable[[Callable[[], None]], BlockCopies] | None = None,
    ) -> None:
        """`states`: where some layers have recurrent ones. `stored` are the quickest first; other
        engines are added by `use_peers`. `will_compute`
        and `publish_tails`: as for OwnBlocks. `open_copies` gives copies that nobody waits for; it
        gets what they call when something is done."""
        self._kv, self._mover, self._states = kv, mover, states
        self._sizes, self._now = sizes, now
        self.host, self.stored, self._will_compute = host, stored, will_compute
        self._publish_tails = publish_tails
        self.stats = TierStats()
        self._fetches: dict[str, TierFetch] = {}  # by request id
        self._step_time: StepTimeModel | None = None  # the scheduler's, once it looked here
        self._woken = threading.Event()
        self.wake: Callable[[], None] | None = None  # the engine's thread; called on other threads
        self._own: OwnBlocks | None = None
        self._server: BlockServer | None = None
        self._peers: PeerEngines | None = None
        self._connector: ConnectorStore | None = None
        copies: BlockCopies
        if open_copies is None:
            # Without a host tier they only wait to be written; with one each goes when it must.
            num_together = sizes.blocks_in(TOGETHER_BYTES) if host is None else 1
            copies = DirectCopies(mover, num_together=num_together)
        else:
            copies = open_copies(self.woken)
        self._copies = copies
        self._host_meter = TierMeter(latency_s=copies.latency_s, bytes_per_s=copies.bytes_per_s)
        self._saves = BlockSaves(
            kv,
            copies,
            is_stored=self._is_everywhere,
            store=self._store,
            states=states,
        )
        kv.saves = []
        if stores := self._stores():
            kv.residency.use_tiers(StoredPlaces(stores))

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
        if peers is not None:
            self._touch_pool()

    def use_connector(self, connector: ConnectorStore, peers: PeerEngines | None) -> None:
        """Give what is computed to a connector of another package, and look prompts up there."""
        self._connector, self._peers = connector, peers

    def report_to(self, events: TierEvents) -> None:
        """Report what comes into the stores and leaves them."""
        for medium, store in self._stores().items():
            store.listeners.append(events.reports_of(medium))

    def own_blocks(self) -> OwnBlocks:
        """What other engines can get from here."""
        return OwnBlocks(
            self._kv,
            self._mover,
            sizes=self._sizes,
            states=self._states,
            host=self.host,
            disk=next((tier.store for tier in self.stored if tier.name == "disk"), None),
            wake=self.woken,
            will_compute=self._will_compute,
            publish_tails=self._publish_tails,
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
        self._add_saves(has_blocks=True)
        self._saves.advance()

    def flush(self) -> None:
        """Wait until what the pool still has is saved; before it is forgotten."""
        self._add_saves(has_blocks=False)
        self._saves.flush(FLUSH_S)

    def defers(self, sequence: Sequence, match: PrefixMatch, step_time: StepTimeModel) -> bool:
        """Whether blocks are being read for it; begins with that where it is worth it."""
        self._step_time = step_time
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
        if peers is not None and source is not None and looks == 0:
            peer = peers.named(source)
            if source.is_computing:
                if peer is not None and self._follow(sequence, match, step_time, peers, peer):
                    return True
                return self._begin(sequence, match, step_time, None)
            if self._kv.states is None:  # it has all blocks: no need to look them up first
                every = None if peer is None else PeerBlocks(peer, None)
                return self._begin(sequence, match, step_time, every)
        if peers is not None and self._look_up(sequence, match, step_time, peers):
            return True
        return self._begin(sequence, match, step_time, None)

    def settle(self) -> None:
        """Bring what was read into the pool, before a step is planned."""
        self._add_saves(has_blocks=False)
        self.serve()
        for tier in self.stored:
            tier.end_trial(self._now, self.woken)
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
                read.meter.observe(self._sizes.sum(read.names), now - read.started_at)
            fetch.rest = self._take(fetch)
            self._place(request_id, fetch)

    def wait(self, timeout_s: float) -> None:
        """Sleep until something was read, for a caller that has nothing else to do."""
        self._woken.wait(timeout_s)
        self._woken.clear()

    def read_stats(self) -> TierStats:
        """Where the tiers stand; the counters only grow."""
        stats = self.stats
        stats.saved_bytes = self._saves.saved_bytes
        stats.unsaved_blocks = self._saves.num_unsaved
        if self.host is not None:
            stats.host_blocks, stats.host_bytes = len(self.host), self.host.num_bytes
        for tier in self.stored:
            num_blocks, num_bytes = tier.store.num_blocks, tier.store.num_bytes
            if tier.name == "disk":
                stats.disk_blocks, stats.disk_bytes = num_blocks, num_bytes
            else:
                stats.shared_blocks, stats.shared_bytes = num_blocks, num_bytes
            stats.unsaved_blocks += tier.store.num_unsaved
        if self._connector is not None:
            stats.unsaved_blocks += self._connector.num_unsaved
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
        if self._connector is not None:
            self._connector.close()
        for tier in self.stored:
            tier.store.close()

    def _add_saves(self, *, has_blocks: bool) -> None:
        """What is to be saved by now. Between two steps texts may have ended, whose states are
        right; blocks are then of a step that failed."""
        has_blocks = has_blocks and self._sizes.block > 0
        saves, self._kv.saves = self._kv.saves or [], []
        self._saves.add(
            save
            for save in saves
            if (self._is_worth_saving(save) if save.group == STATE_GROUP else has_blocks)
        )

    def _is_worth_saving(self, save: BlockSave) -> bool:
        """States are as large for a short text as for a long one, and steps wait for their copy:
        not where even that takes longer than the text."""
        if self._step_time is None:
            return True
        load_s = self._host_meter.seconds(self._sizes.state)
        recompute_s = self._step_time.prefill_s(save.num_tokens)
        return is_worth_loading(load_s=load_s, recompute_s=recompute_s)

    def _touch_pool(self) -> None:
        """Memory that was never written takes many times longer the first time, and streams wait
        for what is fetched: the blocks that are taken first are written now."""
        if not isinstance(self._copies, DirectCopies) or not self._sizes.block:
            return  # a device's memory is its own
        blocks = self._kv.pool.free_blocks()[: self._sizes.blocks_in(TOUCHED_BYTES)]
        ids = [block.id for block in blocks if block.parent is None]
        self._mover.load_blocks(ids, [np.zeros(self._sizes.block, np.uint8)] * len(ids))

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
        self,
        sequence: Sequence,
        match: PrefixMatch,
        step_time: StepTimeModel,
        peers: PeerEngines,
        peer: PeerEngine,
    ) -> bool:
        """Begin to fetch the blocks of a prompt that another engine is computing, if they come
        quicker than this engine computes."""
        end, turns = wanted_blocks(self._kv, sequence, lambda digest, group: True)
        num_tokens = end * BLOCK_SIZE - match.num_tokens
        names = [block_name(turn.digest, turn.group) for turn in turns]
        pages = self._at_hand(names)
        rest = [name for name in names if name not in pages]
        if num_tokens <= 0 or not 0 < len(rest) <= MAX_NAMES:
            return False
        recompute_s = step_time.prefill_s(num_tokens)
        load_s = peer.meter.seconds(self._sizes.sum(rest))
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
        num_bytes = self._sizes.sum(turn_name(turn) for turn in turns)
        quick = []
        for peer in candidates:
            if is_worth_loading(load_s=peer.meter.seconds(num_bytes), recompute_s=recompute_s):
                quick.append(peer)
            else:
                self.stats.refused += 1
                peer.meter.refused()
        names = self._unknown_names(sequence.digests[:end])
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
        at_peer = set() if found is None else found.names
        end, turns = wanted_blocks(
            self._kv,
            sequence,
            lambda digest, group: (
                at_peer is None
                or self._is_outside(digest, group)
                or block_name(digest, group) in at_peer
            ),
        )
        num_tokens = end * BLOCK_SIZE - match.num_tokens
        if at_peer is None and (tail := wanted_tail(self._kv, sequence)):
            turns += tail
            num_tokens = len(sequence.token_ids) - 1 - match.num_tokens
        if num_tokens <= 0 or not turns:
            return False
        names = [turn_name(turn) for turn in turns]
        pages = self._at_hand(names)
        now = self._now()
        reads: list[TierRead] = []
        rest = [name for name in names if name not in pages]
        for tier in self.stored:
            if there := [name for name in rest if name in tier.store]:
                reads.append(TierRead(tier.name, tier.meter, there, now))
                found_here = set(there)
                rest = [name for name in rest if name not in found_here]
        if found is not None and rest:
            reads.append(TierRead("peer", found.peer.meter, rest, now))
        load_s = self._host_meter.seconds(self._sizes.sum(names))  # all go through there
        for read in reads:
            before = self._names_before(read)
            load_s += read.meter.seconds(self._sizes.sum([*before, *read.names]))
            # What is in line before it would be computed before it too.
            num_tokens += len(before) * BLOCK_SIZE // self._kv.num_groups
        if not is_worth_loading(load_s=load_s, recompute_s=step_time.prefill_s(num_tokens)):
            self.stats.refused += 1
            self._refuse(reads)
            return False
        patience = max(LEAST_PATIENCE_S, PATIENCE * load_s)
        fetch = TierFetch(sequence, turns, pages, now + patience, patience, reads)
        self._fetches[sequence.request_id] = fetch
        for read in reads:
            if read.tier == "peer" and found is not None:
                self._read_peer(sequence, read, found.peer, patience)
            for tier in self.stored:
                if tier.name == read.tier:
                    tier.read(read, self._now, self.woken)
        return True

    def _refuse(self, reads: list[TierRead]) -> None:
        """Their prices are why something is computed."""
        by_name = {tier.name: tier for tier in self.stored}
        if not reads:
            self._host_meter.refused()
        for read in reads:
            if read.tier in by_name:
                by_name[read.tier].refused(read.names, self._sizes, self._now, self.woken)
            else:
                read.meter.refused()

    def _names_before(self, read: TierRead) -> list[BlockName]:
        """One engine is read from for one sequence after the other."""
        if read.tier != "peer":
            return []
        return [
            name
            for fetch in self._fetches.values()
            for other in fetch.reads
            if other.meter is read.meter and other.ended_at is None and not other.is_followed
            for name in other.names
            if name not in other.pages
        ]

    def _read_peer(
        self, sequence: Sequence, read: TierRead, peer: BlockPeer, timeout_s: float
    ) -> None:
        def begun() -> None:
            read.started_at = self._now()  # what it waited for others says nothing of the peer

        def done() -> None:
            read.ended_at = self._now()
            self.woken()

        take = read.pages.__setitem__
        peer.fetch(read.names, timeout_s, take, done, begun=begun, sequence=sequence)

    def _take(self, fetch: TierFetch) -> list[tuple[BlockTurn, Page]]:
        """What was read, as far as it is of use."""
        pages, sequence = dict(fetch.pages), fetch.sequence
        for read in fetch.reads:
            came = dict(read.pages)  # of a late one the thread may add more
            pages |= came
            if read.ended_at is None:
                continue
            self.stats.failed_reads += sum(n not in came for n in read.names if not is_tail(n))
            if read.is_followed:
                continue
            seconds = read.ended_at - read.started_at
            read.meter.observe(self._sizes.sum(came), seconds)
            if read.tier == "disk":
                self.stats.disk_load_seconds += seconds
            elif read.tier == "shared":
                self.stats.shared_load_seconds += seconds
            else:
                self.stats.peer_load_seconds += seconds
        turns = came_of(fetch.turns, pages)
        num_full = sum(not turn.tail for turn in turns)
        is_whole = num_full == sum(not turn.tail for turn in fetch.turns)
        if sequence.finish_reason is not None or (self._kv.needs_whole_prefixes and not is_whole):
            self._keep(fetch, pages)
            return []
        read_turns = [(turn, pages[turn_name(turn)]) for turn in turns]
        fetch.states = next((one for one in read_turns if one[0].group == STATE_GROUP), None)
        return [one for one in read_turns if one[0].group != STATE_GROUP]

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
        if fetch.states is not None:
            self._place_states(fetch, *fetch.states)
        del self._fetches[request_id]

    def _place_states(self, fetch: TierFetch, turn: BlockTurn, page: Page) -> None:
        """Of little use if the blocks before them found no room, and right all the same."""
        states, mover = self._kv.states, self._states
        assert states is not None and mover is not None
        name = turn_name(turn)
        self._keep(fetch, {name: page})
        started_at = self._now()
        try:
            is_placed = states.place(turn.digest, lambda slot: mover.load_states(slot, page))
        except Exception:
            logger.exception("Recurrent states could not be copied into a slot")
            return
        if is_placed:
            self._count({name}, fetch)
            self.stats.host_load_seconds += self._now() - started_at

    def _place_copied(self, fetch: TierFetch, copy: PageCopy) -> None:
        """The first blocks that are left of a fetch. Without room in the pool the others go."""
        assert fetch.rest is not None
        count = len(copy.pages)
        turns = [turn for turn, _ in fetch.rest[:count]]
        fetch.rest = fetch.rest[count:]
        pages = {turn_name(t): p for t, p in zip(turns, copy.pages, strict=True)}
        self._keep(fetch, pages)
        if fetch.sequence.finish_reason is not None or copy.is_failed:
            self._copies.drop(copy)
            fetch.rest = []
            return
        started_at = self._now()
        placed = place_blocks(self._kv, fetch.sequence, turns)
        ids = {turn_name(turn): block.id for turn, block in placed}
        try:
            if self._sizes.block:
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
        self._host_meter.observe(len(placed) * self._sizes.block, seconds)
        self.stats.host_load_seconds += seconds

    def _keep(self, fetch: TierFetch, pages: Mapping[BlockName, Page]) -> None:
        """In host memory, what came from elsewhere."""
        if self.host is None:
            return
        for name, page in pages.items():
            if name not in fetch.pages and not is_tail(name):
                self.host.put(name, page)

    def _store(self, name: BlockName, page: Page) -> None:
        if self.host is not None:
            self.host.put(name, page)
        for tier in self.stored:
            tier.store.put(name, page)
        if self._connector is not None:
            self._connector.put(name, page)

    def _count(self, placed_names: set[BlockName], fetch: TierFetch) -> None:
        """What is empty came from nowhere."""
        placed_names, stats = set(filter(self._sizes.of, placed_names)), self.stats
        come = {
            tier: sum(
                name in placed_names
                for read in fetch.reads
                if read.tier == tier
                for name in list(read.pages)  # a late one's thread may add more
            )
            for tier in ("disk", "shared", "peer")
        }
        stats.host_hit_blocks += sum(name in fetch.pages for name in placed_names)
        stats.disk_hit_blocks += come["disk"]
        stats.shared_hit_blocks += come["shared"]
        stats.peer_hit_blocks += come["peer"]
        stats.loaded_bytes += self._sizes.sum(placed_names)

    def _drop_spoiled(self) -> None:
        groups = (*range(self._kv.num_groups), STATE_GROUP)
        names = [block_name(digest, group) for digest in self._kv.spoiled for group in groups]
        self._kv.spoiled = []
        self._saves.drop(names)
        for store in self._stores().values():
            store.drop(names)
        if self._connector is not None:
            self._connector.drop(names)

    def _stores(self) -> dict[str, HostStore | RunStore]:
        """By medium, the quickest first."""
        host = {} if self.host is None else {HOST_MEDIUM: self.host}
        return {**host, **{tier.medium: tier.store for tier in self.stored}}

    def _is_outside(self, digest: bytes, group: int) -> bool:
        name = block_name(digest, group)
        return not self._sizes.of(name) or any(name in one for one in self._stores().values())

    def _at_hand(self, names: list[BlockName]) -> dict[BlockName, Page]:
        """Pages that need not be read: in host memory, or empty."""
        pages = {name: _EMPTY for name in names if not self._sizes.of(name)}
        if self.host is not None:
            held = ((name, self.host.get(name)) for name in names)
            pages |= {name: page for name, page in held if page is not None}
        return pages

    def _unknown_names(self, digests: list[bytes]) -> list[BlockName]:
        """What of a prefix is neither in the pool nor in a store. Of a window the blocks before the
        end are wanted, and where the end is nobody knows yet; likewise of states."""
        caches, states = self._kv.pool.caches, self._kv.states
        unknown = [
            (digest, group)
            for group, cache in enumerate(caches)
            for digest in digests
            if cache.get(digest) is None
        ]
        if states is not None:
            ends = (digests[end - 1] for end in states.likely_ends(len(digests)))
            unknown += [(digest, STATE_GROUP) for digest in ends if digest not in states.cached]
        return [block_name(*one) for one in unknown if not self._is_outside(*one)]

    def _is_everywhere(self, name: BlockName) -> bool:
        is_given = self._connector is None or name in self._connector
        return is_given and all(name in store for store in self._stores().values())
