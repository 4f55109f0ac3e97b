"""What a router replica reports to the operator at STATE_PATH: its endpoints and the demand it
sees.

One JSON object, `State`. The operator asks every router replica about once a second. It derives
from it which pods are routable (all replicas hold them), which are idle (no request is
there), how many requests wait at zero, and how a canary fares against the stable revision. Counters
only grow while a replica lives (`epoch` changes with it), so that rates are differences.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from octavo_engine.protocol.loading import LoadProgress  # noqa: TC001  # decoders read the types


@dataclass(frozen=True, slots=True)
class ModelState:
    """What an engine says that it serves."""

    id: str  # its first name
    architecture: str = ""
    format: str = ""  # of the weights, such as "safetensors bfloat16"


@dataclass(frozen=True, slots=True)
class EndpointState:
    """One engine as this replica sees it."""

    id: str  # the pod's UID on Kubernetes, else the URL
    pool: str  # namespace/name of the LLMDeployment, or the pool's name
    revision: str
    url: str
    state: str  # connecting | ready | draining | ejected | down
    in_flight: int = 0  # requests this replica has there
    running: int = 0  # the rest: as the engine reported last
    waiting: int = 0
    queued_tokens: int = 0
    kv_usage: float = 0.0
    loading: float | None = None  # share of its weights that is loaded; None: not loading
    max_model_len: int = 0  # tokens; 0: not known yet
    progress: LoadProgress | None = None  # how far that is, in bytes, where it reports them
    model: ModelState | None = None  # what it serves, once known
    adapters: list[str] = field(default_factory=list)  # that are loaded there
    computed_tokens: int = 0  # of prompts, since it started
    step_s: float = 0.0  # of late
    prompt_token_s: float = 0.0  # to compute one, as this replica prices it


@dataclass(frozen=True, slots=True)
class RevisionState:
    """Outcomes by revision, or by adapter on trial, for canary analysis. Sums and counts, so that
    means are differences."""

    revision: str  # or the adapter's name
    requests: int = 0
    errors: int = 0  # answers >= 500 and broken streams; what the client got, or would have got
    ttft_s_sum: float = 0.0
    ttft_count: int = 0
    itl_s_sum: float = 0.0
    itl_count: int = 0
    ttft_buckets: list[int] = field(default_factory=list)  # counts at or below TTFT_BOUNDS_S, +Inf


@dataclass(frozen=True, slots=True)
class AdapterState:
    """One of the adapters that a pool is configured to have."""

    name: str
    state: str  # loaded (on one engine or more) | loading | failed (on all that tried) | unloaded
    reason: str = ""  # of a failure, in the engine's words


@dataclass(frozen=True, slots=True)
class PoolState:
    """One pool's demand."""

    pool: str
    held: int = 0  # requests waiting for any endpoint
    queued: int = 0  # requests waiting for room
    queued_tokens: int = 0
    in_flight: int = 0
    last_request_age_s: float | None = None  # None: never
    revisions: list[RevisionState] = field(default_factory=list)
    refused: int = 0  # requests, for lack of room: most of them never reached an engine
    adapters: list[AdapterState] = field(default_factory=list)
    prompt_tokens: float = 0.0  # of a typical prompt that another engine computes; 0: none came
    # Of each adapter that is on trial, and of each that one is compared with: requests that were
    # shared between the two.
    adapter_trials: list[RevisionState] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class State:
    """Everything one replica knows that an operator needs."""

    epoch: str
    replica: str  # the router pod's name, or host:port
    pools: list[PoolState]
    endpoints: list[EndpointState]


TTFT_BOUNDS_S = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6)
