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
_FIXED_EXPERTS = "experts stay with the rank that loaded them; leave it out"
_NO_NODES = "an engine runs on one machine; leave it out"
_NO_COMPILER = "models are not compiled; --enforce-eager turns CUDA graphs off"
_NO_TRANSFER = "encoded pictures are not moved between engines; leave it out"
_GRAMMARS = "grammars are always compiled by llguidance; leave it out"
_OVERRIDE = "set the values in each request; --generation-config vllm ignores the model's own"
_CONFIG = "the model's own config.json is read; --hf-overrides replaces fields of it"
_POOLER = "how encoders pool is read from the model's files; --max-embed-len splits longer texts"
_WHOLE_STEPS = "prompts share the step's tokens; --max-num-batched-tokens is its size"
_WORKERS = "the engine's own workers are used; leave it out"

# By vLLM's name of the flag, without dashes in front.
UNSUPPORTED_OPTIONS: Mapping[str, UnsupportedOption] = {
    # the model and its files
    "download-dir": _value("set HF_HOME, where the Hub's files are cached, or fetch the model with "
                           "`octavo fetch URI --to DIR` and name DIR as the model"),
    "config-format": _value(_CONFIG, "auto", "hf"),
    "hf-config-path": _value(_CONFIG),
    "hf-token": _value("set the environment variable HF_TOKEN"),
    "code-revision": _value("pin the model and its code together with --revision"),
    "tokenizer-mode": _value(_ONE_TOKENIZER, "auto", "hf"),
    "tokenizer-revision": _value("pin the model and its tokenizer together with --revision"),
    "skip-tokenizer-init": _switch("the server needs the tokenizer; leave it out"),
    "convert": _value("a model is served as what it was trained for; leave it out", "auto", "none"),
    "model-loader-extra-config": _value("files are mapped into memory; leave it out", "{}"),
    "lora-extra-vocab-size": _value("adapters cannot bring tokens of their own; merge such an "
                                    "adapter into the model", "0"),
    "fully-sharded-loras": _switch("adapters are not sharded; leave it out"),
    "ignore-patterns": _value("only the files that a model needs are read; leave it out", *ANY),
    "use-tqdm-on-load": _switch("a bar is shown on a terminal only; leave it out", "true", "false"),
    "pt-load-map-location": _value("pickles are never read; leave it out", *ANY),
    "safetensors-load-strategy": _value("files are mapped into memory; leave it out", "lazy"),
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
    "disable-cascade-attn": _switch("attention is not split by prefix; leave it out", "true",
                                    "false"),
    # devices and workers
    "disable-custom-all-reduce": _switch("the engine's own sums are used; leave it out", "true",
                                         "false"),
    "compilation-config": _value(_NO_COMPILER, "0", "{}"),
    "cuda-graph-sizes": _value(_NO_COMPILER),
    "max-seq-len-to-capture": _value(_NO_COMPILER),
    "optimization-level": _value(_NO_COMPILER, "0"),
    "worker-cls": _value(_WORKERS, "auto"),
    "worker-extension-cls": _value(_WORKERS),
    "max-parallel-loading-workers": _value(_WORKERS, *ANY),
    "ray-workers-use-nsight": _switch(_WORKERS),
    "headless": _switch("a node above 0 serves no requests; leave it out"),
    "decode-context-parallel-size": _value(_NO_NODES, "1"),
    "prefill-context-parallel-size": _value(_NO_NODES, "1"),
    "data-parallel-rank": _value(_ONE_ADDRESS),
    "data-parallel-start-rank": _value(_ONE_ADDRESS, "0"),
    "data-parallel-size-local": _value(_ONE_ADDRESS, "1"),
    "data-parallel-address": _value(_ONE_ADDRESS),
    "data-parallel-rpc-port": _value(_ONE_ADDRESS),
    "data-parallel-backend": _value(_ONE_ADDRESS, "mp"),
    "data-parallel-hybrid-lb": _switch(_ONE_ADDRESS),
    "data-parallel-external-lb": _switch(_ONE_ADDRESS),
    "enable-eplb": _switch(_FIXED_EXPERTS),
    "eplb-config": _value(_FIXED_EXPERTS, "{}"),
    "all2all-backend": _value("ranks of --enable-expert-parallel share memory; leave it out"),
    "enable-dbo": _switch("batches are not split in two; leave it out"),
    "additional-config": _value("there are no platforms with settings of their own", "{}"),
    # pictures and sound
    "mm-encoder-tp-mode": _value(_NO_MEDIA, *ANY),
    "media-io-kwargs": _value(_NO_MEDIA, "{}"),
    "interleave-mm-strings": _switch(_NO_MEDIA),
    "skip-mm-profiling": _switch(_NO_MEDIA, "true", "false"),
    "language-model-only": _switch(_NO_MEDIA, "true", "false"),
    # answers and the server
    "guided-decoding-backend": _value(_GRAMMARS, "auto", "guidance"),
    "guided-decoding-disable-fallback": _switch(_GRAMMARS, "true", "false"),
    "guided-decoding-disable-any-whitespace": _switch("set whitespace_pattern in the request"),
    "structured-outputs-config": _value(_GRAMMARS, "{}"),
    "chat-template-content-format": _value("the format is detected from the template; leave it "
                                           "out", "auto"),
    "default-chat-template-kwargs": _value("send chat_template_kwargs with each request", "{}"),
    "return-tokens-as-token-ids": _switch("set return_tokens_as_token_ids in the request"),
    "tool-server": _value("tools are called by the client; leave it out"),
    "middleware": _value("put a proxy in front, such as `octavo router`", "[]"),
    "api-server-count": _value("one process serves HTTP for an engine; leave it out", "1"),
    "disable-frontend-multiprocessing": _switch("the engine always has a process of its own"),
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
