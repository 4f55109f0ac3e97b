"""The engine's settings: one frozen tree, validated whole, read once at start."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, get_args

from octavo_engine.errors import ConfigError
from octavo_engine.protocol.endpoints import KV_PORT

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

# Tokens per KV block: a sheet folded into sixteen pages. It is the kernels' panel width too.
HOST_MEMORY_FRACTION = 0.5  # for KV, of the memory free after loading; others share the host
BLOCK_SIZE = 16

MAX_THREADS = 1024  # the extension's own bound
_ONE_OF_GPU = "it must be 1 here, with an engine for each GPU behind `octavo router`"
MAX_RANKS = 64  # the extension's own bound
MAX_ADAPTER_SLOTS = 1024
MAX_LORA_RANK = 256
OWN_CONNECTOR = "OctavoConnector"  # of KV transfer
LOOPBACK = ("127.0.0.1", "::1", "localhost")
MAX_PEERS = 16  # engines whose KV blocks are looked up for each prompt
MAX_MIGRATION_S = 60
_TRANSFER_EXTRA = {"peers", "secret_file", "migration_s"}  # in kv_connector_extra_config
# Fields of vLLM's whose one value is how it always is here.
_TRANSFER_FIXED = {"kv_buffer_device": "cpu", "kv_load_failure_policy": "recompute"}
SUFFIX_DEPTH = 24
MAX_SPECULATION = 64  # tokens guessed ahead: what a step has rows of logits for beside its own

Device = Literal["auto", "cpu", "cuda", "plugin", "torch", "sim"]
LoadFormat = Literal["auto", "dummy", "safetensors", "gguf"]
WeightFormat = Literal["auto", "awq", "gptq", "compressed-tensors", "fp8", "gguf"]
Runner = Literal["auto", "generate", "pooling"]
SimTask = Literal["generate", "embed"]
Policy = Literal["fcfs", "priority"]
DType = Literal["auto", "bfloat16", "float16", "float32"]
KernelChoice = Literal["auto", "triton", "plain"]
AttentionBackend = Literal["auto", "triton", "flashinfer"]
ExecutorBackend = Literal["auto", "uni", "mp", "ray"]
Quantization = Literal["auto", "none", "int8", "int4"]
SpeculationMethod = Literal[
    "ngram", "suffix", "draft_model", "medusa", "mlp_speculator", "eagle", "eagle3", "mtp"
]
ModelImpl = Literal["auto", "octavo", "transformers"]
KVRole = Literal["kv_producer", "kv_consumer", "kv_both"]
KVCacheDType = Literal["auto", "bfloat16", "float32", "int8", "fp8", "fp8_e4m3", "fp8_e5m2"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """How a step is filled."""

    max_num_seqs: int = 128  # sequences that may run at once
    max_num_batched_tokens: int = 2048  # tokens in one step
    policy: Policy = "fcfs"
    max_queue: int = 1024  # waiting sequences before new ones are refused (503)
    # Requests that would wait longer, or longer than clients do, are refused (503); inf: none.
    queue_timeout_s: float = 30.0
    max_step_ms: float = (
        200.0  # a step with prefill is cut to about this long while others are decoding
    )
    max_model_len: int = 2048  # tokens in one sequence, prompt and output together
    enable_prefix_caching: bool = True
    aging_s: float = 5.0  # how long a waiting request may be passed by smaller ones
    # Of the KV cache, what requests may retain after their end; 0: nothing.
    max_retained_kv: float = 0.25
    max_retained_kv_per_tenant: float = 0.25
    max_retention_s: float = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SimConfig:
    """The simulator's model of a forward pass."""

    step_base_ms: float = 2.0  # every step
    decode_token_ms: float = 0.05  # each token of a sequence that was caught up
    prefill_token_ms: float = 0.1  # each prompt token
    kv_blocks: int = 4096  # size of the pool
    vocab_size: int = 512
    time_scale: float = 1.0  # < 1 runs faster than real time
    # Of several ranks: how much longer than all on average the slowest one takes, and what a step
    # takes beside that, or from stage to stage, for waiting and sending.
    rank_skew: float = 0.0
    exchange_ms: float = 0.0
    # The step after each start in which one of several ranks ends or hangs; 0: none.
    rank_ends_at_step: int = 0
    rank_hangs_at_step: int = 0
    task: SimTask = "generate"  # what the model that is simulated does

    @property
    def loses_ranks(self) -> bool:
        return bool(self.rank_ends_at_step or self.rank_hangs_at_step)


@dataclass(frozen=True, slots=True, kw_only=True)
class KVEventsConfig:
    """Where KV events go, under vLLM's names."""

    enable_kv_cache_events: bool = False
    publisher: str = "zmq"  # or null: nowhere
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000  # batches that can be replayed
    hwm: int = 100_000  # messages that a slow subscriber may be behind before it loses some
    max_queue_size: int = 100_000  # batches that wait to be sent before some are dropped
    topic: str = ""

    @classmethod
    def parse(cls, text: str) -> KVEventsConfig:
        """From JSON. Raises ConfigError that names the field."""
        flag = "--kv-events-config"
        given = _json_object(flag, text)
        for name, value in _known_items(flag, given, cls):
            if value is None and name in ("publisher", "replay_endpoint"):
                continue
            kind = str if name == "replay_endpoint" else type(getattr(cls(), name))
            if type(value) is not kind:
                raise ConfigError(f"{flag}: {name} has the wrong type; got {value!r:.60}")
            if kind is int and isinstance(value, int):
                _check(value >= 1, f"{flag}: {name} must be at least 1", value)
        if given.get("publisher", "zmq") not in ("zmq", "null", None):
            raise ConfigError(f"{flag}: publisher must be zmq or null; got {given['publisher']!r}")
        return cls(**given)

    @property
    def is_on(self) -> bool:
        return self.enable_kv_cache_events and self.publisher == "zmq"


