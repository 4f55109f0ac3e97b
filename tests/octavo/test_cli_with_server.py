"""Commands that talk to a server or run an engine: chat, complete, bench, all on the simulator."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from octavo.bench import load, report
from octavo.http_client import ServerAddress
from tests.fakes.process import environment, serving

SIM = ("--device", "sim", "--sim-time-scale", "0.01")


@pytest.fixture(scope="module")
def server():
    with serving("m", "--sim-time-scale", "0.01", "--served-model-name", "sim") as server:
        yield server


def run(*argv: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "octavo.cli", *argv],
        capture_output=True, text=True, timeout=60, env=environment(), input=stdin, check=False,
    )  # fmt: skip


def test_chat_asks_a_server_once(server):
    done = run("chat", "--url", server.url, "-p", "hi", "--max-tokens", "8", "--temperature", "0")

    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout.rstrip("\n")) == 8


def test_complete_gives_what_the_server_s_api_gives(server):
    done = run(
        "complete", "sim", "--url", server.url, "-p", "Once", "--max-tokens", "9", "--seed", "3"
    )
    with server.client() as client:
        requested = {"prompt": "Once", "max_tokens": 9, "seed": 3}
        answer = client.post("/v1/completions", json=requested).json()["choices"][0]["text"]

    assert done.stdout == answer + "\n"


def test_a_conversation_is_remembered_until_reset(server):
    lines = "one\n\none\n/reset\none\n/exit\nnever\n"
    done = run("chat", "--url", server.url, "--max-tokens", "12", "--seed", "3", stdin=lines)

    first, second, forgotten, third = done.stdout.splitlines()
    assert forgotten == "(forgotten)"
    assert first == third
    assert second != first


def test_complete_runs_an_engine_of_its_own():
    done = run("complete", "m", *SIM, "-p", "-", "--max-tokens", "6", stdin="Once")

    assert (done.returncode, len(done.stdout.rstrip("\n"))) == (0, 6), done.stderr


def test_a_server_that_is_not_there_is_one_sentence():
    done = run("chat", "--url", "http://127.0.0.1:9", "-p", "hi")

    assert done.returncode == 1
    assert done.stderr.startswith("octavo: no server answers at http://127.0.0.1:9: ")
    assert len(done.stderr.splitlines()) == 1


@pytest.fixture
def website():
    """Of pages for browsers: what is found at a port that was mistaken for a server's."""

    class Page(BaseHTTPRequestHandler):
        def do_GET(self):
            page = b"<html><body>It works!</body></html>"
            self.send_response(200 if self.command == "GET" else 501)
            self.send_header("content-type", "text/html;charset=utf-8")
            self.send_header("content-length", str(len(page)))
            self.end_headers()
            self.wfile.write(page)

        do_POST = do_GET

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Page) as web:
        thread = threading.Thread(target=web.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{web.server_port}"
        web.shutdown()
        thread.join()


@pytest.mark.parametrize(
    "command",
    [
        ("chat", "-p", "hi"),
        ("complete", "-p", "hi"),
        ("bench", "serve", "--num-prompts", "1"),
        ("transcribe", __file__),
    ],
)
def test_a_server_that_serves_no_models_is_one_sentence(website, command):
    done = run(*command, "--url", website)

    assert done.returncode == 1
    assert done.stderr.startswith("octavo: the server answered ")
    assert done.stderr.endswith("text/html, not with JSON of the OpenAI API; check the URL\n")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "ftp://x", "http://127.0.0.1:99999"])
def test_transcribe_without_a_server_is_one_sentence(url):
    done = run("transcribe", __file__, "--url", url)

    assert (done.returncode, len(done.stderr.splitlines())) == (1, 1)
    assert done.stderr.startswith(f"octavo: no server answers at {url}: ") or (
        done.stderr == f"octavo: {url} is not the URL of a server; expected http://HOST:PORT\n"
    )


def test_a_refusal_of_the_server_is_one_sentence(server):
    done = run("complete", "nope", "--url", server.url, "-p", "hi")

    assert done.returncode == 1
    assert done.stderr == (
        "octavo: the server answered 404: The model `nope` does not exist. There are: `sim`.\n"
    )


def test_bench_serve_measures_every_request(server, tmp_path):
    file = tmp_path / "figures.json"
    done = run(
        "bench", "serve", "--base-url", server.url, "--num-prompts", "12", "--max-concurrency", "4",
        "--input-len", "20", "--output-len", "7", "--num-warmups", "2", "--json", str(file),
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    figures = json.loads(file.read_text())
    assert (figures["completed"], figures["failed"], figures["wrong_length"]) == (12, 0, 0)
    assert (figures["total_input_tokens"], figures["total_output_tokens"]) == (240, 84)
    # A busy machine may bring each answer in one piece; then there is no time between pieces.
    gaps = ["itl"] if "mean_itl_ms" in figures else []
    for name in ("ttft", "tpot", "e2el", *gaps):
        assert 0 <= figures[f"p50_{name}_ms"] <= figures[f"p99_{name}_ms"]
    assert figures["p50_ttft_ms"] <= figures["p50_e2el_ms"]
    assert "output_throughput" in done.stdout
    assert 0 < figures["cpu_s_per_1000_tokens"] < 100


def test_bench_serve_counts_what_failed(server):
    done = run(
        "bench", "serve", "--url", server.url, "--num-prompts", "3", "--input-len", "5000",
        "--output-len", "2", "--json", "-",
    )  # fmt: skip

    figures = json.loads(done.stdout)
    assert (done.returncode, figures["completed"], figures["errors"]) == (1, 0, {"http 400": 3})


def test_bench_serve_sends_no_load_elsewhere():
    done = run("bench", "serve", "--base-url", "http://192.0.2.1:80")

    assert done.returncode == 2
    assert (
        done.stderr
        == "octavo: 192.0.2.1 is not this machine; --allow-remote sends load elsewhere\n"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "flags", "figure"),
    [
        ("throughput", ("--num-prompts", "5"), ("output_tokens", 30)),
        ("latency", ("--batch-size", "2", "--num-iters", "3"), ("num_iters", 3)),
    ],
)
def test_offline_benches_run_the_engine_in_process(kind, flags, figure):
    sizes = ("--input-len", "10", "--output-len", "6", "--json", "-")
    done = run("bench", kind, "m", *SIM, *flags, *sizes)

    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures[figure[0]] == figure[1]


# ── arithmetic ──


def test_percentiles_interpolate_between_ranks():
    assert report.percentile([3, 1, 2], 50) == 2
    assert report.percentile([1, 2], 75) == 1.75
    assert report.percentile([5], 99) == 5
    assert report.summary("x", []) == {}


def test_prompt_i_of_a_seed_is_the_same_whatever_the_count():
    assert report.random_prompts(1, 2, 9, 500) == report.random_prompts(1, 5, 9, 500)[:2]
    assert all(100 <= token < 500 for token in report.random_prompts(1, 1, 99, 500)[0])


def test_arrivals_of_an_open_loop_have_the_asked_rate():
    plan = load.LoadPlan(
        address=ServerAddress.parse("127.0.0.1:1"), model="m", prompts=[[1]] * 2000, output_len=1,
        max_concurrency=1, request_rate=50.0,
    )  # fmt: skip
    due = list(load._due(plan))

    assert due[0] == 0.0
    assert due == sorted(due)
    assert 0.9 < due[-1] / (2000 / 50.0) < 1.1
