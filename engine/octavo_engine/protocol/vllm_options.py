"""vLLM's settings that are not supported here, with one sentence each on what to do instead.

One table for flags, variables, `LLM(...)`, `SamplingParams(...)` and LLMDeployments. A value that
asks for what is done anyway is accepted and changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

ANY = ("*",)
_OFF = ("false",)


@dataclass(frozen=True, slots=True)
class UnsupportedOption:
    """One setting of vLLM's."""

    advice: str  # what to do instead
    neutral: tuple[str, ...] = ()  # values, as text, that ask for what is done anyway
    is_switch: bool = False  # a flag without a value

    def accepts(self, value: object) -> bool:
        return value is None or self.neutral == ANY or as_text(value) in self.neutral


def as_text(value: object) -> str:
    """As it would be written on a command line: `true`, `0`, `{}`."""
    text = str(value).strip().lower()
    if text.endswith(".0"):
        text = text[:-2]
    return "" if text in ("none", "null") else text


def _value(advice: str, *neutral: str) -> UnsupportedOption:
    return UnsupportedOption(advice, ("", *neutral) if neutral != ANY else ANY)


def _switch(advice: str, *neutral: str) -> UnsupportedOption:
    return UnsupportedOption(advice, neutral or _OFF, is_switch=True)


_ONE_TOKENIZER = "the tokenizer comes with the model; name another one in --tokenizer"
_FLOAT32_STATES = "recurrent states are held in float32; leave it out"
_NO_MEDIA = "--limit-mm-per-prompt is the most pictures of a prompt; leave it out"
_OWN_FILES = "give pictures as data: URLs, PIL images, bytes or pathlib.Path; leave it out"
_ONE_ADDRESS = "all cores of --data-parallel-size are behind one address here; leave it out"
_ONE_ENGINE = (
    "a server balances between its cores; for ranks that a router sees start an engine "
    "for each, or leave it out"
)
_FIXED_EXPERTS = "experts are loaded in their order; --enable-eplb moves them; leave it out"
_ONE_BALANCER = "--enable-eplb and --eplb-config set how experts move between ranks"
_NO_NODES = "a context is computed by one process, or by its layers' stages; leave it out"
_NO_BALANCERS = "`octavo router` balances between engines, and watches them; leave it out"
_NO_OFFLOAD = "weights are not offloaded; --quantization int8 or int4 makes them smaller"
_OWN_KERNELS = "kernels are chosen by the device and the weights; leave it out"
_DRAFTS = "--speculative-config sets how tokens are drafted, as JSON"
_NO_SOFT_PROMPTS = "learned prompts are not supported; --enable-lora serves LoRA adapters"
_ROPE = """use --hf-overrides, such as '{"rope_theta": 1e6}'"""
_OWN_METRICS = "/metrics has all metrics that there are; leave it out"
_NO_COMPILER = "models are not compiled; --enforce-eager turns CUDA graphs off"
_NO_TRANSFER = "encoded pictures are not moved between engines; leave it out"
_NO_COHERE_CHAT = "there is no /cohere/v2/chat; leave it out"
_GRAMMARS = "grammars are always compiled by llguidance; leave it out"
_OVERRIDE = "set the values in each request; --generation-config vllm ignores the model's own"
_CONFIG = "the model's own config.json is read; --hf-overrides replaces fields of it"
_POOLER = "how encoders pool is read from the model's files; --max-embed-len splits longer texts"
_WHOLE_STEPS = "prompts share the step's tokens; --max-num-batched-tokens is its size"
_WHOLE_BATCHES = "batches are not split in two; leave it out"
_WORKERS = "the engine's own workers are used; leave it out"

