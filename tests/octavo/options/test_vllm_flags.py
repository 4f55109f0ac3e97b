"""Flags as vLLM spells them give the settings they would give there."""

from __future__ import annotations

import pytest

from octavo import cli
from octavo.options import flags
from octavo.options.vllm_flags import (
    ALWAYS_SO,
    IGNORED,
    RENAMED,
    REPLACED,
    SHORT,
    check_file,
    translate,
)
from octavo_engine.errors import ConfigError
from octavo_engine.protocol.vllm_options import (
    STATEMENTS,
    UNSUPPORTED_OPTIONS,
    UNSUPPORTED_PYTHON,
    UNSUPPORTED_SAMPLING,
)


@pytest.mark.parametrize(
    ("given", "ours"),
    [
        (["m", "--disable-fastapi-docs"], ["m", "--no-docs"]),
        (["--max-num-queued-reqs", "5"], ["--max-queue", "5"]),
        (["--max-num-queued-reqs=5"], ["--max-queue=5"]),
        (["--h11-max-header-count", "9"], ["--max-headers", "9"]),
        (["--uvicorn-log-level", "debug"], ["--log-level", "debug"]),
        (["--enable-offline-docs", "--enable-ssl-refresh", "m"], ["m"]),
        (["--disable-access-log-for-endpoints", "/health", "m"], ["m"]),
        (["--disable-access-log-for-endpoints=/health", "m"], ["m"]),
        (["--disable-log-requests"], ["--no-enable-log-requests"]),
        (["-sc", '{"method": "ngram"}'], ["--speculative-config", '{"method": "ngram"}']),
        (["--otlp-traces-endpoint=http://c"], ["--otlp-endpoint=http://c"]),
        (["--collect-detailed-traces", "all", "m"], ["m"]),
        (["--unknown", "--port", "1"], ["--unknown", "--port", "1"]),
        (["--load-format", "safetensors", "m"], ["--load-format", "safetensors", "m"]),
        (["--load-format=gguf"], ["--load-format=gguf"]),
        (["--swap-space", "0", "m"], ["m"]),
        (["--swap_space=0.0", "m"], ["m"]),
        (["--block-size=16", "--runner", "auto", "m"], ["--runner", "auto", "m"]),
        (["--load-format", "hf", "m"], ["--load-format", "auto", "m"]),
        (["--model-impl", "vllm", "m"], ["--model-impl", "octavo", "m"]),
        (["--disable-cascade-attn", "m"], ["m"]),
        (["-tp", "2", "-q=awq", "m"], ["--tensor-parallel-size", "2", "--weight-format=awq", "m"]),
        (["-ep", "-asc", "1", "m"], ["--enable-expert-parallel", "m"]),
        (["--fingerprint-mode", "none", "--no-grpc", "m"], ["m"]),
        (["--model-loader-extra-config", "{}", "m"], ["m"]),
        (["--hf-overrides", "{}", "m"], ["--hf-overrides", "{}", "m"]),
        (["--chat-template", "-x"], ["--chat-template", "-x"]),
        (["--max_model_len", "9", "--a=b_c"], ["--max-model-len", "9", "--a=b_c"]),
    ],
)
def test_translation(given, ours):
    assert translate(given) == ours


def shown(capsys, *argv: str) -> str:
    try:
        code = cli.main(("serve", "m", *argv, "--print-config"))
    except SystemExit as ended:
        code = int(ended.code or 0)
    out: str
    out, err = capsys.readouterr()
    assert code == 0, err
    return out


def test_every_flag_it_maps_to_exists(capsys):
    out = shown(
        capsys, "--disable-fastapi-docs", "--max-num-queued-reqs", "7", "--enable-log-requests",
        "--h11-max-header-count", "9", "--h11-max-incomplete-event-size", "4096",
        "--uvicorn-log-level", "debug",
    )  # fmt: skip
    for line in ("docs = false", "max-queue = 7", "enable-log-requests = true", "max-headers = 9",
                 "max-header-bytes = 4096", 'log-level = "debug"'):  # fmt: skip
        assert f"\n{line}  # flag" in out


def test_the_flags_of_pictures_are_the_same(capsys):
    out = shown(
        capsys, "--limit-mm-per-prompt", "image=4,video=0", "--mm-processor-cache-gb", "0.5",
        "--mm-processor-kwargs", '{"resample": 2}',
    )  # fmt: skip
    for line in ('limit-mm-per-prompt = "image=4,video=0"', "mm-processor-cache-gb = 0.5",
                 'mm-processor-kwargs = "{\\"resample\\": 2}"'):  # fmt: skip
        assert f"\n{line}  # flag" in out