@dataclass(frozen=True, slots=True, kw_only=True)
class EplbConfig:
    """When experts move between the ranks that have them, under vLLM's names."""

    window_size: int = 1000  # steps whose rows count
    step_interval: int = 3000  # steps from one move to the next
    num_redundant_experts: int = 0  # of each layer, on all ranks together
    log_balancedness: bool = False  # at each move

    @classmethod
    def parse(cls, text: str) -> EplbConfig:
        """From JSON. Raises ConfigError that names the field."""
        flag = "--eplb-config"
        given = _json_object(flag, text)
        for name, value in _known_items(flag, given, cls):
            if type(value) is not type(getattr(cls(), name)):
                raise ConfigError(f"{flag}: {name} has the wrong type; got {value!r:.60}")
            least = 0 if name == "num_redundant_experts" else 1
            _check(isinstance(value, bool) or least <= value <= 1_000_000,
                   f"{flag}: {name} must be from {least} to 1000000", value)  # fmt: skip
        config = cls(**given)
        _check(config.window_size <= config.step_interval,
               f"{flag}: window_size must not be above step_interval",
               f"{config.window_size} and {config.step_interval}")  # fmt: skip
        return config

    @property
    def first_step_of_window(self) -> int:
        """After how many steps of an interval its window begins."""
        return (self.step_interval - self.window_size) % self.step_interval


@dataclass(frozen=True, slots=True, kw_only=True)
class KVTransferConfig:
    """Whether KV blocks come from other engines and go to them, under vLLM's names."""

    kv_connector: str = OWN_CONNECTOR
    kv_role: KVRole = "kv_both"
    engine_id: str = ""  # default: made up at each start
    kv_ip: str = "127.0.0.1"  # where blocks are served; other engines are given this address
    kv_port: int = KV_PORT  # 0: any that is free
    peers: tuple[str, ...] = ()  # HOST:PORT of engines whose blocks are looked up for each prompt
    secret_file: str | None = None  # with what all engines that share blocks must know
    # When it drains, routers go on with its streams elsewhere at once, and it serves their blocks
    # for so long; 0: it finishes them.
    migration_s: float = 0.0
    extra_config: Mapping[str, Any] = field(default_factory=dict)  # for another package's

    @property
    def is_own(self) -> bool:
        """Whether blocks go between Octavo's engines, and not to a connector of another package."""
        return self.kv_connector == OWN_CONNECTOR

    @property
    def produces(self) -> bool:
        return self.kv_role != "kv_consumer"

    @property
    def consumes(self) -> bool:
        return self.kv_role != "kv_producer"

    @classmethod
    def parse(cls, text: str) -> KVTransferConfig:
        """From JSON. Raises ConfigError that names the field."""
        flag = "--kv-transfer-config"
        given = _json_object(flag, text)
        extra = given.pop("kv_connector_extra_config", {})
        if not isinstance(extra, dict):
            raise ConfigError(f"{flag}: kv_connector_extra_config must be an object")
        if given.get("kv_connector", OWN_CONNECTOR) != OWN_CONNECTOR:
            return cls._parse_other(flag, given, extra)
        _check_transfer_names(flag, given, extra)
        for name in _TRANSFER_FIXED.keys() & given.keys():
            only = _TRANSFER_FIXED[name]
            _check(given[name] == only, f"{flag}: {name} must be {only}, or left out", given[name])
            del given[name]
        _check_transfer_values(flag, given, extra)
        config = cls(**given, peers=tuple(extra.get("peers", ())),
                     secret_file=extra.get("secret_file"),
                     migration_s=float(extra.get("migration_s", 0.0)))  # fmt: skip
        _check(config.produces or not config.migration_s,
               f"{flag}: migration_s needs an engine that serves blocks, with kv_role kv_producer "
               "or kv_both", config.kv_role)  # fmt: skip
        is_safe = not config.produces or config.secret_file is not None or config.kv_ip in LOOPBACK
        _check(is_safe, f"{flag}: kv_ip other than {LOOPBACK[0]} needs secret_file in "
               "kv_connector_extra_config, or anyone who can connect could read what prompts "
               "said", config.kv_ip)  # fmt: skip
        return config

    @classmethod
    def _parse_other(
        cls, flag: str, given: dict[str, Any], extra: dict[str, Any]
    ) -> KVTransferConfig:
        """For a connector of another package, which reads `extra` itself. Raises ConfigError."""
        known = {"kv_connector", "kv_connector_module_path", "kv_role", "engine_id"}
        for name in given.keys() - known:
            raise ConfigError(
                f"{flag}: {name} has no effect with kv_connector {given['kv_connector']}: leave it "
                "out, or put what the connector needs into kv_connector_extra_config"
            )
        if "kv_role" not in given:
            raise ConfigError(f"{flag} needs the fields kv_connector and kv_role")
        _check_choice(f"{flag}: kv_role", given["kv_role"], KVRole)
        for name in known - {"kv_role"}:
            value = given.get(name, "x")
            _check(isinstance(value, str) and 0 < len(value) <= 255,
                   f"{flag}: {name} must be a string of 1 to 255 characters", value)  # fmt: skip
        connector, module = given["kv_connector"], given.get("kv_connector_module_path")
        if module is not None:
            connector = f"{module}:{connector}"
        return cls(
            kv_connector=connector, kv_role=given["kv_role"],
            engine_id=given.get("engine_id", ""), extra_config=extra,
        )  # fmt: skip