# By vLLM's name of the flag, without dashes in front.
UNSUPPORTED_OPTIONS: Mapping[str, UnsupportedOption] = {
    # the model and its files
    "config-format": _value(_CONFIG, "auto", "hf"),
    "hf-config-path": _value(_CONFIG),
    "rope-scaling": _value(_ROPE, "{}"),
    "rope-theta": _value(_ROPE),
    "hf-token": _value("set the environment variable HF_TOKEN"),
    "code-revision": _value("pin the model and its code together with --revision"),
    "tokenizer-mode": _value(_ONE_TOKENIZER, "auto", "hf"),
    "tokenizer-revision": _value("pin the model and its tokenizer together with --revision"),
    "skip-tokenizer-init": _switch("the server needs the tokenizer; leave it out"),
    "convert": _value("a model is served as what it was trained for; leave it out", "auto", "none"),
    "model-loader-extra-config": _value("files are mapped into memory; leave it out", "{}"),
    "lora-extra-vocab-size": _value("adapters cannot bring tokens of their own; merge such an "
                                    "adapter into the model", "0"),
    "lora-dtype": _value("adapters are computed in the precision of the model", "auto"),
    "long-lora-scaling-factors": _value("a context is as long as the model's own; leave it out"),
    "enable-lora-bias": _switch("adapters with biases are refused when they are loaded"),
    "enable-tower-connector-lora": _switch("adapters change the language model only"),
    "specialize-active-lora": _switch("adapters are never compiled; leave it out", "true", "false"),
    "default-mm-loras": _value("name the adapter in the request's model field", "{}"),
    "qlora-adapter-name-or-path": _value("name the adapter in --lora-modules"),
    "enable-prompt-adapter": _switch(_NO_SOFT_PROMPTS),
    "prompt-adapters": _value(_NO_SOFT_PROMPTS),
    "max-prompt-adapters": _value(_NO_SOFT_PROMPTS, *ANY),
    "max-prompt-adapter-token": _value(_NO_SOFT_PROMPTS, *ANY),
    "fully-sharded-loras": _switch("adapters are not sharded; leave it out"),
    "ignore-patterns": _value("only the files that a model needs are read; leave it out", *ANY),
    "use-tqdm-on-load": _switch("a bar is shown on a terminal only; leave it out", "true", "false"),
    "pt-load-map-location": _value("pickles are never read; leave it out", *ANY),
    "safetensors-load-strategy": _value("files are mapped into memory; leave it out", "lazy"),
    "allow-deprecated-quantization": _switch("formats of files do not expire here; leave it out",
                                             "true", "false"),
    "weight-transfer-config": _value("weights are not replaced while a model is served; start "
                                     "the engine again", "{}"),
    "tokenizer-pool-size": _value("one process tokenizes, on a thread; leave it out", "0"),
    "tokenizer-pool-type": _value("one process tokenizes, on a thread; leave it out", *ANY),
    "tokenizer-pool-extra-config": _value("one process tokenizes, on a thread; leave it out",
                                          "{}"),
    "override-neuron-config": _value("there is no Neuron backend; leave it out", "{}"),
    "pooler-config": _value(_POOLER, "{}"),
    "override-pooler-config": _value(_POOLER, "{}"),
    "override-generation-config": _value(_OVERRIDE, "{}"),
    "logits-processors": _value("install a processor as an entry point of "
                                "octavo.logits_processors and name it in the request", "[]"),
    "logits-processor-pattern": _value("name a processor of octavo.logits_processors in the "
                                       "request"),
    # memory
    "gpu-memory-utilization": _value("--memory-fraction is the share of the memory that is free "
                                     "after loading; --kv-cache-memory-bytes is a size"),
    "swap-space": _value("--kv-offloading-size keeps KV blocks in the host's memory", "0"),
    "cpu-offload-gb": _value("weights are not offloaded; --quantization int8 or int4 makes them "
                             "smaller", "0"),
    "offload-backend": _value(_NO_OFFLOAD, "auto"),
    "cpu-offload-params": _value(_NO_OFFLOAD, "{}", "[]"),
    "offload-group-size": _value(_NO_OFFLOAD, "0"),
    "offload-num-in-group": _value(_NO_OFFLOAD, *ANY),
    "offload-prefetch-step": _value(_NO_OFFLOAD, *ANY),
    "offload-params": _value(_NO_OFFLOAD, "{}", "[]"),
    "enable-sleep-mode": _switch("--dev-mode serves POST /sleep and /wake_up", "true", "false"),
    "mamba-block-size": _value("states are kept at every 256th token; leave it out"),
    "mamba-cache-mode": _value("states are kept at every 256th token; leave it out", *ANY),
    "block-size": _value("a KV block always holds 16 tokens; leave it out", "16"),
    "num-gpu-blocks-override": _value("--kv-cache-memory-bytes is the size of the KV cache"),
    "calculate-kv-scales": _switch("8-bit KV caches have a scale for each token and head"),
    "prefix-caching-hash-algo": _value("prefixes have one hash, shared with the router; leave it "
                                       "out", *ANY),
    "mamba-cache-dtype": _value(_FLOAT32_STATES, "auto", "float32"),
    "mamba-ssm-cache-dtype": _value(_FLOAT32_STATES, "auto", "float32"),
    "kv-sharing-fast-prefill": _switch("layers do not share a KV cache; leave it out"),
    "disable-hybrid-kv-cache-manager": _switch("there is one manager of KV blocks; leave it out"),
    "ec-transfer-config": _value(_NO_TRANSFER, "{}"),
    "kv-offloading-backend": _value("--kv-offloading-size and --kv-disk-path set the tiers",
                                    "native"),
    # scheduling
    "max-num-partial-prefills": _value(_WHOLE_STEPS, *ANY),
    "max-long-partial-prefills": _value(_WHOLE_STEPS, *ANY),
    "long-prefill-token-threshold": _value(_WHOLE_STEPS, "0"),
    "num-scheduler-steps": _value("each step makes one token of each sequence; leave it out", "1"),
    "multi-step-stream-outputs": _switch("--stream-interval sets the tokens per event", "true",
                                         "false"),
    "scheduler-delay-factor": _value("a step starts at once; leave it out", "0"),
    "scheduler-cls": _value("the scheduler cannot be replaced; --scheduling-policy chooses the "
                            "order"),
    "preemption-mode": _value("a preempted sequence is computed again; leave it out", "recompute"),
    "num-lookahead-slots": _value("--speculative-config sets the drafts; leave it out", "0"),
    "use-v2-block-manager": _switch("there is one manager of KV blocks; leave it out", "true",
                                    "false"),
    "disable-sliding-window": _switch("a model's windows belong to it; leave it out"),
    "disable-cascade-attn": _switch("shared prefixes change no bit of an answer; leave it out",
                                    "true", "false"),
    "disable-chunked-mm-input": _switch("a picture may be computed over several steps; leave it "
                                        "out"),
    "disable-async-output-proc": _switch("texts are made in a process of their own; leave it out"),
    "external-parameters": _value("the scheduler has no parameters but its flags", "{}"),
    # drafts
    "speculative-model": _value("""use --speculative-config '{"model": …}'"""),
    "speculative-model-quantization": _value(_DRAFTS),
    "speculative-draft-tensor-parallel-size": _value(_DRAFTS),
    "num-speculative-tokens": _value(_DRAFTS),
    "speculative-disable-mqa-scorer": _switch(_DRAFTS, "true", "false"),
    "speculative-max-model-len": _value(_DRAFTS),
    "speculative-disable-by-batch-size": _value("drafts are used only where they save time; leave "
                                                "it out", *ANY),
    "ngram-prompt-lookup-max": _value(_DRAFTS),
    "ngram-prompt-lookup-min": _value(_DRAFTS),
    "spec-decoding-acceptance-method": _value("drafts never change an answer; leave it out",
                                              "rejection_sampler"),
    "typical-acceptance-sampler-posterior-threshold": _value("drafts never change an answer; leave "
                                                             "it out"),
    "typical-acceptance-sampler-posterior-alpha": _value("drafts never change an answer; leave it "
                                                         "out"),
    "disable-logprobs-during-spec-decoding": _switch("log-probabilities are the same with drafts",
                                                     "false"),
    # devices and workers
    "disable-custom-all-reduce": _switch("the engine's own sums are used; leave it out", "true",
                                         "false"),
    "compilation-config": _value(_NO_COMPILER, "0", "{}"),
    "cuda-graph-sizes": _value(_NO_COMPILER),
    "max-seq-len-to-capture": _value(_NO_COMPILER),
    "cudagraph-capture-sizes": _value(_NO_COMPILER),
    "max-cudagraph-capture-size": _value(_NO_COMPILER),
    "performance-mode": _value("--max-num-batched-tokens and --max-step-ms trade latency for "
                               "throughput", "balanced"),
    "attention-config": _value("--attention-backend names the kernels of a GPU", "{}"),
    "override-attention-dtype": _value("attention has the precision of its kernels; leave it out"),
    "kernel-config": _value(_OWN_KERNELS, "{}"),
    "moe-backend": _value(_OWN_KERNELS, "auto"),
    "mamba-backend": _value(_OWN_KERNELS, *ANY),
    "gdn-prefill-backend": _value(_OWN_KERNELS, *ANY),
    "enable-flashinfer-autotune": _switch(_OWN_KERNELS, "true", "false"),
    "fail-on-environ-validation": _switch("`octavo doctor` checks this machine; leave it out"),
    "optimization-level": _value(_NO_COMPILER, "0"),
    "worker-cls": _value(_WORKERS, "auto"),
    "worker-extension-cls": _value(_WORKERS),
    "max-parallel-loading-workers": _value(_WORKERS, *ANY),
    "ray-workers-use-nsight": _switch(_WORKERS),
    "headless": _switch("a node above 0 serves no requests; leave it out"),
    "decode-context-parallel-size": _value(_NO_NODES, "1"),
    "dcp-comm-backend": _value(_NO_NODES, *ANY),
    "dcp-kv-cache-interleave-size": _value(_NO_NODES, "1"),
    "cp-kv-cache-interleave-size": _value(_NO_NODES, "1"),
    "distributed-timeout-seconds": _value("a rank that does not answer is reported within "
                                          "seconds; leave it out"),
    "prefill-context-parallel-size": _value(_NO_NODES, "1"),
    "data-parallel-rank": _value(_ONE_ADDRESS),
    "data-parallel-start-rank": _value(_ONE_ADDRESS, "0"),
    "data-parallel-size-local": _value(_ONE_ADDRESS, "1"),
    "data-parallel-address": _value(_ONE_ADDRESS),
    "data-parallel-rpc-port": _value(_ONE_ADDRESS),
    "data-parallel-backend": _value(_ONE_ADDRESS, "mp"),
    "data-parallel-hybrid-lb": _switch(_ONE_ENGINE),
    "data-parallel-external-lb": _switch(_ONE_ENGINE),
    "data-parallel-multi-port-external-lb": _switch(_ONE_ENGINE),
    "data-parallel-supervisor-port": _value(_NO_BALANCERS),
    "dp-supervisor-probe-interval-s": _value(_NO_BALANCERS),
    "dp-supervisor-probe-timeout-s": _value(_NO_BALANCERS),
    "dp-supervisor-probe-failure-threshold": _value(_NO_BALANCERS),
    "disable-nccl-for-dp-synchronization": _switch("ranks do not use NCCL; leave it out", "true",
                                                   "false"),
    "expert-placement-strategy": _value(_FIXED_EXPERTS, "linear"),
    "num-redundant-experts": _value(_ONE_BALANCER, "0"),
    "eplb-window-size": _value(_ONE_BALANCER),
    "eplb-step-interval": _value(_ONE_BALANCER),
    "eplb-log-balancedness": _switch(_ONE_BALANCER),
    "enable-elastic-ep": _switch("the number of ranks is set at the start; leave it out"),
    "all2all-backend": _value("ranks of --enable-expert-parallel share memory; leave it out"),
    "enable-dbo": _switch(_WHOLE_BATCHES),
    "ubatch-size": _value(_WHOLE_BATCHES, "0", "1"),
    "dbo-decode-token-threshold": _value(_WHOLE_BATCHES, *ANY),
    "dbo-prefill-token-threshold": _value(_WHOLE_BATCHES, *ANY),
    "additional-config": _value("there are no platforms with settings of their own", "{}"),
    # pictures and sound
    "enable-mm-embeds": _switch("send pictures, not their embeddings; leave it out"),
    "enable-prompt-embeds": _switch("send texts or token ids, not embeddings; leave it out"),
    "disable-mm-preprocessor-cache": _switch("--mm-processor-cache-gb 0 keeps the least"),
    "mm-processor-cache-type": _value("rows of pictures are kept once, in the engine; leave it "
                                      "out", *ANY),
    "mm-shm-cache-max-object-size-mb": _value("--mm-processor-cache-gb is the size of the cache",
                                              *ANY),
    "mm-encoder-only": _switch("a model that sees is served whole; leave it out"),
    "mm-encoder-attn-backend": _value(_OWN_KERNELS),
    "enable-multimodal-encoder-data-parallel": _switch(_NO_MEDIA, "true", "false"),
    "video-pruning-rate": _value("videos are not read; leave it out", "0"),
    "io-processor-plugin": _value("inputs and outputs are those of the HTTP interface"),
    "mm-encoder-tp-mode": _value(_NO_MEDIA, *ANY),
    "media-io-kwargs": _value(_NO_MEDIA, "{}"),
    "interleave-mm-strings": _switch(_NO_MEDIA),
    "skip-mm-profiling": _switch(_NO_MEDIA, "true", "false"),
    "language-model-only": _switch(_NO_MEDIA, "true", "false"),
    # answers and the server
    "guided-decoding-backend": _value(_GRAMMARS, "auto", "guidance"),
    "guided-decoding-disable-fallback": _switch(_GRAMMARS, "true", "false"),
    "guided-decoding-disable-any-whitespace": _switch("set whitespace_pattern in the request"),
    "guided-decoding-disable-additional-properties": _switch("set additionalProperties in the "
                                                             "schema"),
    "structured-outputs-config": _value(_GRAMMARS, "{}"),
    "chat-template-content-format": _value("the format is detected from the template; leave it "
                                           "out", "auto"),
    "default-chat-template-kwargs": _value("send chat_template_kwargs with each request", "{}"),
    "logprobs-mode": _value("log-probabilities are those of the model, before temperature and "
                            "penalties; leave it out", "raw_logprobs"),
    "enable-reasoning": _switch("--reasoning-parser turns it on; leave it out", "true", "false"),
    "enable-per-request-metrics": _switch("/metrics and traces (--otlp-endpoint) have the times"),
    "fingerprint-mode": _value("system_fingerprint is always null; leave it out", "none"),
    "fingerprint-value": _value("system_fingerprint is always null; leave it out"),
    "cohere-is-reasoning-model": _switch(_NO_COHERE_CHAT, "true", "false"),
    "cohere-format": _value(_NO_COHERE_CHAT, *ANY),
    "enable-flash-late-interaction": _switch("scores are computed by the engine; leave it out",
                                             "true", "false"),
    "return-tokens-as-token-ids": _switch("set return_tokens_as_token_ids in the request"),
    "tool-server": _value("tools are called by the client; leave it out"),
    "middleware": _value("put a proxy in front, such as `octavo router`", "[]"),
    "api-server-count": _value("one process serves HTTP for an engine; leave it out", "1"),
    "disable-frontend-multiprocessing": _switch("the engine always has a process of its own"),
    "grpc": _switch("the server speaks HTTP; leave it out"),
    "enable-log-deltas": _switch("--enable-log-outputs logs whole answers; leave it out", "true",
                                 "false"),
    "log-error-stack": _switch("unexpected errors are logged with their stack; leave it out",
                               "true", "false"),
    "aggregate-engine-logging": _switch("--log-stats logs one line for the server; leave it out",
                                        "true", "false"),
    "enable-logging-iteration-details": _switch("POST /start_profile records each step "
                                                "(--profile-dir)"),
    "enable-layerwise-nvtx-tracing": _switch("POST /start_profile records each operation "
                                             "(--profile-dir)"),
    "profiler-config": _value("--profile-dir names the folder of profiles", "{}"),
    "kv-cache-metrics": _switch(_OWN_METRICS),
    "kv-cache-metrics-sample": _value(_OWN_METRICS, *ANY),
    "cudagraph-metrics": _switch(_OWN_METRICS),
    "enable-mfu-metrics": _switch("`octavo bench` measures it; leave it out"),
    "log-config-file": _value("--log-format and --log-level say how is logged"),
    "show-hidden-metrics-for-version": _value("no metrics are hidden; leave it out", *ANY),
    "tokens-only": _switch("the server needs the tokenizer; leave it out"),
}  # fmt: skip