def test_lists_may_be_json(capsys):
    out = shown(
        capsys, "--allowed-origins", '["https://a", "https://b"]', "--allowed-methods", "GET", "PUT"
    )
    assert '\nallowed-origins = ["https://a", "https://b"]  # flag' in out
    assert '\nallowed-methods = ["GET", "PUT"]  # flag' in out


def test_keys_may_come_by_either_name_and_are_not_shown(capsys, monkeypatch):
    monkeypatch.setenv("OCTAVO_API_KEYS", "k1,k2")
    out = shown(capsys, "--admin-api-key", "boss", "--ssl-keyfile-password", "word")
    assert "# api-key = (2 set, not shown)  # OCTAVO_API_KEYS" in out
    monkeypatch.setenv("OCTAVO_API_KEY", "k3")
    out = shown(capsys, "--admin-api-key", "boss", "--ssl-keyfile-password", "word")
    assert "# api-key = (1 set, not shown)  # OCTAVO_API_KEY\n" in out
    assert "# admin-api-key = (1 set, not shown)  # flag" in out
    assert "# ssl-keyfile-password = (set, not shown)  # flag" in out
    for secret in ("boss", "word  ", "k1", "k3"):
        assert secret not in out


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--model-impl", "terratorch"], "--model-impl terratorch is not supported: models are"),
        (["--swap-space", "4"], "--swap-space is not supported: --kv-offloading-size keeps"),
        (["--gpu_memory_utilization=0.9"], "--gpu-memory-utilization is not supported: --memory-"),
        (["--quantization", "mxfp4"], "--quantization mxfp4 is not supported: how weights are"),
        (["--load-format=pt"], "--load-format pt is not supported: weights are read from"),
        (["--mm-encoder-tp-mode", "data", "--interleave-mm-strings"], "--limit-mm-per-prompt is"),
        (["--enable-elastic-ep"], "--enable-elastic-ep is not supported: the number of ranks"),
        (["--data-parallel-hybrid-lb"], "for ranks that a router sees start an engine for each"),
        (["--data-parallel-external-lb"], "for ranks that a router sees start an engine for each"),
        (["--num-redundant-experts=4"], "--enable-eplb and --eplb-config set how experts move"),
        (["-asc", "4"], "--api-server-count is not supported: one process serves HTTP"),
        (["--ngram-prompt-lookup-max=4"], "--speculative-config sets how tokens are drafted"),
        (["--swap-space"], "--swap-space is not supported"),
        (["-O3"], "-O3: models are not compiled"),
    ],
)
def test_what_cannot_be_had_is_one_sentence(given, message):
    with pytest.raises(ConfigError) as caught:
        translate(["m", *given])
    assert message in str(caught.value)


def test_the_command_ends_with_the_sentence(capsys):
    assert cli.main(("serve", "m", "--cpu-offload-gb", "4")) == 2
    assert capsys.readouterr().err.startswith("octavo: --cpu-offload-gb is not supported: ")