def _check_transfer_names(flag: str, given: dict[str, Any], extra: dict[str, Any]) -> None:
    known = {field.name for field in dataclasses.fields(KVTransferConfig)}
    known -= _TRANSFER_EXTRA | {"extra_config"}
    for name in given:
        if name in _TRANSFER_EXTRA:
            raise ConfigError(f"{flag}: {name} belongs in kv_connector_extra_config")
        if name not in known | _TRANSFER_FIXED.keys():
            raise ConfigError(
                f"{flag} has an unknown field {name}; known: {', '.join(sorted(known))}, "
                "kv_connector_extra_config"
            )
    for name in extra.keys() - _TRANSFER_EXTRA:
        raise ConfigError(
            f"{flag}: kv_connector_extra_config has an unknown field {name}; known: "
            f"{', '.join(sorted(_TRANSFER_EXTRA))}"
        )
    if "kv_connector" not in given or "kv_role" not in given:
        raise ConfigError(f"{flag} needs the fields kv_connector and kv_role")


def _check_transfer_values(flag: str, given: dict[str, Any], extra: dict[str, Any]) -> None:
    _check_choice(f"{flag}: kv_role", given["kv_role"], KVRole)
    for name in ("engine_id", "kv_ip"):
        value = given.get(name, "x")
        _check(isinstance(value, str) and 0 < len(value) <= 255,
               f"{flag}: {name} must be a string of 1 to 255 characters", value)  # fmt: skip
    port = given.get("kv_port", 0)
    _check(type(port) is int and 0 <= port <= 65535,
           f"{flag}: kv_port must be from 0 to 65535", port)  # fmt: skip
    peers = extra.get("peers", [])
    _check(isinstance(peers, list) and len(peers) <= MAX_PEERS and all(map(_is_peer, peers)),
           f"{flag}: peers must be a list of up to {MAX_PEERS} HOST:PORT", peers)  # fmt: skip
    held_s = extra.get("migration_s", 0.0)
    _check(type(held_s) in (int, float) and 0 <= held_s <= MAX_MIGRATION_S,
           f"{flag}: migration_s must be from 0 to {MAX_MIGRATION_S}", held_s)  # fmt: skip
    secret = extra.get("secret_file")
    _check(secret is None or (isinstance(secret, str) and secret != ""),
           f"{flag}: secret_file must name a file", secret)  # fmt: skip


def split_address(text: str) -> tuple[str, int]:
    """Of HOST:PORT or [HOST]:PORT. Raises ValueError."""
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    number = int(port)
    if not 0 < len(host) <= 255 or not 0 < number < 1 << 16:
        raise ValueError(f"not HOST:PORT: {text:.60}")
    return host, number


def join_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _is_peer(value: object) -> bool:
    if not isinstance(value, str):
        return False
    try:
        split_address(value)
    except ValueError:
        return False
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationConfig:
    """How tokens are guessed ahead, under vLLM's names."""

    method: SpeculationMethod = "ngram"
    num_speculative_tokens: int = 4  # the most that are guessed for a sequence in a step
    prompt_lookup_min: int = 5  # tokens that must have come before for what followed to be guessed
    prompt_lookup_max: int = 5  # tokens looked for first; the longest that was there counts
    # Of the method suffix: last tokens that are compared; answers in memory; tokens guessed for
    # each that is alike; the least share of the texts met that go on so.
    suffix_decoding_max_tree_depth: int = SUFFIX_DEPTH
    suffix_decoding_max_cached_requests: int = 10_000
    suffix_decoding_max_spec_factor: float = 1.0
    suffix_decoding_min_token_prob: float = 0.1
    model: str = ""  # the draft model or heads, as --model names one; of mtp: none
    revision: str | None = None  # of them
    quantization: Quantization = "auto"  # of their weights

    @classmethod
    def parse(cls, text: str) -> SpeculationConfig:
        """From JSON. Raises ConfigError that names the field."""
        flag = "--speculative-config"
        given = _json_object(flag, text)
        method = given.get("method", "draft_model" if "model" in given else None)
        method = method if isinstance(method, str) else None
        method = _SAME_METHODS.get(method, method) if method else None
        if method not in _SPECULATION_FIELDS:
            raise ConfigError(
                f"{flag} must have a method, one of {', '.join(_SPECULATION_FIELDS)}, or the "
                f"model that drafts; got method {method!r:.60}"
            )
        known = _SPECULATION_FIELDS[method]
        for name, value in given.items():
            if name not in known:
                raise ConfigError(
                    f"{flag} has a field {name}, which the method {method} does not take; "
                    f"known: {', '.join(known)}"
                )
            _check_speculation_field(flag, name, value)
        given["method"] = method
        if "model" in known and not given.get("model"):
            raise ConfigError(f"{flag}: method {method} needs the field model")
        if method == "suffix" and "num_speculative_tokens" not in given:  # as in vLLM
            depth = given.get("suffix_decoding_max_tree_depth", SUFFIX_DEPTH)
            given["num_speculative_tokens"] = min(depth, MAX_SPECULATION)
        lookups = ("prompt_lookup_min", "prompt_lookup_max")
        values = [given[name] for name in lookups if name in given]
        if len(values) == 1:  # one of the two is both, as vLLM has it
            given |= dict.fromkeys(lookups, values[0])
        config = cls(**given)
        _check(config.prompt_lookup_min <= config.prompt_lookup_max,
               f"{flag}: prompt_lookup_min must not be above prompt_lookup_max",
               f"{config.prompt_lookup_min} and {config.prompt_lookup_max}")  # fmt: skip
        return config


