"""One engine replica: where it is, what it serves, how it fares, and what this router has there."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from octavo_engine.protocol.stream import Load

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence, Set

    from octavo_engine.protocol.loading import LoadProgress
    from octavo_engine.protocol.state import ModelState

State = Literal["connecting", "ready", "draining", "ejected", "down"]
Kind = Literal["octavo", "openai"]  # pushes its load and prefixes, or is a plain server
Role = Literal["both", "prefill", "decode"]

UNKNOWN_LOAD = Load()


class Address(NamedTuple):
    """Where to connect. Hosts are addresses or names that were resolved outside the data path."""

    host: str
    port: int
    tls: bool = False
    prefix: str = ""  # of its paths: "/openai" where chats are at /openai/v1/chat/completions
    tls_name: str = ""  # that its certificate must have; "": the host

    @property
    def authority(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def url(self) -> str:
        return f"{'https' if self.tls else 'http'}://{self.authority}{self.prefix}"


class TierIndex(Protocol):
    """Prefixes in an engine's slower memories; see residency.tier_slots."""

    slots: list[int]

    def apply(self, stored: bytes, evicted: bytes, tiers: Mapping[str, bytes]) -> None: ...
    def clear(self) -> None: ...
    def close(self) -> None: ...
    def saved_tokens(self, matched_tokens: int, found: Sequence[int]) -> int: ...


@dataclass(frozen=True, slots=True)
class EndpointSpec:
    """What discovery says of an endpoint. Two with the same id are the same process."""

    id: str  # the pod's UID, else the URL
    address: Address
    pool: str = "default"
    names: tuple[str, ...] = ()  # models it serves; empty: ask it
    revision: str = ""
    kind: Kind | None = None  # None: find out
    role: Role = "both"
    is_moved: bool = False  # by its platform between both sides: `role` is where it is now
    pod_uid: str = ""  # checked by the engine where given
    labels: tuple[tuple[str, str], ...] = ()
    is_terminating: bool = False  # finish what is in flight, send nothing new
    key: str = field(default="", repr=False)  # that it asks for; "": the router's for all
    is_foreign: bool = False  # no key is sent there but its own
    is_ready: bool = True  # as its platform says; False: keep what is known, send nothing
    zone: str = ""  # where it runs; "": not known


@dataclass(slots=True, eq=False)
class Endpoint:
    """The life of one endpoint. Belongs to the event loop; hot fields are plain attributes."""

    spec: EndpointSpec
    slot: int = -1  # in the residency index
    tiers: TierIndex | None = None  # of ours that keep blocks in slower memory too
    tier_keys: dict[int, str] = field(default_factory=dict)  # of others: the medium of such keys
    kind: Kind = "openai"
    state: State = "connecting"
    reason: str = ""  # why it is not ready, in words
    names: tuple[str, ...] = ()
    adapters: frozenset[str] = frozenset()
    adapter_digests: dict[str, str] = field(default_factory=dict)  # contents, of those that tell
    max_model_len: int = 0
    vocab_size: int = 0  # 0: not reported
    max_num_seqs: int = 0
    epoch: str = ""
    side: Role | None = None  # that this router has put it on; None: as its spec says
    kv_address: str = ""  # of ours: where it serves KV blocks
    kv_follows: bool = False  # of ours: also those of a prompt while that is computed
    kv_role: str = ""  # of ours: whether its KV cache goes to others, or comes from there

    # reported by the engine
    load: Load = UNKNOWN_LOAD
    load_at: float | None = None  # monotonic; None: never
    loading: float | None = None  # share of its weights, while it loads them
    progress: LoadProgress | None = None  # the same in bytes, where it reports them
    model: ModelState | None = None  # what it serves, in its own words

    # kept by this router: work placed there and not finished
    in_flight: int = 0  # requests, without those that are paused
    num_paused: int = 0  # requests whose client does not read its stream: they take no seat
    adapters_in_use: dict[str, int] = field(default_factory=dict)  # requests by adapter
    pending_tokens: int = 0  # uncached prompt tokens of those without a first token

    # the state's two sources; the registry derives `state` from them
    reported_state: State = "connecting"  # by signals and discovery
    is_ejected: bool = False  # by health: its answers were bad
    ejected_for: str = ""  # why, in words
    share: float = 1.0  # of a fair load while it starts slowly, else 1

    # its price, in prompt tokens: routing.pricing keeps these
    token_s: float = 5e-4  # seconds one prompt token takes
    base_tokens: int = 0  # work there as the engine reported last
    own_tokens: int = 0  # our work there that it cannot have counted
    generation: int = 0  # reports since; our work of the latest ones counts as own
    counts_from: int = 0  # work placed in this generation and after is in own_tokens
    recent_tokens: int = 0  # of own_tokens, that of the current generation
    turned_at: float = 0.0  # when the generation began
    zone_s: float = 0.0  # what another zone than the router's costs: routing.locality keeps these
    is_near: bool | None = None  # in the router's zone; None: one of both is not known
    priced: Load | None = None  # the report that base_tokens comes from
    last_pick: int = 0  # the number of the pick it got last; ties go to the oldest

    @property
    def id(self) -> str:
        return self.spec.id

    @property
    def name(self) -> str:
        """For people: the replica's, else host and port."""
        labels = dict(self.spec.labels)
        return labels.get("pod") or labels.get("replica") or self.spec.address.authority

    @property
    def pool(self) -> str:
        return self.spec.pool

    @property
    def role(self) -> Role:
        return self.side or self.spec.role

    @property
    def can_change_sides(self) -> bool:
        """Whether this router may have it compute prompts for others as well as fetch theirs."""
        does_both = self.kind == "octavo" and self.kv_role == "kv_both"
        return self.state == "ready" and does_both and not self.spec.is_moved

    @property
    def could_answer(self) -> bool:
        """It computes prompts for now, and answers where no other engine does."""
        return self.role == "prefill" and (self.side is not None or self.spec.is_moved)

    @property
    def hands_kv_over(self) -> bool:
        """Plain servers do, as far as is known before they are tried."""
        return self.kind == "openai" or self.kv_role in ("kv_producer", "kv_both")

    @property
    def fetches_kv(self) -> bool:
        return self.kind == "openai" or self.kv_role in ("kv_consumer", "kv_both")

    @property
    def num_requests(self) -> int:
        """All that this router has there."""
        return self.in_flight + self.num_paused

    def lose_adapters(self, gone: Set[str]) -> None:
        """They are no longer there, so their names, which it may list, mean no model of its own."""
        self.adapters -= gone
        digests = self.adapter_digests.items()
        self.adapter_digests = {name: digest for name, digest in digests if name not in gone}
        if not gone.isdisjoint(self.names):
            kept = self.spec.names
            self.names = tuple(name for name in self.names if name in kept or name not in gone)

    @property
    def is_routable(self) -> bool:
        return self.state == "ready"