# Every flag of `vllm serve` up to 0.22, those of old releases among them.
OF_VLLM = """
additional-config aggregate-engine-logging all2all-backend allow-credentials
allow-deprecated-quantization allowed-headers allowed-local-media-path allowed-media-domains
allowed-methods allowed-origins api-key api-server-count async-scheduling attention-backend
attention-config block-size calculate-kv-scales chat-template chat-template-content-format
code-revision cohere-format cohere-is-reasoning-model collect-detailed-traces compilation-config
config config-format convert cp-kv-cache-interleave-size cpu-offload-gb cpu-offload-params
cuda-graph-sizes cudagraph-capture-sizes cudagraph-metrics data-parallel-address
data-parallel-backend data-parallel-external-lb data-parallel-hybrid-lb
data-parallel-multi-port-external-lb data-parallel-rank data-parallel-rpc-port
data-parallel-size data-parallel-size-local data-parallel-start-rank
data-parallel-supervisor-port dbo-decode-token-threshold dbo-prefill-token-threshold
dcp-comm-backend dcp-kv-cache-interleave-size decode-context-parallel-size
default-chat-template-kwargs default-mm-loras device disable-access-log-for-endpoints
disable-async-output-proc disable-cascade-attn disable-chunked-mm-input
disable-custom-all-reduce disable-fastapi-docs disable-frontend-multiprocessing
disable-hybrid-kv-cache-manager disable-log-requests disable-log-stats
disable-logprobs-during-spec-decoding disable-mm-preprocessor-cache
disable-nccl-for-dp-synchronization disable-sliding-window disable-uvicorn-access-log
distributed-executor-backend distributed-timeout-seconds download-dir
dp-supervisor-probe-failure-threshold dp-supervisor-probe-interval-s
dp-supervisor-probe-timeout-s dtype ec-transfer-config enable-auto-tool-choice
enable-chunked-prefill enable-dbo enable-elastic-ep enable-eplb enable-expert-parallel
enable-flash-late-interaction enable-flashinfer-autotune enable-force-include-usage
enable-layerwise-nvtx-tracing enable-log-deltas enable-log-outputs enable-log-requests
enable-logging-iteration-details enable-lora enable-lora-bias enable-mfu-metrics
enable-mm-embeds enable-multimodal-encoder-data-parallel enable-offline-docs
enable-per-request-metrics enable-prefix-caching enable-prompt-adapter enable-prompt-embeds
enable-prompt-tokens-details enable-reasoning enable-request-id-headers
enable-server-load-tracking enable-sleep-mode enable-ssl-refresh enable-tokenizer-info-endpoint
enable-tower-connector-lora enforce-eager eplb-config eplb-log-balancedness eplb-step-interval
eplb-window-size exclude-tools-when-tool-choice-none expert-placement-strategy
external-parameters fail-on-environ-validation fingerprint-mode fingerprint-value
fully-sharded-loras gdn-prefill-backend generation-config gpu-memory-utilization grpc
guided-decoding-backend guided-decoding-disable-additional-properties
guided-decoding-disable-any-whitespace guided-decoding-disable-fallback h11-max-header-count
h11-max-incomplete-event-size headless hf-config-path hf-overrides hf-token host ignore-patterns
interleave-mm-strings io-processor-plugin kernel-config kv-cache-dtype kv-cache-memory-bytes
kv-cache-metrics kv-cache-metrics-sample kv-events-config kv-offloading-backend
kv-offloading-size kv-sharing-fast-prefill kv-transfer-config language-model-only
limit-mm-per-prompt load-format log-config-file log-error-stack logits-processor-pattern
logits-processors logprobs-mode long-lora-scaling-factors long-prefill-token-threshold
lora-dtype lora-extra-vocab-size lora-modules mamba-backend mamba-block-size mamba-cache-dtype
mamba-cache-mode mamba-ssm-cache-dtype master-addr master-port max-cpu-loras
max-cudagraph-capture-size max-log-len max-logprobs max-long-partial-prefills max-lora-rank
max-loras max-model-len max-num-batched-tokens max-num-partial-prefills max-num-seqs
max-parallel-loading-workers max-prompt-adapter-token max-prompt-adapters max-seq-len-to-capture
media-io-kwargs middleware mm-encoder-attn-backend mm-encoder-only mm-encoder-tp-mode
mm-processor-cache-gb mm-processor-cache-type mm-processor-kwargs
mm-shm-cache-max-object-size-mb model model-impl model-loader-extra-config moe-backend
multi-step-stream-outputs ngram-prompt-lookup-max ngram-prompt-lookup-min nnodes node-rank
num-gpu-blocks-override num-lookahead-slots num-redundant-experts num-scheduler-steps
num-speculative-tokens offload-backend offload-group-size offload-num-in-group offload-params
offload-prefetch-step optimization-level otlp-traces-endpoint override-attention-dtype
override-generation-config override-neuron-config override-pooler-config performance-mode
pipeline-parallel-size pooler-config port preemption-mode prefill-context-parallel-size
prefix-caching-hash-algo profiler-config prompt-adapters pt-load-map-location
qlora-adapter-name-or-path quantization ray-workers-use-nsight reasoning-parser
reasoning-parser-plugin response-role return-tokens-as-token-ids revision root-path rope-scaling
rope-theta runner safetensors-load-strategy scheduler-cls scheduler-delay-factor
scheduling-policy seed served-model-name show-hidden-metrics-for-version shutdown-timeout
skip-mm-profiling skip-tokenizer-init spec-decoding-acceptance-method specialize-active-lora
speculative-config speculative-disable-by-batch-size speculative-disable-mqa-scorer
speculative-draft-tensor-parallel-size speculative-max-model-len speculative-model
speculative-model-quantization ssl-ca-certs ssl-cert-reqs ssl-certfile ssl-ciphers ssl-keyfile
stream-interval structured-outputs-config swap-space task tensor-parallel-size tokenizer
tokenizer-mode tokenizer-pool-extra-config tokenizer-pool-size tokenizer-pool-type
tokenizer-revision tokens-only tool-call-parser tool-parser-plugin tool-server trust-remote-code
trust-request-chat-template typical-acceptance-sampler-posterior-alpha
typical-acceptance-sampler-posterior-threshold ubatch-size uds use-tqdm-on-load
use-v2-block-manager uvicorn-log-level video-pruning-rate weight-transfer-config worker-cls
worker-extension-cls
"""


