"""The sections of the router's settings: frozen data, each field with its unit and a sentence."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")


def setting(
    default: T,
    doc: str,
    *,
    unit: str = "",
    flag: str = "",
    low: float | None = None,
    high: float | None = None,
    choices: tuple[str, ...] = (),
    is_secret: bool = False,
) -> T:
    """A documented field. `flag` names it on the command line and in the environment."""
    meta = {
        "doc": doc,
        "unit": unit,
        "flag": flag,
        "low": low,
        "high": high,
        "choices": choices,
        "is_secret": is_secret,
    }
    result: Any = field(default=default, metadata=meta)
    return result  # type: ignore[no-any-return]  # as dataclasses.field itself pretends


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Where it listens and how it ends."""

    host: str = setting("127.0.0.1", "Address to listen on; 0.0.0.0 for all.", flag="host")
    port: int = setting(8080, "Port to listen on.", flag="port", low=0, high=65535)
    workers: int = setting(1, "Processes that share the port.", flag="workers", low=1, high=256)
    tls_cert: str = setting("", "PEM file with the certificate chain.", flag="tls-cert")
    tls_key: str = setting("", "PEM file with the private key.", flag="tls-key")
    tls_client_ca: str = setting(
        "", "PEM file with an authority: only clients with its certificates may connect.",
        flag="tls-client-ca",
    )  # fmt: skip
    drain_timeout_s: float = setting(
        120.0, "How long requests in flight may take after SIGTERM.", unit="s", low=0.0,
        flag="drain-timeout",
    )  # fmt: skip
    accept_while_draining_s: float = setting(
        5.0, "How long new requests are still taken after SIGTERM, until none arrive.",
        unit="s", low=0.0,
    )  # fmt: skip
    log_level: str = setting(
        "info", "Least severe message that is logged.", flag="log-level",
        choices=("debug", "info", "warning", "error"),
    )  # fmt: skip
    log_format: str = setting(
        "text", "Form of the log's lines.", flag="log-format", choices=("text", "json")
    )
    access_log: str = setting(
        "errors", "Which requests get a line in the log.", flag="access-log",
        choices=("all", "errors", "none"),
    )  # fmt: skip
    allowed_hosts: tuple[str, ...] = setting(
        (), "Names that a Host may have, beside addresses and localhost; *: any; default: any, but "
        "none where it listens on this machine alone, so that no page's name leads here.",
        flag="allowed-hosts",
    )  # fmt: skip
    allowed_origins: tuple[str, ...] = setting(
        (), "Origins whose pages in browsers may call it (CORS): https://app.example, or *; "
        "default: none.", flag="allowed-origins",
    )  # fmt: skip
    allowed_methods: tuple[str, ...] = setting(
        ("GET", "POST", "DELETE"), "Methods for those pages, or *.", flag="allowed-methods"
    )
    allowed_headers: tuple[str, ...] = setting(
        ("*",), "Request headers for them, or *.", flag="allowed-headers"
    )
    allow_credentials: bool = setting(
        False, "Let them send cookies; wants origins by name. Keys in headers need it not.",
        flag="allow-credentials",
    )  # fmt: skip
    admin_key: str = setting(
        "", "Key that opens /debug, /metrics, /octavo/v1/state and x-octavo-explain; default: "
        "programs on this machine may, and /metrics is open.",
        flag="admin-key", is_secret=True,
    )  # fmt: skip
    admin_host: str = setting(
        "127.0.0.1", "Address of the administrators' listener.", flag="admin-host"
    )
    admin_port: int = setting(
        0, "Port of a listener for administrators: /debug and /metrics are there and nowhere else; "
        "0: none.", flag="admin-port", low=0, high=65535,
    )  # fmt: skip
    state_token: str = setting(
        "", "Token that opens /octavo/v1/state to the operator, beside the admin key.",
        flag="state-token", is_secret=True,
    )  # fmt: skip
    open_state: bool = setting(
        False, "Serve /octavo/v1/state to everybody, where no state_token is set: for networks "
        "that only the operator and clients reach.",
    )  # fmt: skip
    replica: str = setting(
        "", "Name of this replica towards the operator; default: the host name.", flag="replica"
    )
    console: bool = setting(
        True, "Serve the page at /: engines, requests and a chat, behind the API keys, if any; and "
        "/docs and /openapi.json.",
        flag="console",
    )  # fmt: skip
    debug_endpoints: bool = setting(
        False, "Serve /debug/*: index, decisions, tasks. They show shapes of prompts, not text.",
        flag="debug-endpoints",
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitsConfig:
    """What one client may send and hold."""

    max_header_bytes: int = setting(
        16 * 2**10, "Request line and header fields together.", unit="bytes", low=1024
    )
    max_headers: int = setting(100, "Header fields.", low=8)
    max_target_bytes: int = setting(8 * 2**10, "Path and query.", unit="bytes", low=64)
    max_body_bytes: int = setting(
        8 * 2**20, "Request body.", unit="bytes", low=1024, flag="max-body-bytes"
    )
    max_upload_bytes: int = setting(
        26 * 2**20, "Request body of a path that takes files: audio.", unit="bytes", low=1024,
        flag="max-upload-bytes",
    )  # fmt: skip
    max_body_chunks: int = setting(4096, "Chunks of a chunked body.", low=1)
    max_pipelined_bytes: int = setting(
        64 * 2**10, "Sent ahead while an answer is under way.", unit="bytes", low=0
    )
    max_connections: int = setting(
        10_000, "Client connections per process; fewer where file descriptors are short.",
        low=1, flag="max-connections",
    )  # fmt: skip
    max_tls_handshakes_per_s: float = setting(
        500.0, "TLS connections taken a second per process; further ones wait to be accepted.",
        unit="1/s", low=1.0,
    )  # fmt: skip
    max_memory_bytes: int = setting(
        0, "Memory of the process at which requests are refused, from 85 % on those that would "
        "have to wait; default: the container's limit, else half of the machine's memory divided "
        "by server.workers.", unit="bytes", low=0,
    )  # fmt: skip
    write_buffer_bytes: int = setting(
        64 * 2**10, "Unsent bytes of an answer before its source is paused.", unit="bytes", low=1024
    )
    max_event_bytes: int = setting(
        2**20, "One event of an upstream's stream.", unit="bytes", low=1024
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeoutsConfig:
    """Who may wait how long. Outer ones are longer than inner ones."""

    header_s: float = setting(10.0, "First to last byte of a request's header.", unit="s", low=0.1)
    body_s: float = setting(30.0, "Its body.", unit="s", low=0.1)
    idle_s: float = setting(
        75.0, "Between two requests on a kept client connection.", unit="s", low=0.1
    )
    write_s: float = setting(
        60.0, "A client that does not take what is there for it.", unit="s", low=0.1
    )
    connect_s: float = setting(1.0, "Connecting to an engine.", unit="s", low=0.01)
    first_token_s: float = setting(
        60.0,
        "From sending a request to the first byte of its stream, for short prompts; an answer that "
        "is not streamed has `total_s`.",
        unit="s", low=0.1,
    )  # fmt: skip
    first_token_per_1k_s: float = setting(
        5.0, "Added to first_token_s for each thousand prompt tokens.", unit="s", low=0.0
    )
    progress_s: float = setting(30.0, "Between two pieces of a streamed answer.", unit="s", low=0.1)
    total_s: float = setting(600.0, "A whole request, waiting included.", unit="s", low=1.0,
                             flag="request-timeout")  # fmt: skip
    upstream_idle_s: float = setting(
        4.0,
        "An unused connection to an engine is kept this long: less than servers keep theirs.",
        unit="s",
        low=0.1,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class KubernetesConfig:
    """Endpoints from EndpointSlices and pods."""

    enabled: bool = setting(
        False, "Discover engines through the Kubernetes API.", flag="kubernetes"
    )
    namespaces: tuple[str, ...] = setting(
        (), "Namespaces to watch, or * for all; default: the router's own.", flag="namespace"
    )
    label_selector: str = setting(
        "", "Only Services with these labels; default: all that carry the routing annotation.",
        flag="label-selector",
    )  # fmt: skip
    api: str = setting(
        "", "URL of the API server; default: that of the pod's service account.",
        flag="kubernetes-api",
    )  # fmt: skip
    token_file: str = setting("", "File with the token for `api`; read again each time.")
    ca_file: str = setting("", "PEM file with the authority of `api`; default: the system's.")


@dataclass(frozen=True, slots=True, kw_only=True)
class UpstreamConfig:
    """One engine, or one name that stands for several."""

    url: str = setting(
        "", "http(s)://host:port, and a path if its API is below one: https://host/openai/v1"
    )
    key: str = setting(
        "", "API key that the upstream requires, sent nowhere else; default: engine_key.",
        is_secret=True,
    )  # fmt: skip
    key_env: str = setting("", "Environment variable that holds it.")
    is_foreign: bool = setting(
        False, "A third party's server: neither engine_key nor a client's key is sent there."
    )
    pool: str = setting("default", "Pool it belongs to.")
    names: tuple[str, ...] = setting((), "Models it serves; default: ask it.")
    revision: str = setting("", "Label for canaries.")
    replica: str = setting("", "Its name on the console; default: host and port.")
    kind: str = setting(
        "", "octavo (pushes load and prefixes) or openai (plain); default: find out.",
        choices=("", "octavo", "openai"),
    )  # fmt: skip
    role: str = setting("both", "What it does.", choices=("both", "prefill", "decode"))
    is_dns: bool = setting(
        False, "Every address of the host name is an engine; resolved again often."
    )
    kv_events: str = setting(
        "", "Of a plain server: where it publishes KV events (tcp://host:5557)."
    )
    kv_replay: str = setting("", "Where it replays them.")
    zone: str = setting("", "Zone it runs in; default: not known.")


@dataclass(frozen=True, slots=True, kw_only=True)
class DiscoveryConfig:
    """Where endpoints come from. Several sources add up."""

    upstreams: tuple[UpstreamConfig, ...] = setting((), "Engines by URL.", flag="upstreams")
    file: str = setting(
        "", "YAML file with a list `upstreams`, read again when it changes.", flag="upstreams-file"
    )
    kubernetes: KubernetesConfig = field(default_factory=KubernetesConfig)
    zone: str = setting(
        "", "Zone that this router runs in: of equal engines it takes those of the same zone "
        "(routing.zone_cost_s); default: not known.", flag="zone",
    )  # fmt: skip
    engine_key: str = setting(
        "", "API key that the router shows each engine that has none of its own in `upstreams`.",
        flag="engine-key",
        is_secret=True,
    )  # fmt: skip
    tls_ca: str = setting(
        "", "PEM file with the authority of engines' certificates; default: the system's.",
        flag="engine-tls-ca",
    )  # fmt: skip
    tls_cert: str = setting(
        "", "PEM file with the certificate that the router shows engines.", flag="engine-tls-cert"
    )
    tls_key: str = setting("", "PEM file with its private key.", flag="engine-tls-key")
    file_interval_s: float = setting(1.0, "Between looks at `file`.", unit="s", low=0.02)
    dns_interval_s: float = setting(5.0, "Between look-ups of `is_dns` names.", unit="s", low=0.5)
    poll_interval_s: float = setting(
        1.0, "Between reads of a plain server's /metrics.", unit="s", low=0.05
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightedConfig:
    """A filter or scorer of a profile."""

    name: str = setting("", "Which one.")
    weight: float = setting(1.0, "How much its score counts; scorers only.", low=0.0)
    threshold: float = setting(0.0, "For filters that need one.", low=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileConfig:
    """A policy put together from filters, weighted scorers and a picker."""

    name: str = setting("", "The policy's name.")
    filters: tuple[WeightedConfig, ...] = setting(
        (), "Applied in order; one that leaves none is skipped."
    )
    scorers: tuple[WeightedConfig, ...] = setting((), "Each scores from 0 to 1; weighted sum.")
    picker: str = setting("max", "Who wins.", choices=("max", "weighted-random", "random"))


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterConfig:
    """A LoRA adapter that the router loads on a pool's engines."""

    name: str = setting("", "As clients call it: a model's name.")
    uri: str = setting("", "Where engines find its files: what they get as lora_path.")
    pinned: bool = setting(False, "Load it on every engine, and never make room of it.")
    canary_of: str = setting(
        "",
        "Give it a share of the requests for this adapter of the list; it is on every engine then.",
    )
    canary_percent: float = setting(
        10.0, "That share; a session stays on its side.", low=0.0, high=100.0
    )

    @property
    def is_everywhere(self) -> bool:
        return self.pinned or bool(self.canary_of)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolConfig:
    """What differs for one pool."""

    name: str = setting("", "The pool.")
    policy: str = setting("", "Its policy; default: routing.policy.")
    adapters: tuple[AdapterConfig, ...] = setting(
        (), "LoRA adapters that the router loads on its engines and unloads: all they shall have."
    )
    adapter_slots: int = setting(
        16, "Adapters that the router loads on one of its engines at most.", low=1
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingConfig:
    """How an endpoint is chosen."""

    policy: str = setting(
        "prefix-load", "Policy of every pool that names none: a built-in one or a profile.",
        flag="policy",
    )  # fmt: skip
    pools: tuple[PoolConfig, ...] = setting((), "Pools with their own policy.")
    profiles: tuple[ProfileConfig, ...] = setting((), "Policies of your own.")
    shadows: tuple[str, ...] = setting(
        (), "Policies that are evaluated on a sample of requests and compared, never followed.",
        flag="shadow-policies",
    )  # fmt: skip
    sample_every: int = setting(
        64, "One request in so many keeps its scores and is shown to the shadows.", low=1
    )
    num_decisions: int = setting(256, "Kept for /debug/decisions.", low=0, high=100_000)
    balance_factor: float = setting(
        1.25, "No endpoint gets more than this many times its fair share of requests in flight.",
        low=1.0,
    )  # fmt: skip
    balance_slack: int = setting(
        8, "Requests in flight at an endpoint before balance_factor applies.", low=1
    )
    zone_cost_s: float = setting(
        0.001, "Price of an engine in another zone than discovery.zone, beside its wait; 0: none.",
        unit="s", low=0.0, flag="zone-cost",
    )  # fmt: skip
    prefill_min_tokens: int = setting(
        256, "Uncached tokens from which another engine computes a prompt (prefill-decode).", low=1
    )
    prefill_first_token_s: float = setting(
        0.0,
        "Target for the first token, by which engines of kv_role kv_both change sides; 0: they "
        "stay (prefill-decode).",
        unit="s", low=0.0,
    )  # fmt: skip
    prefill_token_s: float = setting(
        0.05, "Target for each further token; see prefill_first_token_s.", unit="s", low=0.001
    )
    session_headers: tuple[str, ...] = setting(
        (
            "x-session-id",
            "x-session-token",
            "x-smg-routing-key",
            "x-claude-code-session-id",
            "session-id",
            "thread-id",
        ),
        "Headers that name a session; the first one present counts.",
    )
    session_cookie: str = setting("", "Cookie that names a session; default: none.")
    max_keys_per_endpoint: int = setting(
        2_000_000, "Bound of the residency index per endpoint.", low=1000
    )
    seed: int = setting(0, "Of random picks; 0: from the system.")


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendConfig:
    """A share of a model's requests."""

    pool: str = setting("", "Pool that gets it.")
    revision: str = setting("", "Only endpoints of this revision.")
    weight: float = setting(1.0, "Relative to the other backends; 0: none.", low=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class MirrorConfig:
    """Copies of requests whose responses are discarded."""

    pool: str = setting("", "Pool that gets the copies.")
    revision: str = setting("", "Only endpoints of this revision.")
    percent: float = setting(0.0, "Share of requests copied.", unit="%", low=0.0, high=100.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModelConfig:
    """A model name that is more than what engines say of themselves."""

    name: str = setting("", "As clients call it.")
    alias_of: str = setting("", "Serve this model instead; engines see its name.")
    backends: tuple[BackendConfig, ...] = setting(
        (), "Who serves it, by weight; default: discovered."
    )
    mirrors: tuple[MirrorConfig, ...] = setting((), "Who gets copies.")
    adapters: tuple[str, ...] = setting((), "LoRA adapters that its engines can load on request.")
    hidden: bool = setting(False, "Leave it out of /v1/models.")


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyConfig:
    """An API key and what its owner may do. One of key, key_env, sha256."""

    tenant: str = setting(
        "", "Whose key it is; keys of one tenant share its turns. Limits are each key's own."
    )
    key: str = setting("", "The key itself.", is_secret=True)
    key_env: str = setting("", "Environment variable that holds it.")
    sha256: str = setting("", "Its SHA-256 in hexadecimal.", is_secret=True)
    requests_per_s: float = setting(0.0, "Rate of requests; 0: any.", unit="1/s", low=0.0)
    tokens_per_min: float = setting(0.0, "Prompt and output tokens; 0: any.", unit="1/min", low=0.0)
    max_in_flight: int = setting(0, "Requests at once, waiting included; 0: any.", low=0)
    weight: float = setting(1.0, "Share of tokens when tenants compete.", low=0.001)
    priority: int = setting(
        0, "Waiting requests of keys with lower numbers go first.", low=-100, high=100
    )
    models: tuple[str, ...] = setting((), "Models it may use; default: all.")
    trusted: bool = setting(
        False, "Its requests may name hosts, KV blocks and ranks of engines (kv_transfer_params, "
        "bootstrap_*, x-data-parallel-rank), and see how they were placed (x-octavo-explain).",
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowConfig:
    """Who may send how much, and who waits."""

    keys: tuple[KeyConfig, ...] = setting(
        (), "API keys. None, here and in keys_file: no key is required."
    )
    keys_file: str = setting(
        "", "YAML file with a list `keys`, read again when it changes.", flag="keys-file"
    )
    cache_scope: str = setting(
        "shared", "Who may be answered from whose prompts' KV cache: everybody, or each tenant "
        "from its own alone (by a salt in its requests); costs the sharing between tenants.",
        choices=("shared", "tenant"), flag="cache-scope",
    )  # fmt: skip
    fairness_header: str = setting(
        "x-llm-d-inference-fairness-id",
        "Names the tenant where no keys are required; only its share depends on it.",
    )
    max_queue: int = setting(1000, "Requests waiting, per pool.", low=0, flag="max-queue")
    max_queue_bytes: int = setting(
        256 * 2**20, "Their bodies together, per pool.", unit="bytes", low=0
    )
    queue_timeout_s: float = setting(
        30.0,
        "How long one may wait for room. Who would wait longer is refused at once.",
        unit="s",
        low=0.0,
        flag="queue-timeout",
    )
    hold_timeout_s: float = setting(
        30.0, "How long one may wait for the first engine of a pool (scale from zero).",
        unit="s", low=0.0, flag="hold-timeout",
    )  # fmt: skip
    in_flight_factor: float = setting(
        1.25, "An endpoint is full at this many times its max_num_seqs.", low=0.1
    )
    max_in_flight: int = setting(
        256, "Requests at an endpoint that does not report its max_num_seqs.", low=1
    )
    output_weight: float = setting(
        2.0, "What an output token counts in fairness, in prompt tokens.", low=0.0
    )
    default_max_tokens: int = setting(
        256, "Output tokens expected of a request that names no limit.", unit="tokens", low=1
    )
    idempotency_s: float = setting(
        600.0, "How long answers to requests with an idempotency-key are kept; 0: not at all.",
        unit="s", low=0.0,
    )  # fmt: skip
    idempotency_bytes: int = setting(
        64 * 2**20, "Such answers together, of 1 MiB each at most.", unit="bytes", low=0
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryConfig:
    """When a failed attempt is repeated elsewhere."""

    max_attempts: int = setting(3, "Attempts at one request.", low=1, high=10)
    max_refusals: int = setting(1, "Other endpoints tried after a 503 or 429.", low=0, high=10)
    max_resumes: int = setting(
        2, "Times a broken generation is continued elsewhere.", low=0, high=10
    )
    quarantine_s: float = setting(
        600.0, "How long a request is refused after two engines died of it; 0: never.",
        unit="s", low=0.0,
    )  # fmt: skip
    budget: float = setting(0.2, "Retries and resumes per active request.", low=0.0, high=1.0)
    budget_min: int = setting(3, "Retries that are always allowed at once.", low=0)
    client_share: float = setting(
        0.1, "Retries per request of one tenant, over two minutes.", low=0.0, high=1.0
    )
    throttle_factor: float = setting(
        2.0,
        "Requests per accepted one, over two minutes, before some are refused at once.",
        low=1.0,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthConfig:
    """When an endpoint is taken out by what it does, and how it comes back."""

    max_failures: int = setting(5, "Failures in a row that eject.", low=1)
    outlier_factor: float = setting(
        3.0, "Errors or latency over the pool's median by this factor eject.", low=1.1
    )
    window_s: float = setting(10.0, "Over which they are measured.", unit="s", low=1.0)
    min_requests: int = setting(10, "In the window, for a verdict.", low=1)
    ejection_s: float = setting(10.0, "First ejection; the n-th in a row takes n times as long.",
                                unit="s", low=0.1)  # fmt: skip
    max_ejection_s: float = setting(300.0, "Longest ejection.", unit="s", low=0.1)
    max_ejected: float = setting(0.5, "Share of a pool that may be ejected.", low=0.0, high=1.0)
    slow_start_s: float = setting(
        10.0, "In which a returning endpoint grows to its full share.", unit="s", low=0.0
    )
    canary_interval_s: float = setting(
        10.0,
        "Between test generations on an idle endpoint; 0: only to re-admit.",
        unit="s",
        low=0.0,
    )
    canary_prompt: str = setting("The capital of France is", "What a test generation asks.")
    canary_answer: str = setting("", "What it must begin with; default: what most others answer.")


@dataclass(frozen=True, slots=True, kw_only=True)
class EppConfig:
    """The endpoint picker for Gateway API's inference extension."""

    enabled: bool = setting(False, "Serve ext_proc over gRPC.", flag="epp")
    port: int = setting(9002, "Port of ext_proc.", flag="epp-port", low=0, high=65535)
    fallbacks: int = setting(
        1, "Endpoints named behind the chosen one, for the gateway's own retries.", low=0, high=8
    )
    response_bodies: bool = setting(
        True,
        "Follow answers to their end: exact load and token counts, at a message for each piece. "
        "False asks the gateway to keep them; it must allow mode overrides.",
    )
    tls_cert: str = setting(
        "", "PEM file with the certificate chain; default: no TLS.", flag="epp-tls-cert"
    )
    tls_key: str = setting("", "PEM file with the private key.", flag="epp-tls-key")
    tls_client_ca: str = setting(
        "", "PEM file with an authority: only gateways with its certificates may connect."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TracingConfig:
    """Spans over OTLP."""

    endpoint: str = setting("", "Collector's URL; default: no traces.", flag="otlp-endpoint")
    sample_ratio: float = setting(
        1.0, "Share of requests without a sampled parent.", low=0.0, high=1.0
    )
