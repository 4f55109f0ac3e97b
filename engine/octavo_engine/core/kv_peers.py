"""Other engines that may have blocks of a waiting sequence: which, and what they say they have."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

from octavo_engine.config import LOOPBACK
from octavo_engine.tiers.peer_engine import PeerAddress, PeerEngine

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from collections.abc import Sequence as List

    from octavo_engine.state.kv_source import KVSource
    from octavo_engine.state.sequence import Sequence
    from octavo_engine.tiers.connector_blocks import ConnectorStore
    from octavo_engine.tiers.page import BlockName, Page, PageSizes
    from octavo_engine.tiers.price import TierMeter

logger = logging.getLogger(__name__)

MAX_NAMED_PEERS = 64  # that requests name; the one not named for longest is forgotten
MAX_FOLLOWED = 4  # prompts of one engine at a time, each on a connection of its own; others wait
LOOKUP_S = 0.5  # that a sequence waits to hear who has its blocks


class BlockPeer(Protocol):
    """A place that alone knows what it has: another engine, or a connector of another package.
    Callbacks are called on its thread, `done` always once."""

    @property
    def meter(self) -> TierMeter: ...

    @property
    def is_down(self) -> bool: ...

    def lookup(
        self,
        names: List[BlockName],
        timeout_s: float,
        done: Callable[[set[BlockName]], None],
        *,
        sequence: Sequence,
    ) -> None:
        """Which blocks of a sequence it has, as far as it says in time."""

    def fetch(
        self,
        names: List[BlockName],
        timeout_s: float,
        take: Callable[[BlockName, Page], None],
        done: Callable[[], None],
        *,
        begun: Callable[[], None],
        sequence: Sequence,
    ) -> None:
        """Read pages, after what was submitted before; `take` gets each as it arrives."""


class PeerBlocks(NamedTuple):
    """What one of them has of a sequence."""

    peer: BlockPeer
    names: set[BlockName] | None  # None: all, as far as is known


@dataclass(slots=True)
class PeerLookup:
    """A sequence waits for what some engines say."""

    sequence: Sequence
    give_up_at: float
    num_pending: int
    answers: list[PeerBlocks] = field(default_factory=list)  # grows, by the peers' threads


class PeerEngines:
    """Those of the settings, and those that requests name. The engine's thread owns it."""

    def __init__(
        self,
        addresses: List[PeerAddress],
        *,
        identity: Mapping[str, str],
        sizes: PageSizes,
        secret: bytes = b"",
        woken: Callable[[], None],
        now: Callable[[], float] = time.monotonic,
        connector: ConnectorStore | None = None,
    ) -> None:
        """With a `connector` no engine is looked up."""
        self._connector = connector
        self._identity, self._sizes, self._secret = identity, sizes, secret
        self._woken, self._now = woken, now
        self._fixed = {address: self._make(address) for address in addresses}
        self._named: dict[PeerAddress, PeerEngine] = {}  # least recently named first
        self._followers: dict[PeerAddress, list[PeerEngine]] = {}  # further connections
        self._lookups: dict[str, PeerLookup] = {}  # by request id
        self._found: dict[str, tuple[Sequence, PeerBlocks]] = {}
        self._refused: set[PeerAddress] = set()  # refused, with a line in the log

    @property
    def is_waiting(self) -> bool:
        return bool(self._lookups)

    @property
    def num_failures(self) -> int:
        own = 0 if self._connector is None else self._connector.num_failures
        return own + sum(one.num_failures for one in self._all())

    def is_looking(self, request_id: str) -> bool:
        return request_id in self._lookups

    def take_found(self, request_id: str) -> PeerBlocks | None:
        """What a lookup found; once."""
        _, found = self._found.pop(request_id, (None, None))
        return found

    def candidates(self, source: KVSource | None) -> List[BlockPeer]:
        """Who may have a sequence's blocks: the one that the request names, or all that are set."""
        if self._connector is not None:
            return [] if self._connector.is_down else [self._connector]
        if source is None:
            return [peer for peer in self._fixed.values() if not peer.is_down]
        peer = self.named(source)
        return [] if peer is None else [peer]

    def named(self, source: KVSource) -> PeerEngine | None:
        """The engine that computed a sequence's tokens or does so now, unless it failed lately."""
        peer = self._peer_of(PeerAddress(source.host, source.port))
        return None if peer is None or peer.is_down else peer

    def follower(self, peer: PeerEngine) -> PeerEngine:
        """A connection to the same engine for a prompt that it is computing."""
        others = self._followers.setdefault(peer.address, [])
        best = min(others, key=lambda one: one.num_jobs, default=None)
        if best is None or (best.num_jobs and len(others) < MAX_FOLLOWED):
            best = self._make(peer.address)
            others.append(best)
        return best

    def look_up(self, sequence: Sequence, peers: List[BlockPeer], names: List[BlockName]) -> None:
        lookup = PeerLookup(sequence, self._now() + LOOKUP_S, len(peers))
        self._lookups[sequence.request_id] = lookup
        for peer in peers:
            peer.lookup(names, LOOKUP_S, self._noting(lookup, peer), sequence=sequence)

    def settle(self) -> None:
        """Take in what was said."""
        if self._connector is not None:
            self._connector.settle()
        now = self._now()
        for request_id, lookup in list(self._lookups.items()):
            answers = list(lookup.answers)
            if len(answers) < lookup.num_pending and now < lookup.give_up_at:
                continue
            del self._lookups[request_id]
            best = max(answers, key=lambda one: len(one.names or ()), default=None)
            if best is not None and best.names:
                self._found[request_id] = (lookup.sequence, best)
        for request_id, (sequence, _) in list(self._found.items()):
            if sequence.finish_reason is not None:
                del self._found[request_id]

    def close(self) -> None:
        for peer in self._all():
            peer.close()

    def _noting(self, lookup: PeerLookup, peer: BlockPeer) -> Callable[[set[BlockName]], None]:
        def note(names: set[BlockName]) -> None:
            lookup.answers.append(PeerBlocks(peer, names))
            self._woken()

        return note

    def _peer_of(self, address: PeerAddress) -> PeerEngine | None:
        """None where the settings do not allow a connection to it."""
        peer = self._fixed.get(address) or self._named.pop(address, None)
        if peer is None:
            if not self._secret and address.host not in LOOPBACK:
                if address not in self._refused:
                    self._refused = {*list(self._refused)[: MAX_NAMED_PEERS - 1], address}
                    text = (
                        "No KV blocks from %s: without a secret_file in --kv-transfer-config only "
                        "its peers and this host are connected to"
                    )
                    logger.warning(text, address)
                return None
            peer = self._make(address)
        if address not in self._fixed:
            self._named[address] = peer
            if len(self._named) > MAX_NAMED_PEERS:
                self._forget(next(iter(self._named)))
        return peer

    def _forget(self, address: PeerAddress) -> None:
        for peer in (self._named.pop(address), *self._followers.pop(address, ())):
            peer.close(waits=False)

    def _all(self) -> list[PeerEngine]:
        followers = [one for line in self._followers.values() for one in line]
        return [*self._fixed.values(), *self._named.values(), *followers]

    def _make(self, address: PeerAddress) -> PeerEngine:
        return PeerEngine(address, identity=self._identity, sizes=self._sizes, secret=self._secret)