# What `LLM(...)` has beside or in place of these, by vLLM's name.
UNSUPPORTED_PYTHON: Mapping[str, UnsupportedOption] = {
    "enable_chunked_prefill": _value("prompts are always computed in chunks", "true"),
    "disable_log_stats": _value("statistics are not logged; leave it out", *ANY),
    "skip_tokenizer_init": _value("texts need the tokenizer; leave it out", "false"),
    "allowed_local_media_path": _value(_OWN_FILES),
    "allowed_media_domains": _value(_OWN_FILES),
    "hf_token": _value("set the environment variable HF_TOKEN", "false"),
    "override_generation_config": _value("give the values in SamplingParams", "{}"),
    "speculative_model": _value("use speculative_config={'model': …}"),
}  # fmt: skip

UNSUPPORTED_SAMPLING: Mapping[str, UnsupportedOption] = {
    "structured_outputs": _value("use grammar=structured_output(json=…), from octavo import "
                                 "structured_output"),
    "guided_decoding": _value("use grammar=structured_output(json=…), from octavo import "
                              "structured_output"),
    "best_of": _value("use n, and choose among the answers; octavo.BeamSearchParams searches",
                      "1"),
    "use_beam_search": _value("use LLM.beam_search with octavo.BeamSearchParams", "false"),
    "length_penalty": _value("use LLM.beam_search with octavo.BeamSearchParams", "1"),
    "early_stopping": _value("use LLM.beam_search with octavo.BeamSearchParams", "false"),
    "extra_args": _value("name processors of octavo.logits_processors in logits_processors", "{}"),
    "spaces_between_special_tokens": _value("texts are as the tokenizer decodes them", "true"),
    "truncate_prompt_tokens": _value("cut the list of token ids before it is the prompt"),
    "thinking_token_budget": _value("only chat completions over HTTP have it"),
    "skip_clone": _value("nothing is cloned; leave it out", *ANY),
}  # fmt: skip