_DRAFT_FIELDS = ("method", "model", "num_speculative_tokens", "revision", "quantization")
_MEDIA_KINDS = ("image", "video", "audio")
# Of the method suffix, with the least and the most of each.
_SUFFIX_FIELDS: dict[str, tuple[float, float]] = {
    "suffix_decoding_max_tree_depth": (1, 1024),
    "suffix_decoding_max_cached_requests": (0, 1_000_000),
    "suffix_decoding_max_spec_factor": (0.0, 64.0),
    "suffix_decoding_min_token_prob": (0.0, 1.0),
}
# What each method takes.
_SPECULATION_FIELDS = {
    "ngram": ("method", "num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max"),
    "suffix": ("method", "num_speculative_tokens", *_SUFFIX_FIELDS),
    "draft_model": _DRAFT_FIELDS,
    "medusa": _DRAFT_FIELDS,
    "mlp_speculator": _DRAFT_FIELDS,
    "eagle": _DRAFT_FIELDS,
    "eagle3": _DRAFT_FIELDS,
    "mtp": ("method", "num_speculative_tokens", "quantization"),
}
HEADS_WITHOUT_LAYERS = ("medusa", "mlp_speculator")  # in the cache
# vLLM's other names.
_SAME_METHODS = {
    "deepseek_mtp": "mtp",
    "glm4_moe_mtp": "mtp",
    "glm4_moe_lite_mtp": "mtp",
    "qwen3_next_mtp": "mtp",
}


