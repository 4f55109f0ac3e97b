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
    check_file,
    translate,
)
from octavo_engine.errors import ConfigError
from octavo_engine.protocol.vllm_options import (
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
        (["--model-loader-extra-config", "{}", "m"], ["m"]),
        (["--hf-overrides", "{}", "m"], ["--hf-overrides", "{}", "m"]),
        (["--chat-template", "-x"], ["--chat-template", "-x"]),
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
        (["--gpu_memory_utilization=0.9"], "--gpu_memory_utilization is not supported: --memory-"),
        (["--quantization", "mxfp4"], "--quantization mxfp4 is not supported: how weights are"),
        (["--load-format=pt"], "--load-format pt is not supported: weights are read from"),
        (["--mm-encoder-tp-mode", "data", "--interleave-mm-strings"], "--limit-mm-per-prompt is"),
        (["--download-dir", "/x"], "set HF_HOME"),
        (["--swap-space"], "--swap-space is not supported"),
        (["-O3"], "-O3: models are not compiled"),
    ],
)
def test_what_cannot_be_had_is_one_sentence(given, message):
    with pytest.raises(ConfigError) as caught:
        translate(["m", *given])
    assert message in str(caught.value)


def test_the_command_ends_with_the_sentence(capsys):
    assert cli.main(("serve", "m", "--download-dir", "x")) == 2
    assert capsys.readouterr().err.startswith("octavo: --download-dir is not supported: ")


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