# vLLM's values of settings that both have: those that mean `auto` here, and those that cannot be.
_SAME_AS_AUTO: Mapping[str, tuple[str, ...]] = {"load-format": ("hf",), "runner": ("",)}
_OWN_NAMES: Mapping[str, Mapping[str, str]] = {"model-impl": {"vllm": "octavo"}}
_NO_SUCH_LOADER = "weights are read from safetensors and GGUF files; leave it out"
_REFUSED_VALUES: Mapping[str, Mapping[str, str]] = {
    "quantization": dict.fromkeys(
        ("bitsandbytes", "torchao", "modelopt", "experts_int8"),
        "weights are quantized on load to int8 or int4 only; packed ones are kept as they are",
    )
    | {"mxfp4": "how weights are packed is read from the model's files; leave it out"},
    "load-format": dict.fromkeys(
        ("pt", "npcache", "bitsandbytes", "sharded_state", "runai_streamer", "tensorizer",
         "fastsafetensors", "mistral"),
        _NO_SUCH_LOADER,
    ),
    "dtype": dict.fromkeys(("half", "float"), "name it float16 or float32"),
    "model-impl": {"terratorch": "models are octavo's own or transformers'; leave it out"},
}  # fmt: skip


# Values of vLLM's settings that state what the model's files are: our setting, and its value.
STATEMENTS: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "quantization": ("weight-format", {
        "awq": "awq", "awq_marlin": "awq", "gptq": "gptq", "gptq_marlin": "gptq", "fp8": "fp8",
        "compressed-tensors": "compressed-tensors", "gguf": "gguf",
    }),
    "task": ("runner", {
        "auto": "auto", "generate": "generate", "embed": "pooling", "embedding": "pooling",
        "classify": "pooling", "score": "pooling", "reward": "pooling", "encode": "pooling",
    }),
}  # fmt: skip


def statement(name: str, value: object) -> tuple[str, str] | None:
    """Our setting with the same meaning as vLLM's, and its value; None if there is none."""
    own, values = STATEMENTS.get(name, ("", {}))
    return (own, values[value]) if isinstance(value, str) and value in values else None


def own_value(name: str, value: object) -> object:
    """The value of a setting that both have. Raises ValueError, with what to do instead."""
    if isinstance(value, str):
        if value in _SAME_AS_AUTO.get(name, ()):
            return "auto"
        if advice := _REFUSED_VALUES.get(name, {}).get(value):
            raise ValueError(advice)
        return _OWN_NAMES.get(name, {}).get(value, value)
    return value


def refusal(name: str, value: object, table: Mapping[str, UnsupportedOption]) -> str | None:
    """Why vLLM's setting cannot have this value; None if it changes nothing or is not vLLM's."""
    option = table.get(name)
    return None if option is None or option.accepts(value) else option.advice
