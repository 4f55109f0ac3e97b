"""What an engine pushes to each router over one long response: its identity, load and prefixes.

    frame    = u32 little-endian length, then msgpack [kind, fields]
    kind     = "hello" | "snapshot" | "delta" | "draining"

A stream begins with one hello, then the snapshot (one frame or several, the last one marked), then
deltas whose `seq` grows by one. A gap, or an epoch that differs from the one known, means: forget
this engine's keys and connect again; what follows is whole. Deltas come when something changed, at
most every few milliseconds, and at least once a second, so that silence means trouble.

Residency is reported in route keys (protocol.route_keys). A key is *stored* while the prompt prefix
that it names lies in the engine's KV cache, with the number of tokens that a request with this
prefix would find there.

    stored   = packed (key u64, tokens u32), little-endian, end to end: STORED_BYTES each
    evicted  = packed key u64: KEY_BYTES each; applied before the frame's `stored`
    tiers    = {medium: packed as `stored`}, of kv_events.TIER_MEDIA; applied last

Keys in `tiers` are of prefixes that can be had, and not from the KV cache alone: the last block
must be read from that medium. A key is in one place, the quickest that holds it; one that moves to
a slower medium is evicted first. Engines without tiers, and older ones, report none.
"""

from __future__ import annotations

from dataclasses import dataclass, field

CONTENT_TYPE = "application/x-octavo-stream"
KEY_BYTES = 8
STORED_BYTES = 12
MAX_FRAME_BYTES = 16 * 2**20
HEARTBEAT_S = 1.0
SILENCE_S = 4.0  # after which a router takes the engine for hung

HELLO, SNAPSHOT, DELTA, DRAINING = "hello", "snapshot", "delta", "draining"


@dataclass(frozen=True, slots=True)
class Hello:
    """The engine's identity. A new epoch means a new cache: everything known before is void."""

    epoch: str
    model: str  # the first served name
    names: list[str]  # all names that answer
    adapters: list[str] = field(default_factory=list)  # names that are LoRA adapters of the model
    block_size: int = 16
    num_blocks: int = 0
    max_model_len: int = 0
    max_num_seqs: int = 0
    version: str = ""
    pod_uid: str = ""
    architecture: str = ""  # of the model; empty: not known
    format: str = ""  # of its weights, such as "safetensors bfloat16"; empty: not known
    vocab_size: int = 0  # 0: not known
    kv_role: str = ""  # kv_producer, kv_consumer or kv_both; empty: its KV cache stays its own
    kv_address: str = ""  # HOST:PORT where it serves KV blocks; empty: it does not
    kv_follows: bool = False  # fetches, or serves, blocks of a prompt while that is computed
    tokens: bool = True  # understands STREAM_HEADER and RESUME_HEADER
    # The content of each of `adapters`: the route keys of its requests are made from it, or from
    # the adapter's name where that is missing here.
    adapter_digests: dict[str, str] = field(default_factory=dict)
    tiers: list[str] = field(default_factory=list)  # media whose keys it reports, quickest first
    kv_store: str = ""  # the same for all engines that read one shared store; empty: it has none


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All keys stored when the stream began, or a part of them."""

    stored: bytes
    last: bool
    tiers: dict[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Load:
    """How busy the engine is now."""

    running: int = 0  # sequences
    waiting: int = 0
    queued_tokens: int = 0  # prompt tokens still to compute, running and waiting
    kv_usage: float = 0.0  # 0 to 1
    step_s: float = 0.0  # a typical step
    prefill_tokens_per_s: float = 0.0  # lately; 0 while unknown
    computed_tokens: int = 0  # of prompts, since it started
    is_saturated: bool = False  # it would refuse another request


@dataclass(frozen=True, slots=True)
class Delta:
    """What changed since the frame before."""

    seq: int
    stored: bytes = b""
    evicted: bytes = b""
    load: Load | None = None  # None: as before
    adapters: list[str] | None = None  # names that are LoRA adapters now; None: as before
    adapter_digests: dict[str, str] = field(default_factory=dict)  # theirs, where `adapters` is
    tiers: dict[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Draining:
    """Send nothing new; what is in flight will be finished."""

    deadline_s: float = 0.0  # how long that may take
