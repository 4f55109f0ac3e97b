"""The one table of flags: names, types and defaults from the settings' dataclasses, help from here.

Each flag is also an environment variable (`--max-num-seqs` is OCTAVO_MAX_NUM_SEQS) and a key of the
TOML file that --config names. Precedence: flag > environment > file > default.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
import re
import typing
from dataclasses import dataclass
from functools import cache, partial
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Literal, cast, get_args, get_origin

from octavo.options.faults import all_faults
from octavo_common.faults import join_faults
from octavo_engine.config import EngineConfig
from octavo_engine.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Mapping, Sequence

ENV_PREFIX = "OCTAVO_"
_FLAG = re.compile(r"--[a-z0-9-]+")  # in a message
# Read elsewhere, by parts that are no command of their own.
OTHER_ENV = frozenset(
    (
        "OCTAVO_CONFIG",
        "OCTAVO_CORE_DUMPS",
        "OCTAVO_CPU_ISA",
        "OCTAVO_FAILPOINTS",
        "OCTAVO_HOME",
        "OCTAVO_POD_IP",
    )
)


@dataclass(frozen=True, slots=True)
class Flag:
    """One setting: where it lives in the tree, what it is called, what it says."""

    path: str  # dotted, from EngineConfig or ServerSettings
    help: str
    name: str = ""  # without dashes in front; default: the last part of the path
    also_env: str = ""  # a second name in the environment

    @property
    def flag(self) -> str:
        return self.name or self.path.rpartition(".")[2].replace("_", "-")

    @property
    def env(self) -> str:
        return ENV_PREFIX + self.flag.upper().replace("-", "_")

    @property
    def metavar(self) -> str:
        """NAME, of served-model-name."""
        return self.flag.rpartition("-")[2].upper()

    @property
    def dest(self) -> str:
        return self.flag.replace("-", "_")


ENGINE_FLAGS = (
    Flag("model", "folder, .gguf file, hf://ORG/NAME[@REV], ORG/NAME or demo://NAME"),
    Flag("tokenizer", "folder or file to take the tokenizer from; default: the model's own"),
    Flag("served_model_names", "names the model answers to", "served-model-name"),
    Flag("revision", "branch, tag or commit of a hub model"),
    Flag("download_dir", "folder for files from the Hub; default: the Hub's cache, $HF_HOME/hub"),
    Flag("hf_overrides", 'fields that replace those of config.json: {"rope_theta": 1e6}'),
    Flag("model_impl",
         "who computes the model: octavo's own pages or transformers; auto: octavo where it can"),
    Flag("trust_remote_code", "run the code in the model's repository; transformers only"),
    Flag("device",
         "where to compute; auto: a GPU that torch sees and that refuses nothing, else the CPU; "
         "sim models the time and invents the tokens"),
    Flag("platform",
         "platform of --device plugin: xpu, hpu, npu, tpu (all untested) or a plug-in's name"),
    Flag("dtype",
         "data type of the KV cache and unquantized weights; auto: chosen by model and device"),
    Flag("quantization",
         "quantize weights to integers; auto: keep the 8- and 4-bit weights of the file"),
    Flag("activation_bits",
         "bits of activations multiplied by integer weights; 8: faster, slightly less exact"),
    Flag("kv_cache_dtype",
         "data type of the KV cache; 8 bits halve its size; auto: as dtype; fp8: fp8_e4m3"),
    Flag("kernels", "kernels on a GPU: Triton or plain torch; auto: what the device can run"),
    Flag("attention_backend", "attention kernel for prompts on a GPU; auto: triton"),
    Flag("batch_invariant", "make results independent of the batch on a GPU too; slower"),
    Flag("enforce_eager", "launch every step's kernels on a GPU instead of replaying CUDA graphs"),
    Flag("async_scheduling", "plan a step while the last one computes; default: on a GPU"),
    Flag("load_format", "dummy: random weights of the right shapes; others: what files must be"),
    Flag("weight_format", "how the files must be quantized, else the model is refused"),
    Flag("runner", "what the model must be for, else it is refused"),
    Flag("max_model_len", "maximum tokens in one sequence, prompt and output; default: what fits"),
    Flag("kv_cache_memory_bytes",
         "size of the KV cache, e.g. 2GiB; default: from --memory-fraction"),
    Flag(
        "memory_fraction",
        "share of the memory free after loading that the KV cache may take "
        "(default: 0.5 of a host's, 0.9 of a device's)",
    ),
    Flag("num_threads",
         "compute threads of all processes together; default: the cores this process may use"),
    Flag("tensor_parallel_size",
         "processes that share each layer, on GPUs each with its own; see docs/parallelism.md"),
    Flag("cpu_tp", "auto: --tensor-parallel-size is the number of the host's memory nodes"),
    Flag("enable_expert_parallel",
         "give each rank of --tensor-parallel-size, or each core of --data-parallel-size, some "
         "experts as a whole; see docs/parallelism.md"),
    Flag("expert_metrics",
         "count in /metrics how often each expert of each layer is chosen: a line for each"),
    Flag("enable_eplb",
         "move experts between the ranks that have them, so that all have about as much to do"),
    Flag("eplb_config",
         'when experts move: JSON with vLLM\'s fields, such as {"num_redundant_experts": 8}'),
    Flag("pipeline_parallel_size",
         "processes that hold some layers each on a CPU, with the same bits; see "
         "docs/parallelism.md"),
    Flag("pipeline_layer_partition",
         "layers of each such process, such as 14,16; measured: equal time, measured at the start; "
         "default: equal work"),
    Flag("nnodes", "hosts of one engine, a stage of --pipeline-parallel-size on each"),
    Flag("node_rank", "which of the hosts this is; 0 serves requests, the others compute for it"),
    Flag("master_addr", "address of node 0 at which the other hosts reach it"),
    Flag("master_port", "port of node 0 for the other hosts; not that of requests"),
    Flag("node_key_file", "file with a secret of 16 bytes or more, the same on all hosts"),
    Flag("data_parallel_size",
         "engine cores behind this server, each with the whole model; see docs/parallelism.md"),
    Flag("distributed_executor_backend",
         "uni: one process; mp: several on this host; ray: stages on the hosts of a Ray "
         "cluster; auto: mp if there are several ranks"),
    Flag("seed", "seed of requests that set none; 0: a new one for each"),
    Flag("stream_interval",
         "tokens per event of a stream, after the first; higher values cost less"),
    Flag("chat_template", "file or text that replaces the model's chat template"),
    Flag("kv_events_config", "KV events in vLLM's format: JSON with vLLM's fields"),
    Flag("kv_offloading_size", "GiB of the host's memory for KV blocks that left the KV cache"),
    Flag("kv_disk_path", "folder for KV blocks, found again after a restart; see docs/kv-tiers.md"),
    Flag("kv_disk_size", "GiB that the files in --kv-disk-path may take"),
    Flag("kv_shared_store",
         "folder on a volume, or s3://bucket/prefix, of KV blocks that several engines share; "
         "see docs/kv-tiers.md"),
    Flag("kv_shared_size", "GiB that the files in --kv-shared-store may take"),
    Flag("encryption_key_file",
         "keys to encrypt files in --kv-disk-path and --files-dir; see docs/encryption.md"),
    Flag("kv_transfer_config",
         "KV blocks from other engines: JSON with vLLM's fields; see docs/prefill-decode.md"),
    Flag("speculative_config", 'speculative decoding: {"method": "ngram", …} or {"model": …}'),
    Flag("limit_mm_per_prompt",
         'most pictures in one prompt, {"image": 4} or image=4; default: --max-images'),
    Flag("mm_processor_kwargs",
         'fields that replace those of preprocessor_config.json: {"resample": 2}'),
    Flag("mm_processor_cache_gb",
         "GiB for encoded pictures that may come again, at least four pictures; default: 0.125"),
    Flag("enable_lora", "let requests name LoRA adapters as their model"),
    Flag("max_loras", "maximum LoRA adapters per step; requests for more wait"),
    Flag("max_cpu_loras",
         "LoRA adapters kept in memory; others are read again; default: 4 times --max-loras"),
    Flag("max_lora_rank", "highest rank of a LoRA adapter; up to 256"),
    Flag("scheduler.max_num_seqs", "maximum sequences per step"),
    Flag("scheduler.max_num_batched_tokens", "maximum tokens per step"),
    Flag("scheduler.policy", "order in which requests run", "scheduling-policy"),
    Flag("scheduler.max_queue", "maximum waiting sequences; requests above it get 503"),
    Flag(
        "scheduler.queue_timeout_s",
        "requests that would wait longer get 503; inf: no limit",
        "queue-timeout",
    ),
    Flag("scheduler.max_step_ms", "target duration in ms of a step with prompt tokens"),
    Flag("scheduler.enable_prefix_caching", "reuse the KV blocks of equal prompt beginnings"),
    Flag("scheduler.aging_s",
         "seconds for which smaller requests may overtake a waiting one", "aging"),
    Flag("scheduler.max_retained_kv",
         "share of the KV cache that requests may retain after their end, from 0 to 1"),
    Flag("scheduler.max_retained_kv_per_tenant", "of that, what one tenant's requests may retain"),
    Flag("scheduler.max_retention_s", "seconds for which they may retain it at most"),
    Flag("sim.step_base_ms", "simulator: time of every step", "sim-step-base-ms"),
    Flag("sim.decode_token_ms", "simulator: time of a generated token", "sim-decode-token-ms"),
    Flag("sim.prefill_token_ms", "simulator: time of a prompt token", "sim-prefill-token-ms"),
    Flag("sim.kv_blocks", "simulator: size of the KV pool", "sim-kv-blocks"),
    Flag("sim.vocab_size", "simulator: tokens in the vocabulary", "sim-vocab-size"),
    Flag("sim.time_scale", "simulator: below 1 runs faster than real time", "sim-time-scale"),
    Flag("sim.rank_skew",
         "simulator: how much longer than all ranks on average the slowest takes, e.g. 0.2",
         "sim-rank-skew"),
    Flag("sim.exchange_ms",
         "simulator: time that ranks wait for each other in a step, or between two stages",
         "sim-exchange-ms"),
    Flag("sim.rank_ends_at_step",
         "simulator: step after each start in which a rank ends, as if it was killed; 0: none",
         "sim-rank-ends-at-step"),
    Flag("sim.rank_hangs_at_step",
         "simulator: step after each start in which a rank hangs; 0: none",
         "sim-rank-hangs-at-step"),
    Flag("sim.task", "simulator: what its model does", "sim-task"),
)  # fmt: skip
# Settled by the engine from other settings: no flag of their own.
DERIVED = frozenset(("scheduler.max_model_len", "data_parallel_rank"))

SERVER_FLAGS = (
    Flag("host", "address to listen on; 0.0.0.0 for all"),
    Flag("port", "port to listen on; 0: any free one"),
    Flag("admin_host", "address of the administrators' listener; another one needs keys or "
         "certificates"),
    Flag("admin_port",
         "port of a listener for administrators: drain, abort and routes of --dev-mode are only "
         "there; 0: none"),
    Flag("uds", "path of a Unix socket to listen on, instead of host and port"),
    Flag("root_path", "path prefix that a proxy in front removes, such as /llm"),
    Flag("api_keys", "API keys that clients must send one of; none: no key is required", "api-key",
         also_env="OCTAVO_API_KEYS"),
    Flag("api_key_file", "file of such keys, one per line; read again when it changes"),
    Flag("admin_api_keys", "keys for routes that change the server; none: --api-key's do",
         "admin-api-key"),
    Flag("admin_api_key_file", "file of such keys, one per line; read again when it changes"),
    Flag("ssl_certfile", "certificate for TLS (PEM); read again when it changes, as the next two"),
    Flag("ssl_keyfile", "its key, unless it is in the same file"),
    Flag("ssl_ca_certs", "authorities whose certificates clients must show (mutual TLS)"),
    Flag("ssl_cert_reqs",
         "whether clients must show one; auto: if --ssl-ca-certs is given; protected: connections "
         "without one open probes, /version and /metrics only"),
    Flag("ssl_client_names",
         "DNS names or URIs, one of which a client's certificate must be for; none: any of the "
         "authorities"),
    Flag("ssl_keyfile_password", "password that the key is encrypted with"),
    Flag("ssl_ciphers", "OpenSSL's list of ciphers for TLS 1.2"),
    Flag("allowed_origins", "origins that browsers may call from (CORS); none by default"),
    Flag("allowed_methods", "methods that they may use"),
    Flag("allowed_headers", "request headers that they may send"),
    Flag("allow_credentials", "allow these origins to send cookies and authorization"),
    Flag("allowed_media_domains",
         "hosts that pictures are fetched from over https, or * for every public one; none by "
         "default"),
    Flag("allowed_local_media_path",
         "folder below which pictures are read by file: URLs; none by default"),
    Flag("docs", "serve the page at /, /docs and /openapi.json"),
    Flag("tokenizer_info", "serve /tokenizer_info", "enable-tokenizer-info-endpoint"),
    Flag("dev_mode", "serve the routes for development: caches, sleep, server info"),
    Flag("shutdown_timeout_s", "seconds for requests in flight after SIGTERM", "shutdown-timeout"),
    Flag("request_timeout_s", "seconds a request may take; default: no limit", "request-timeout"),
    Flag("generation_config", "auto: sampling defaults of the model; vllm: neutral ones"),
    Flag("response_role", "role of the messages a chat returns"),
    Flag("trust_request_chat_template", "let requests bring a chat template of their own"),
    Flag("tool_call_parser", "format of the model's tool calls; auto: from its chat template"),
    Flag("reasoning_parser", "format of the model's reasoning; auto: from its chat template"),
    Flag("tool_parser_plugin", "Python file with TOOL_FORMATS and REASONING_FORMATS of its own"),
    Flag("reasoning_parser_plugin", "another such file; either may have both"),
    Flag("enable_auto_tool_choice", "let the model decide whether to call tools"),
    Flag("exclude_tools_when_tool_choice_none", "do not show the model tools that it may not call"),
    Flag("force_include_usage",
         "end every stream with its usage, even if the request does not set it",
         "enable-force-include-usage"),
    Flag("response_store", "store responses of /v1/responses in memory, to fetch and to continue"),
    Flag("files_dir", "folder for files and batches; without it both are disabled"),
    Flag("batch_concurrency", "maximum requests of batches in flight"),
    Flag("lora_modules", "LoRA adapters to serve from the start: NAME=PATH, or JSON"),
    Flag("lora_resolver_dir",
         "folder of LoRA adapters that requests may name without their being loaded"),
    Flag("lora_resolver_hub",
         "repositories of the Hub, ORG/NAME[@REV], whose LoRA adapters requests may name"),
    Flag("lora_resolvers", "installed functions that find LoRA adapters which requests name"),
    Flag("allow_runtime_lora_updating",
         "allow /v1/load_lora_adapter and /v1/unload_lora_adapter"),
    Flag("vllm_metrics", "expose every metric under vLLM's name too, which other tools read"),
    Flag("access_log", "which requests get a log line; requests: all but probes and pages; auto: "
         "requests on a terminal, else errors"),
    Flag("log_requests", "log each request as it comes, without its text", "enable-log-requests"),
    Flag("log_outputs", "log each answer once it is done, without its text", "enable-log-outputs"),
    Flag("log_stats", "log a line of statistics every ten seconds while there is work"),
    Flag("max_log_len", "longest text shown by these two at level debug"),
    Flag("otlp_endpoint", "URL of an OpenTelemetry collector; default: no traces"),
    Flag("otlp_sample_ratio", "share of requests that are traced where their caller does not say"),
    Flag("profile_dir", "folder for the profiles of /start_profile, which needs --dev-mode"),
    Flag("log_format", "log lines for people or for machines"),
    Flag("log_level", "how much is logged"),
    Flag("pod_uid", "UID of the pod this runs in; requests meant for another pod get 421"),
    Flag("limits.max_body_bytes", "largest body, e.g. 8MiB"),
    Flag("limits.max_header_bytes", "largest request line with headers"),
    Flag("limits.max_headers", "most headers"),
    Flag("limits.max_url_bytes", "longest URL"),
    Flag("limits.max_json_depth", "deepest nesting of a body"),
    Flag("limits.max_json_objects", "most objects and lists in a body"),
    Flag("limits.max_json_values", "most values in a body, token ids of prompts among them"),
    Flag("limits.strict_fields",
         "refuse requests with unknown fields, instead of naming these in a header"),
    Flag("limits.max_n", "most answers to one prompt"),
    Flag("limits.max_prompts", "most prompts in one request"),
    Flag("limits.max_sequences", "most prompts times answers"),
    Flag("limits.max_messages", "most messages of a chat"),
    Flag("limits.max_images", "most pictures in one request"),
    Flag("limits.max_pooling_items", "most texts to embed, score or classify in one request"),
    Flag("limits.max_pooling_tokens", "most tokens of all these texts"),
    Flag("limits.max_embed_len", "longest text to embed; above the model's length it is embedded "
         "in chunks, and the result is their mean (vLLM's chunked processing)"),
    Flag("limits.max_pooled_numbers", "most numbers in a response with one vector per token"),
    Flag("limits.max_salt_chars", "longest cache_salt"),
    Flag("limits.max_stop", "most stop strings"),
    Flag("limits.max_stop_chars", "longest stop string"),
    Flag("limits.max_logprobs", "most alternatives per token; -1: the whole vocabulary"),
    Flag("limits.max_logit_bias", "most entries of logit_bias"),
    Flag("limits.max_token_list", "most entries of stop_token_ids, allowed_token_ids"),
    Flag("limits.max_bad_words", "most bad_words"),
    Flag("limits.max_bad_word_chars", "longest of the bad_words"),
    Flag("limits.max_concurrent_requests", "most requests in flight; more get 503"),
    Flag("limits.max_stored_responses", "most stored responses; the oldest are deleted first"),
    Flag("limits.max_stored_response_bytes", "memory for them, e.g. 64MiB"),
    Flag("limits.response_ttl_s", "seconds for which a response is stored", "response-ttl"),
    Flag("limits.max_file_bytes", "largest upload to /v1/files, e.g. 200MiB"),
    Flag("limits.max_stored_file_bytes", "disk for all files, e.g. 10GiB"),
    Flag("limits.max_stored_batches",
         "most stored batches; the oldest finished ones are deleted first"),
    Flag("limits.max_batch_requests", "most requests in a batch"),
    Flag("limits.header_timeout_s", "seconds a client has for its headers", "header-timeout"),
    Flag("limits.body_timeout_s", "seconds a client has for its body", "body-timeout"),
    Flag("limits.write_timeout_s", "seconds a client may read nothing", "write-timeout"),
)  # fmt: skip

SECRET = frozenset(("api_keys", "admin_api_keys", "ssl_keyfile_password"))  # never shown

# Numbers of tokens may have units, with vLLM's meaning.
_TOKENS = ("max_model_len", "scheduler.max_num_batched_tokens")
_TOKEN_UNITS = {"k": 10**3, "K": 2**10, "m": 10**6, "M": 2**20}
_SIZES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12,
          "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}  # fmt: skip


class FlagSettings:
    """The settings from flags, environment and file, with the source of each value."""

    def __init__(self, values: Mapping[str, tuple[Any, str]], flags: Iterable[Flag]) -> None:
        self._values = values  # by path: value and source
        self._names = {flag.path: f"--{flag.flag}" for flag in flags}

    def build(self, root: type[Any]) -> Any:
        """The dataclass `root`, whole and validated. Raises ConfigError."""
        return self._build(root, "", self._values)

    def check(self, *roots: type[Any]) -> None:
        """Raises ConfigError with all faults at once."""
        values = dict(self._values)
        left_out: set[str] = set()

        def is_ours(error: ConfigError) -> bool:
            return not left_out.isdisjoint(_FLAG.findall(str(error)))

        def leave_out(error: ConfigError) -> bool:
            named = set(_FLAG.findall(str(error)))
            blamed = [path for path in values if self._names[path] in named]
            left_out.update(self._names[path] for path in blamed)
            for path in blamed:
                del values[path]
            return bool(blamed)

        faults: list[str] = []
        for root in roots:
            build = partial(self._build, root, "", values)
            faults += all_faults(ConfigError, build, is_ours, leave_out)
        if faults:
            raise ConfigError(join_faults(faults))

    def source(self, path: str) -> str:
        return self._values[path][1] if path in self._values else "default"

    def _build(self, kind: type[Any], prefix: str, values: Mapping[str, tuple[Any, str]]) -> Any:
        fields: dict[str, Any] = {}
        hints = _hints(cast("Hashable", kind))
        for field in dataclasses.fields(kind):
            path = prefix + field.name
            if dataclasses.is_dataclass(hints[field.name]):
                fields[field.name] = self._build(hints[field.name], path + ".", values)
            elif path in values:
                fields[field.name] = values[path][0]
        return kind(**fields)


def add_flags(parser: argparse.ArgumentParser, flags: Iterable[Flag], root: type[Any]) -> None:
    """One option per flag. Absent ones set nothing, so that precedence can be resolved."""
    for flag in flags:
        kind, default = lookup(root, flag.path)
        note = (
            flag.help
            if default in (None, (), "")
            else f"{flag.help} (default: {show_value(default)})"
        )
        note = f"{note} [{flag.env}]"
        options: dict[str, Any] = {"dest": flag.dest, "default": argparse.SUPPRESS, "help": note}
        core = _core(kind)
        if core is bool:
            options["action"] = argparse.BooleanOptionalAction
        elif get_origin(core) is Literal:
            options["choices"] = get_args(core)
        elif get_origin(core) is tuple:
            options.update(nargs="+", metavar=flag.metavar)
        else:
            options["type"] = _reader(flag, core)
            options["metavar"] = "N" if core in (int, float) else flag.metavar
        parser.add_argument("--" + flag.flag, **options)


def resolve(
    args: argparse.Namespace,
    flags: Sequence[Flag],
    roots: Mapping[str, type[Any]],
    environ: Mapping[str, str],
    file: Mapping[str, Any],
) -> FlagSettings:
    """Flags over environment over file. Raises ConfigError that names the place."""
    values: dict[str, tuple[Any, str]] = {}
    faults: list[str] = []
    left = {key.replace("_", "-"): value for key, value in file.items()}
    for flag in flags:
        kind, _ = lookup(roots[flag.path], flag.path)
        from_file = left.pop(flag.flag, None)
        try:
            if hasattr(args, flag.dest):
                value = getattr(args, flag.dest)
                values[flag.path] = (_listed(value) if isinstance(value, list) else value, "flag")
            elif flag.env in environ:
                values[flag.path] = (_from_text(flag, kind, environ[flag.env]), flag.env)
            elif flag.also_env in environ:
                values[flag.path] = (_from_text(flag, kind, environ[flag.also_env]), flag.also_env)
            elif from_file is not None:
                values[flag.path] = (_from_file(flag, kind, from_file), "config file")
        except ConfigError as error:
            faults.append(str(error))
    for name in sorted(left):
        near = difflib.get_close_matches(name, [flag.flag for flag in flags], 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        faults.append(f"the config file has an unknown key {name}{hint}")
    if faults:
        raise ConfigError(join_faults(faults))
    return FlagSettings(values, flags)


def unknown_environment(environ: Mapping[str, str]) -> list[str]:
    """OCTAVO_* names that no flag reads: most likely misspelt."""
    flags = (*ENGINE_FLAGS, *SERVER_FLAGS)
    known = {flag.env for flag in flags} | {flag.also_env for flag in flags} | OTHER_ENV
    return sorted(name for name in environ if name.startswith(ENV_PREFIX) and name not in known)


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def lookup(root: type[Any], path: str) -> tuple[Any, Any]:
    """Type and default of a dotted path."""
    first, _, rest = path.partition(".")
    kind = _hints(cast("Hashable", root))[first]
    if rest:
        return lookup(kind, rest)
    return kind, root.__dataclass_fields__[first].default


def _listed(items: list[str]) -> tuple[str, ...]:
    """Words one after the other, or one that is a JSON list, as vLLM has it."""
    if len(items) == 1 and items[0].startswith("["):
        try:
            inner = json.loads(items[0])
        except (ValueError, RecursionError):
            return tuple(items)
        if isinstance(inner, list) and all(isinstance(item, str) for item in inner):
            return tuple(inner)
    return tuple(items)


def _core(kind: Any) -> Any:
    """The type without `| None`."""
    if get_origin(kind) in (UnionType, typing.Union):
        return next(part for part in get_args(kind) if part is not NoneType)
    return kind


def _reader(flag: Flag, core: Any) -> Any:
    def read(text: str) -> Any:
        try:
            return _scalar(flag, core, text)
        except ConfigError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read


def _scalar(flag: Flag, core: Any, text: str) -> Any:
    if core is str:
        return text
    if core is float:
        try:
            return float(text)
        except ValueError:
            raise ConfigError(f"must be a number; got {text!r}") from None
    if flag.path in _TOKENS and (match := re.fullmatch(r"(\d+(?:\.\d+)?)([kKmM])", text.strip())):
        return int(float(match[1]) * _TOKEN_UNITS[match[2]])
    match = re.fullmatch(r"(-?\d+(?:\.\d+)?)\s*(|[kKmMgGtT]i?)[bB]?", text.strip())
    is_size = flag.path.endswith("_bytes")
    if match is None or (not is_size and not re.fullmatch(r"-?\d+", text.strip())):
        example = ", such as 512MiB" if is_size else ", such as 8k" if flag.path in _TOKENS else ""
        raise ConfigError(f"must be a whole number{example}; got {text!r}")
    return int(float(match[1]) * _SIZES[match[2].lower()]) if match[2] else int(float(match[1]))


def _from_text(flag: Flag, kind: Any, text: str) -> Any:
    core = _core(kind)
    try:
        if core is bool:
            return _boolean(text)
        if get_origin(core) is tuple:
            return tuple(part for part in text.split(",") if part)
        if get_origin(core) is Literal:
            return _choice(text, get_args(core))
        return _scalar(flag, core, text)
    except ConfigError as error:
        raise ConfigError(f"{flag.env} {error}") from None


def _from_file(flag: Flag, kind: Any, value: Any) -> Any:
    core = _core(kind)
    try:
        if core is bool and not isinstance(value, bool):
            raise ConfigError(f"must be true or false; got {value!r}")
        if core is bool:
            return value
        if get_origin(core) is tuple:
            items = value if isinstance(value, list) else [value]
            if not all(isinstance(item, str) for item in items):
                raise ConfigError(f"must be a list of strings; got {value!r}")
            return tuple(items)
        if get_origin(core) is Literal:
            return _choice(value, get_args(core))
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise ConfigError(f"must be a single value; got {value!r}")
        if core is str and not isinstance(value, str):
            raise ConfigError(f"must be a string; got {value!r}")
        return _scalar(flag, core, str(value))
    except ConfigError as error:
        raise ConfigError(f"config file: {flag.flag} {error}") from None


def _boolean(text: str) -> bool:
    if text.lower() in ("1", "true", "yes", "on"):
        return True
    if text.lower() in ("0", "false", "no", "off", ""):
        return False
    raise ConfigError(f"must be 1 or 0; got {text!r}")


def _choice(value: Any, choices: tuple[Any, ...]) -> Any:
    if value not in choices:
        raise ConfigError(f"must be one of {', '.join(map(str, choices))}; got {value!r}")
    return value


def show_value(value: object) -> str:
    return ("on" if value else "off") if isinstance(value, bool) else str(value)


ENGINE_ROOTS: dict[str, type[Any]] = {flag.path: EngineConfig for flag in ENGINE_FLAGS}