def _check_speculation_field(flag: str, name: str, value: object) -> None:
    if name in ("method", "model", "revision"):
        is_text = isinstance(value, str) or (value is None and name == "revision")
        _check(is_text, f"{flag}: {name} must be a string", repr(value)[:60])
    elif name in _SUFFIX_FIELDS:
        least, most = _SUFFIX_FIELDS[name]
        is_whole = isinstance(most, int)
        if isinstance(value, bool) or not isinstance(value, int if is_whole else (int, float)):
            what = "a whole number" if is_whole else "a number"
            raise ConfigError(f"{flag}: {name} must be {what}; got {value!r:.60}")
        _check(least <= value <= most, f"{flag}: {name} must be from {least:g} to {most:g}", value)
    elif name == "quantization":
        _check_choice(f"{flag}: quantization", value, Quantization)
    else:
        if type(value) is not int:
            raise ConfigError(f"{flag}: {name} must be a whole number; got {value!r:.60}")
        _check(1 <= value <= MAX_SPECULATION,
               f"{flag}: {name} must be from 1 to {MAX_SPECULATION}", value)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The settings of `octavo serve` and `LLM`; the model settles what is `auto` or None."""

    model: str = "demo://smollm2"  # folder, .gguf, hf://ORG/NAME[@REV], ORG/NAME, demo://NAME
    tokenizer: str | None = None  # folder or file; default: the model's own
    served_model_names: tuple[str, ...] = ()  # default: the model reference as given
    revision: str | None = None  # of a hub model
    download_dir: str | None = None  # for the Hub's files; default: the Hub's own cache
    hf_overrides: str | None = None  # JSON with fields that replace those of config.json
    model_impl: ModelImpl = "auto"  # auto: our page of the model, transformers' without one
    trust_remote_code: bool = False  # run code of the model's repository; transformers only
    device: Device = "auto"
    platform: str | None = None  # of --device plugin: xpu, hpu, npu, tpu, or an entry point's name
    dtype: DType = "auto"
    quantization: Quantization = "auto"  # of weights; auto: as the file has them
    activation_bits: int = 16  # what they are rounded to where weights are integers; or 8
    kv_cache_dtype: KVCacheDType = "auto"  # auto: as dtype; fp8 is fp8_e4m3
    kernels: KernelChoice = "auto"  # of --device cuda
    attention_backend: AttentionBackend = "auto"  # of Triton kernels, for prompts
    batch_invariant: bool = False  # on --device cuda too the bits of an answer are its own
    enforce_eager: bool = False  # no CUDA graphs
    # Plan a step while the one before computes; None: where the device allows it.
    async_scheduling: bool | None = None
    load_format: LoadFormat = "auto"  # dummy: random weights; others: what the files must be
    weight_format: WeightFormat = "auto"  # how the files must be quantized; auto: in any way
    runner: Runner = "auto"  # what the model must be for; auto: either
    max_model_len: int | None = None  # default: the model's own, cut to what the KV pool holds
    kv_cache_memory_bytes: int | None = (
        None  # default: a share of the memory that is free after loading
    )
    # Of the memory free after loading, for KV, when no size is given; default: half of a host's
    # and nine tenths of a device's.
    memory_fraction: float | None = None
    num_threads: int | None = None  # of all ranks; default: the cores this process may use
    tensor_parallel_size: int = 1  # processes that share each layer
    cpu_tp: Literal["off", "auto"] = "off"  # auto: as many as there are memory nodes
    # Of those, each has some experts as a whole instead of some rows of every expert.
    enable_expert_parallel: bool = False
    expert_metrics: bool = False  # counts of each expert of each layer
    enable_eplb: bool = False  # they move between ranks, by what each has to do
    eplb_config: str | None = None  # JSON with the fields of EplbConfig
    pipeline_parallel_size: int = 1  # processes that have some layers each, one after another
    pipeline_layer_partition: str | None = None  # layers of each; default: equal work
    nnodes: int = 1  # hosts of one engine, a stage on each
    node_rank: int = 0  # which of them this is; 0 serves requests
    master_addr: str = "127.0.0.1"  # of node 0, where it listens for the others
    master_port: int = 29501
    node_key_file: str | None = None  # what all of them share
    data_parallel_size: int = 1  # cores behind one API, each with the whole model
    data_parallel_rank: int = 0  # which of them these settings are for; set by the engine
    distributed_executor_backend: ExecutorBackend = "auto"  # auto: mp if there are several ranks
    seed: int = 0  # of requests that give none
    stream_interval: int = 1  # tokens of an answer in one piece of a stream, after the first
    chat_template: str | None = None  # file or template text that replaces the model's own
    kv_events_config: str | None = None  # JSON with the fields of KVEventsConfig
    kv_offloading_size: float = 0.0  # GiB of the host's memory for KV blocks beside the pool
    kv_disk_path: str | None = None  # folder for KV blocks that outlive the engine
    kv_disk_size: float = 10.0  # GiB that files in it may take
    kv_shared_store: str | None = None  # folder or s3://bucket/prefix that engines share
    kv_shared_size: float = 100.0  # GiB that files in it may take
    encryption_key_file: str | None = None  # keys for files that outlive the engine
    kv_transfer_config: str | None = None  # JSON with the fields of KVTransferConfig
    speculative_config: str | None = None  # JSON with the fields of SpeculationConfig and a method
    limit_mm_per_prompt: str | None = None  # JSON or image=4: most pictures of a prompt
    mm_processor_kwargs: str | None = None  # JSON, in place of preprocessor_config.json's fields
    mm_processor_cache_gb: float | None = None  # GiB for rows of pictures; default: 128 MiB
    enable_lora: bool = False  # requests may name LoRA adapters
    max_loras: int = 16  # adapters in one step
    max_cpu_loras: int | None = None  # adapters in the host's memory; default: 4 times max_loras
    max_lora_rank: int = 64  # of an adapter that is loaded
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    sim: SimConfig = field(default_factory=SimConfig)

    def __post_init__(self) -> None:
        s = self.scheduler
        _check_choice("--device", self.device, Device)
        _check_choice("--model-impl", self.model_impl, ModelImpl)
        _check_choice("--dtype", self.dtype, DType)
        _check_choice("--quantization", self.quantization, Quantization)
        _check(self.activation_bits in (8, 16), "--activation-bits must be 8 or 16",
               self.activation_bits)  # fmt: skip
        _check_choice("--kv-cache-dtype", self.kv_cache_dtype, KVCacheDType)
        _check_choice("--kernels", self.kernels, KernelChoice)
        _check(self.stream_interval >= 1, "--stream-interval must be at least 1",
               self.stream_interval)  # fmt: skip
        _check(self.platform is None or self.device == "plugin",
               "--platform goes with --device plugin", f"--device {self.device}")  # fmt: skip
        _check_choice("--attention-backend", self.attention_backend, AttentionBackend)
        _check(not (self.batch_invariant and self.device == "torch"),
               "--batch-invariant is a mode of --device cuda, and how --device cpu always is; the "
               "reference has no such mode: --device must be cpu or cuda", self.device)  # fmt: skip
        _check_choice("--sim-task", self.sim.task, SimTask)
        _check_choice("--load-format", self.load_format, LoadFormat)
        _check_choice("--weight-format", self.weight_format, WeightFormat)
        _check_choice("--runner", self.runner, Runner)
        _check_choice("--scheduling-policy", s.policy, Policy)
        _check(s.max_num_seqs >= 1, "--max-num-seqs must be at least 1", s.max_num_seqs)
        _check(s.max_num_batched_tokens >= 1, "--max-num-batched-tokens must be at least 1",
               s.max_num_batched_tokens)  # fmt: skip
        _check(s.max_queue >= 1, "--max-queue must be at least 1", s.max_queue)
        _check(s.queue_timeout_s > 0, "--queue-timeout must be above 0", s.queue_timeout_s)
        _check(s.max_step_ms > 0, "--max-step-ms must be above 0", s.max_step_ms)
        _check(
            0 <= s.max_retained_kv <= 1, "--max-retained-kv must be from 0 to 1", s.max_retained_kv
        )
        _check(
            0 <= s.max_retained_kv_per_tenant <= 1,
            "--max-retained-kv-per-tenant must be from 0 to 1",
            s.max_retained_kv_per_tenant,
        )
        _check(s.max_retention_s > 0, "--max-retention-s must be above 0", s.max_retention_s)
        _check(self.max_model_len is None or self.max_model_len >= 1,
               "--max-model-len must be at least 1", self.max_model_len)  # fmt: skip
        _check(self.num_threads is None or 1 <= self.num_threads <= MAX_THREADS,
               f"--num-threads must be from 1 to {MAX_THREADS}", self.num_threads)  # fmt: skip
        self._check_parallelism()
        fraction = self.memory_fraction
        _check(fraction is None or (0 < fraction <= 1 and math.isfinite(fraction)),
               "--memory-fraction must be above 0 and at most 1", fraction)  # fmt: skip
        _check(self.kv_cache_memory_bytes is None or self.kv_cache_memory_bytes > 0,
               "--kv-cache-memory-bytes must be above 0", self.kv_cache_memory_bytes)  # fmt: skip
        self._check_tiers()
        self._check_pictures()
        if self.kv_events.is_on:
            _check(s.enable_prefix_caching,
                   "--kv-events-config needs --enable-prefix-caching", False)  # fmt: skip
        _check(1 <= self.max_loras <= MAX_ADAPTER_SLOTS,
               f"--max-loras must be from 1 to {MAX_ADAPTER_SLOTS}", self.max_loras)  # fmt: skip
        _check(self.max_cpu_loras is None or self.max_cpu_loras >= self.max_loras,
               f"--max-cpu-loras must be at least --max-loras, {self.max_loras}",
               self.max_cpu_loras)  # fmt: skip
        rank = self.max_lora_rank
        _check(1 <= rank <= MAX_LORA_RANK, f"--max-lora-rank must be from 1 to {MAX_LORA_RANK}",
               rank)  # fmt: skip
        _ = self.overrides, self.speculation  # refused at start, not with the first request
        _check(not (self.async_scheduling and self.speculation),
               "--async-scheduling plans before tokens are known, --speculative-config guesses "
               "what follows them: leave one of them out", "both")  # fmt: skip

    def _check_tiers(self) -> None:
        size, disk_size = self.kv_offloading_size, self.kv_disk_size
        _check(math.isfinite(size) and size >= 0,
               "--kv-offloading-size must be at least 0, in GiB", size)  # fmt: skip
        _check(math.isfinite(disk_size) and disk_size > 0,
               "--kv-disk-size must be above 0, in GiB", disk_size)  # fmt: skip
        _check(self.kv_disk_path != "", "--kv-disk-path must name a folder", "an empty path")
        shared, shared_size = self.kv_shared_store, self.kv_shared_size
        _check(math.isfinite(shared_size) and shared_size > 0,
               "--kv-shared-size must be above 0, in GiB", shared_size)  # fmt: skip
        is_place = shared is None or (shared not in ("", "s3://") and (
            "://" not in shared or shared.startswith("s3://")))  # fmt: skip
        _check(is_place, "--kv-shared-store must be a folder or s3://bucket/prefix", shared)
        is_own_folder = shared is None or shared != self.kv_disk_path
        _check(is_own_folder, "--kv-shared-store must be another folder than --kv-disk-path",
               shared)  # fmt: skip
        has_tiers = size > 0 or self.kv_disk_path is not None or shared is not None
        _check(not has_tiers or self.scheduler.enable_prefix_caching,
               "--kv-offloading-size, --kv-disk-path and --kv-shared-store need "
               "--enable-prefix-caching", False)  # fmt: skip
        _check(self.kv_transfer is None or self.scheduler.enable_prefix_caching,
               "--kv-transfer-config needs --enable-prefix-caching", False)  # fmt: skip

    def _check_parallelism(self) -> None:
        backend = self.distributed_executor_backend
        _check_choice("--distributed-executor-backend", backend, ExecutorBackend)
        for flag, size in (
            ("--tensor-parallel-size", self.tensor_parallel_size),
            ("--pipeline-parallel-size", self.pipeline_parallel_size),
        ):
            _check(1 <= size <= MAX_RANKS, f"{flag} must be from 1 to {MAX_RANKS}", size)
            self._check_ranks(flag, size)
        _check(self.tensor_parallel_size == 1 or self.pipeline_parallel_size == 1,
               "--tensor-parallel-size shares each layer, --pipeline-parallel-size spreads them: "
               "one of them must be 1", "both")  # fmt: skip
        _check(self.pipeline_layer_partition is None or self.pipeline_parallel_size > 1,
               "--pipeline-layer-partition goes with --pipeline-parallel-size",
               self.pipeline_layer_partition)  # fmt: skip
        _check(backend != "ray" or self.pipeline_parallel_size > 1,
               "--distributed-executor-backend ray places the stages of --pipeline-parallel-size, "
               "which must be above 1; ranks that share each layer need one host: use mp",
               self.pipeline_parallel_size)  # fmt: skip
        _check(backend != "ray" or self.nnodes == 1,
               "--distributed-executor-backend ray chooses the hosts itself: --nnodes must be 1",
               self.nnodes)  # fmt: skip
        _check(backend != "ray" or self.data_parallel_size == 1,
               "--distributed-executor-backend ray needs --data-parallel-size 1",
               self.data_parallel_size)  # fmt: skip
        _check_choice("--cpu-tp", self.cpu_tp, Literal["off", "auto"])
        _check(self.cpu_tp == "off" or (self.num_ranks == 1 and backend in ("auto", "mp")),
               "--cpu-tp auto chooses --tensor-parallel-size: it goes with neither that, nor "
               "--pipeline-parallel-size, nor --distributed-executor-backend uni or ray",
               self.cpu_tp)  # fmt: skip
        _check(self.cpu_tp == "off" or self.data_parallel_size == 1
               or not self.enable_expert_parallel,
               "--enable-expert-parallel with --data-parallel-size needs to know the ranks of a "
               "core: give --tensor-parallel-size instead of --cpu-tp", self.cpu_tp)  # fmt: skip
        _check(self.cpu_tp == "off" or self.device in ("auto", "cpu"),
               "--cpu-tp auto is for --device cpu only; leave it out here",
               f"--device {self.device}")  # fmt: skip
        self._check_simulated_ranks()
        self._check_expert_parallelism()
        _ = self.eplb
        self._check_data_parallelism()
        self._check_nodes()

    def _check_expert_parallelism(self) -> None:
        _check(not self.expert_metrics or self.device in ("auto", "cpu"),
               "--expert-metrics counts on --device cpu only; leave it out here",
               f"--device {self.device}")  # fmt: skip
        _check(not self.enable_eplb or self.enable_expert_parallel,
               "--enable-eplb moves whole experts between ranks: it needs "
               "--enable-expert-parallel", None)  # fmt: skip
        if not self.enable_expert_parallel:
            return
        flag = "--enable-expert-parallel"
        _check(self.pipeline_parallel_size == 1,
               f"{flag} divides the experts between the ranks of --tensor-parallel-size; "
               "--pipeline-parallel-size must be 1", self.pipeline_parallel_size)  # fmt: skip
        _check(self.device in ("auto", "cpu"),
               f"{flag} is computed by --device cpu only; leave it out here",
               f"--device {self.device}")  # fmt: skip

    def _check_nodes(self) -> None:
        size = self.nnodes
        _check(size >= 1, "--nnodes must be at least 1", size)
        _check(0 <= self.node_rank < size, "--node-rank must be below --nnodes", self.node_rank)
        _check(1 <= self.master_port <= 65535, "--master-port must be from 1 to 65535",
               self.master_port)  # fmt: skip
        if size == 1:
            return
        _check(self.tensor_parallel_size == 1,
               "--nnodes needs --tensor-parallel-size 1: ranks that "
               "share each layer exchange rows about nine times in it, so a network of 0.1 ms one "
               "way would add about 0.9 ms for each layer to every token; use "
               f"--pipeline-parallel-size {size}, which exchanges rows once for each stage",
               self.tensor_parallel_size)  # fmt: skip
        _check(self.pipeline_parallel_size == size, "--nnodes has a stage on each host: it must be "
               "--pipeline-parallel-size", f"{size} and {self.pipeline_parallel_size}")  # fmt: skip
        _check(self.data_parallel_size == 1, "--nnodes needs --data-parallel-size 1",
               self.data_parallel_size)  # fmt: skip
        _check(self.node_key_file is not None, "--nnodes needs --node-key-file: a file that "
               "all hosts have", None)  # fmt: skip

    def _check_ranks(self, flag: str, size: int) -> None:
        """Raises ConfigError for what several ranks of one model do not do."""
        backend = self.distributed_executor_backend
        _check(size == 1 or backend != "uni", "--distributed-executor-backend uni is one process; "
               f"use mp, or {flag} 1", f"{flag} {size}")  # fmt: skip
        is_tensor = flag == "--tensor-parallel-size"
        others = ("cuda", "torch") if is_tensor else ()
        names = "cpu, cuda and torch" if is_tensor else "cpu"
        _check(size == 1 or self.device in ("auto", "cpu", "sim", *others),
               f"{flag} {size} is computed by --device {names} only; {_ONE_OF_GPU}",
               f"--device {self.device}")  # fmt: skip

    def _check_simulated_ranks(self) -> None:
        skew, exchange = self.sim.rank_skew, self.sim.exchange_ms
        most = self.num_ranks - 1 if self.num_ranks > 1 else math.inf  # one waits for nobody
        _check(math.isfinite(skew) and 0 <= skew <= most,
               f"--sim-rank-skew must be from 0 to {most}, where one of "
               f"{self.num_ranks} ranks does everything", skew)  # fmt: skip
        _check(math.isfinite(exchange) and exchange >= 0,
               "--sim-exchange-ms must be at least 0", exchange)  # fmt: skip
        for flag, step in (("--sim-rank-ends-at-step", self.sim.rank_ends_at_step),
                           ("--sim-rank-hangs-at-step", self.sim.rank_hangs_at_step)):  # fmt: skip
            _check(step >= 0, f"{flag} must be at least 0", step)
            _check(step == 0 or self.num_ranks > 1, f"{flag} needs several ranks: set "
                   "--tensor-parallel-size or --pipeline-parallel-size", step)  # fmt: skip
        _check(self.device != "sim" or (self.nnodes == 1
               and self.distributed_executor_backend in ("auto", "mp", "uni")),
               "--device sim simulates ranks of one host; leave --nnodes and "
               "--distributed-executor-backend out", f"--nnodes {self.nnodes}")  # fmt: skip

    def _check_pictures(self) -> None:
        """Raises ConfigError for what is wrong whatever the model."""
        size = self.mm_processor_cache_gb
        _check(size is None or (size >= 0 and math.isfinite(size)),
               "--mm-processor-cache-gb must be at least 0", size)  # fmt: skip
        _ = self.max_media_per_prompt("image"), self.picture_overrides

    def _check_data_parallelism(self) -> None:
        size = self.data_parallel_size
        _check(1 <= size <= MAX_RANKS,
               f"--data-parallel-size must be from 1 to {MAX_RANKS}", size)  # fmt: skip
        _check(0 <= self.data_parallel_rank < size,
               "the data-parallel rank must be below --data-parallel-size",
               self.data_parallel_rank)  # fmt: skip
        _check(size == 1 or self.device in ("auto", "cpu", "sim"),
               f"--data-parallel-size {size} is computed by --device cpu only; {_ONE_OF_GPU}",
               f"--device {self.device}")  # fmt: skip
        for flag, is_set in (
            ("--kv-disk-path", self.kv_disk_path is not None),
            ("--kv-shared-store", self.kv_shared_store is not None),
            ("--kv-events-config", self.kv_events.is_on),
            ("--kv-transfer-config", self.kv_transfer is not None),
        ):
            _check(size == 1 or not is_set,
                   f"{flag} needs --data-parallel-size 1: it names what only one core can open; "
                   "start several engines behind octavo router instead", size)  # fmt: skip

    def replace(self, **changes: object) -> EngineConfig:
        """The same settings with some fields changed."""
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]  # checked by the caller

    @property
    def max_num_seqs(self) -> int:
        """Sequences in the next step of all cores together."""
        return self.scheduler.max_num_seqs * self.data_parallel_size

    @property
    def max_queue(self) -> int:
        """Sequences that may wait at all cores together."""
        return self.scheduler.max_queue * self.data_parallel_size

    @property
    def kv_events(self) -> KVEventsConfig:
        text = self.kv_events_config
        return KVEventsConfig() if text is None else KVEventsConfig.parse(text)

    @property
    def has_kv_tiers(self) -> bool:
        """Whether KV blocks are copied out of the cache, or into it."""
        own = (self.kv_disk_path, self.kv_shared_store, self.kv_transfer_config)
        return self.kv_offloading_size > 0 or any(each is not None for each in own)

    @property
    def kv_transfer(self) -> KVTransferConfig | None:
        """None: KV blocks stay in this engine."""
        text = self.kv_transfer_config
        return None if text is None else KVTransferConfig.parse(text)

    @property
    def own_kv_transfer(self) -> KVTransferConfig | None:
        """Between Octavo's engines; None: there is none, or a connector of another package."""
        transfer = self.kv_transfer
        return transfer if transfer is not None and transfer.is_own else None

    @property
    def eplb(self) -> EplbConfig | None:
        """None: experts stay where they were loaded."""
        config = None if self.eplb_config is None else EplbConfig.parse(self.eplb_config)
        if not self.enable_eplb:
            return None
        return config or EplbConfig()

    @property
    def speculation(self) -> SpeculationConfig | None:
        """None: nothing is guessed."""
        text = self.speculative_config
        return None if text is None else SpeculationConfig.parse(text)

    @property
    def draft(self) -> SpeculationConfig | None:
        """Where a draft model guesses, whose layers are in the cache."""
        speculation = self.speculation
        is_draft = speculation is not None and speculation.method == "draft_model"
        return speculation if is_draft else None

    @property
    def draft_head(self) -> SpeculationConfig | None:
        """Where a head guesses from hidden states, whose layers are in the cache."""
        speculation = self.speculation
        is_head = speculation is not None and speculation.method in ("eagle", "eagle3", "mtp")
        return speculation if is_head else None

    @property
    def heads(self) -> SpeculationConfig | None:
        """Where heads guess, which have no layers in the cache."""
        speculation = self.speculation
        is_heads = speculation is not None and speculation.method in HEADS_WITHOUT_LAYERS
        return speculation if is_heads else None

    @property
    def overrides(self) -> dict[str, Any]:
        """Fields that replace those of the model's config.json."""
        text = self.hf_overrides
        return {} if text is None else _json_object("--hf-overrides", text)

    def max_media_per_prompt(self, kind: Literal["image", "audio"]) -> int | None:
        """None: as many as a server's --max-images allows."""
        text = self.limit_mm_per_prompt
        return None if text is None else parse_media_limits(text).get(kind)

    @property
    def picture_overrides(self) -> dict[str, Any]:
        """Fields that replace those of the model's preprocessor_config.json."""
        text = self.mm_processor_kwargs
        return {} if text is None else _json_object("--mm-processor-kwargs", text)

    @property
    def num_held_adapters(self) -> int:
        """What the host's memory holds at most."""
        return self.max_cpu_loras or 4 * self.max_loras

    @property
    def num_ranks(self) -> int:
        """Processes that hold one copy of the model together."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def spreads_experts_over_cores(self) -> bool:
        """Whether each of several engine cores has some of the experts, for the tokens of all."""
        return (
            self.enable_expert_parallel
            and self.data_parallel_size > 1
            and self.tensor_parallel_size == 1
        )

    @property
    def ranks_flag(self) -> str:
        """What made several ranks, with its value; for errors."""
        if self.pipeline_parallel_size > 1:
            return f"--pipeline-parallel-size {self.pipeline_parallel_size}"
        return f"--tensor-parallel-size {self.tensor_parallel_size}"

    @property
    def names(self) -> tuple[str, ...]:
        """The names this model answers to; the first one is reported."""
        return self.served_model_names or (self.model,)


def parse_media_limits(text: str) -> dict[str, int]:
    """Of `{"image": 4}`, vLLM's `{"image": {"count": 4}}` or `image=4,video=0`. Raises
    ConfigError."""
    flag = "--limit-mm-per-prompt"
    given: dict[str, Any] = (
        _json_object(flag, text) if text.lstrip().startswith(("{", "[")) else _pairs(flag, text)
    )
    limits = {}
    for kind, value in given.items():
        _check(kind in _MEDIA_KINDS, f"{flag} takes {', '.join(_MEDIA_KINDS)}", repr(kind)[:60])
        if isinstance(value, dict):
            _check(set(value) == {"count"}, f"{flag}: {kind} takes only count: memory is not "
                   "sized by pictures that are made up", ", ".join(value)[:60])  # fmt: skip
            value = value["count"]
        is_count = type(value) is int and value >= 0
        _check(is_count, f"{flag}: {kind} must be a whole number, 0 or above", repr(value)[:60])
        limits[kind] = value
    return limits


def _pairs(flag: str, text: str) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for pair in text.split(","):
        kind, equals, count = pair.strip().partition("=")
        _check(bool(equals) and count.isascii() and count.isdecimal() and len(count) <= 9
               and kind not in result,
               f'{flag} must be like image=4,video=0 or {{"image": 4}}', text[:60])  # fmt: skip
        result[kind] = int(count)
    return result


def _known_items(flag: str, given: Mapping[str, Any], kind: type[Any]) -> Iterator[tuple[str, Any]]:
    """The fields one by one. Raises ConfigError at the first that `kind` does not have."""
    known = [field.name for field in dataclasses.fields(kind)]
    for name, value in given.items():
        if name not in known:
            raise ConfigError(f"{flag} has an unknown field {name}; known: {', '.join(known)}")
        yield name, value


def _json_object(flag: str, text: str) -> dict[str, Any]:
    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{flag} is not valid JSON: {error}") from None
    if not isinstance(given, dict):
        raise ConfigError(f"{flag} must be a JSON object; got {text:.60}")
    return given


def _check_choice(flag: str, value: object, choices: object) -> None:
    known = get_args(choices)
    _check(value in known, f"{flag} must be one of {', '.join(known)}", value)


def _check(ok: bool, rule: str, got: object) -> None:
    if not ok:
        raise ConfigError(f"{rule}; got {got}")
