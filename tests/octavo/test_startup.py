"""What `octavo serve` shows: on a real terminal a bar, clean lines, a banner; then statistics."""

from __future__ import annotations

import io
import re
import time
import urllib.request

import pytest

from octavo.startup import (
    StartupReporter,
    banner,
    example_request,
    kv_capacity,
    settle_access_log,
)
from octavo_engine.core.info import ModelInfo
from octavo_engine.server.settings import ServerSettings
from tests.fakes.terminal import Terminal

INFO = ModelInfo(
    names=("m",), max_model_len=8192, vocab_size=10, eos_token_ids=(1,), num_blocks=1024,
    kv_bytes=64 * 2**20, backend="native/avx2", default_params={}, load_seconds=1.0, cache_key=b"",
    format="gguf",
)  # fmt: skip


def with_(**changes: object) -> ModelInfo:
    import msgspec

    return msgspec.structs.replace(INFO, **changes)


def test_the_banner_says_where_how_much_and_what_to_try():
    assert banner(INFO, "http://localhost:8000", ServerSettings(), 1.23) == (
        "Octavo serves m (ready in 1.2 s)\n"
        "\n"
        "  API      http://localhost:8000/v1\n"
        "  Page     http://localhost:8000/ (chat) · http://localhost:8000/docs\n"
        "  Engine   native/avx2 · gguf · context 8,192 tokens\n"
        "  KV cache 16,384 tokens (64 MiB): 2 requests of 8,192 tokens\n"
        "\n"
        "  curl http://localhost:8000/v1/chat/completions -H 'content-type: application/json' \\\n"
        '    -d \'{"model": "m", "messages": [{"role": "user", '
        '"content": "What is an octavo?"}]}\'\n'
        "\n"
        "  Chat with octavo chat --url http://localhost:8000 · stop the server with Ctrl-C\n"
    )


@pytest.mark.parametrize(
    ("info", "text"),
    [
        (with_(num_blocks=512), "8,192 tokens (64 MiB): 1 request of 8,192 tokens"),
        (with_(kv_bytes=0), "16,384 tokens (simulated): 2 requests of 8,192 tokens"),
        (with_(num_blocks=1), "16 tokens (64 MiB): 1 request of 8,192 tokens"),
    ],
)
def test_capacity_is_in_tokens_and_requests(info, text):
    assert kv_capacity(info) == text


@pytest.mark.parametrize(
    ("info", "settings", "parts"),
    [
        (INFO, ServerSettings(api_keys=("k",)), ('-H "authorization: Bearer $OCTAVO_API_KEY"',)),
        (INFO, ServerSettings(uds="/a b"), ("--unix-socket '/a b' http://localhost/v1/chat",)),
        (with_(tasks=("embed",)), ServerSettings(), ("/v1/embeddings", '"input": "What')),
        (with_(names=("it's",)), ServerSettings(), ("it'\"'\"'s",)),
    ],
)
def test_the_example_fits_the_model_and_the_server(info, settings, parts):
    text = "\n".join(example_request(info, "http://h:1", settings))
    assert all(part in text for part in parts)


def test_an_embedder_has_no_kv_cache_and_no_chat():
    text = banner(with_(tasks=("embed",)), "http://h:1", ServerSettings(docs=False), 1.0)
    assert "KV cache" not in text and "octavo chat" not in text and "Page" not in text


def test_off_a_terminal_there_is_no_banner(capsys):
    out = io.StringIO()
    StartupReporter("http://h:1", ServerSettings(), time.monotonic(), out).ready(INFO)
    assert out.getvalue() == ""


SERVE = ("serve", "--device", "sim", "--port", "0")


@pytest.mark.slow
def test_lines_on_a_terminal_are_whole():
    """No log line begins behind the bar, and nothing of the bar is left."""
    terminal = Terminal(*SERVE)
    try:
        terminal.wait_for("stop the server with Ctrl-C")
        screen = terminal.screen
    finally:
        terminal.close()
    assert not any("█" in line or "░" in line for line in screen)
    for line in screen:
        if " INFO " in line:
            assert re.match(r"\d\d:\d\d:\d\d INFO ", line), line
    (title,) = [line for line in screen if line.startswith("Octavo serves")]
    assert re.search(r"\(ready in \d+\.\d s\)$", title)


@pytest.mark.slow
@pytest.mark.parametrize("is_on", [True, False])
def test_statistics_come_every_ten_seconds_while_there_is_work(is_on):
    """As --disable-log-stats of vLLM's turns them off."""
    terminal = Terminal(*SERVE, *([] if is_on else ["--disable-log-stats"]))
    try:
        url = terminal.wait_for(r"API +(http://\S+)/v1")[1]
        name = terminal.wait_for(r'"model": "([^"]+)"')[1]
        body = f'{{"model": "{name}", "prompt": "a", "max_tokens": 5}}'.encode()
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(f"{url}/v1/completions", body, headers)
        with urllib.request.urlopen(request, timeout=30) as reply:
            assert reply.status == 200
        if is_on:
            terminal.wait_for(r"Statistics running=0 waiting=0 prompt_tokens_per_s=0\.\d", 25)
            time.sleep(11)
        else:
            time.sleep(12)
        assert sum("Statistics" in line for line in terminal.screen) == int(is_on)
    finally:
        terminal.close()


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("given", "out", "settled"),
    [
        ({}, Screen(), "requests"),
        ({}, io.StringIO(), "errors"),
        ({"log_format": "json"}, Screen(), "errors"),
        ({"access_log": "none"}, Screen(), "none"),
        ({"access_log": "all"}, io.StringIO(), "all"),
    ],
)
def test_only_on_a_terminal_requests_that_went_well_leave_a_line(given, out, settled):
    assert settle_access_log(ServerSettings(**given), out).access_log == settled


@pytest.mark.slow
def test_a_request_is_a_line_on_a_terminal_and_a_probe_is_none():
    terminal = Terminal(*SERVE)
    try:
        url = terminal.wait_for(r"API +(http://\S+)/v1")[1]
        for path in ("/health", "/", "/v1/models"):
            with urllib.request.urlopen(f"{url}{path}", timeout=30) as reply:
                assert reply.status == 200
        terminal.wait_for(r"INFO \S+ Answered .*path=/v1/models .*status=200")
        assert sum("Answered" in line for line in terminal.screen) == 1
    finally:
        terminal.close()
