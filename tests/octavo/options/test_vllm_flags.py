"""Flags as vLLM spells them give the settings they would give there."""

from __future__ import annotations

import pytest

from octavo import cli
from octavo.options.vllm_flags import translate


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