def test_no_flag_of_vllm_is_unknown():
    """Each is ours, has another name, is always so, or has a sentence on what to do."""
    taken = {flag.removeprefix("--") for flag in {*RENAMED, *REPLACED, *IGNORED, *ALWAYS_SO}}
    known = OWN | taken | set(UNSUPPORTED_OPTIONS) | set(STATEMENTS) | {"config"}
    assert set(OF_VLLM.split()) - known == set()


def test_short_names_are_those_of_its_flags():
    assert {flag.removeprefix("--") for flag in SHORT.values()} <= set(OF_VLLM.split())


OWN = {flag.flag for flag in (*flags.ENGINE_FLAGS, *flags.SERVER_FLAGS)}


def test_no_setting_is_in_two_tables():
    """A flag of ours that vLLM's name shadowed would be refused."""
    others = {flag.removeprefix("--") for flag in {*RENAMED, *REPLACED, *IGNORED, *ALWAYS_SO}}
    assert set(UNSUPPORTED_OPTIONS) & (OWN | others) == set()


@pytest.mark.parametrize("table", [UNSUPPORTED_OPTIONS, UNSUPPORTED_PYTHON, UNSUPPORTED_SAMPLING])
def test_each_advice_is_one_sentence_that_names_what_exists(table):
    for name, option in table.items():
        assert not option.advice.endswith("."), name
        assert len(option.advice) < 130, name
        named = {word.strip(";,.`") for word in option.advice.split() if word.startswith("--")}
        assert {flag.removeprefix("--") for flag in named - {"--to"}} <= OWN, name


def test_vllm_s_yaml_file_is_read(tmp_path, capsys):
    file = tmp_path / "vllm.yaml"
    file.write_text(
        "model: m\nmax-model-len: 512\nuvicorn-log-level: debug\nenable-chunked-prefill: true\n"
        "swap_space: 0\nload-format: safetensors\nserved-model-name: [a, b]\n"
    )
    assert cli.main(("serve", "--config", str(file), "--print-config")) == 0
    out = capsys.readouterr().out
    for line in ('model = "m"', "max-model-len = 512", 'log-level = "debug"',
                 'load-format = "safetensors"', 'served-model-name = ["a", "b"]'):  # fmt: skip
        assert f"\n{line}  # config file" in out


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("swap-space: 4\n", "config file: swap-space is not supported: --kv-offloading-size"),
        ("quantization: torchao\n", "config file: quantization torchao is not supported"),
        ("- a\n", "must be a YAML mapping of flags to values"),
        ("a: [\n", "is not valid YAML: while parsing"),
    ],
)
def test_a_yaml_file_that_cannot_be_had_is_one_sentence(tmp_path, capsys, text, message):
    file = tmp_path / "vllm.yml"
    file.write_text(text)
    assert cli.main(("serve", "m", "--config", str(file), "--print-config")) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1


def test_a_variable_for_such_a_setting_warns_with_the_sentence(monkeypatch, capsys):
    monkeypatch.setenv("OCTAVO_SWAP_SPACE", "4")
    monkeypatch.setenv("OCTAVO_SWAP_SPICE", "4")
    cli.main(("serve", "m", "--print-config"))
    err = capsys.readouterr().err
    assert "OCTAVO_SWAP_SPACE is set, but --kv-offloading-size keeps KV blocks" in err
    assert "OCTAVO_SWAP_SPICE is set, but nothing reads it" in err


@pytest.mark.parametrize(
    ("given", "ours"),
    [
        (["--quantization", "awq_marlin"], ["--weight-format", "awq"]),
        (["--quantization=gptq"], ["--weight-format=gptq"]),
        (["--quantization", "int8"], ["--quantization", "int8"]),
        (["--load-format", "safetensors"], ["--load-format", "safetensors"]),
        (["--task=embed"], ["--runner=pooling"]),
        (["--runner", "generate"], ["--runner", "generate"]),
    ],
)
def test_statements_about_the_files_are_checked_by_the_engine(given, ours):
    assert translate(["m", *given]) == ["m", *ours]


def test_a_file_states_them_too():
    assert check_file({"quantization": "awq", "task": "generate"}) == {
        "weight-format": "awq", "runner": "generate"
    }  # fmt: skip


def test_commands_without_a_server_pass_over_its_settings():
    assert translate(["m", "--disable-log-stats"], serving=False) == ["m"]


@pytest.mark.parametrize("command", ["chat", "complete", "run-batch", "bench throughput", "run"])
def test_other_commands_translate_too(command, capsys):
    arguments = (*command.split(), "demo://smollm2", "--swap-space", "4")
    assert cli.main(arguments) == cli.EXIT_SETTINGS
    assert "--kv-offloading-size keeps KV blocks in the host's memory" in capsys.readouterr().err
