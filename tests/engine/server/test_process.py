"""The life of the process: open port, ready, signals, drain, exit codes."""

from __future__ import annotations

import json
import resource
import signal
import socket
import ssl
import subprocess
import sys

import httpx
import pytest

from tests.fakes.certificates import make_authority
from tests.fakes.process import environment, serving
from tests.fakes.server import post
from tests.fakes.upstream import closed_port

pytestmark = pytest.mark.slow

SLOW = ("--sim-step-base-ms", "10", "--access-log", "all")


def start_stream(server, max_tokens: int):
    """An open stream whose first bytes have arrived."""
    host, port = server.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=20)
    body = {
        "prompt": "a", "max_tokens": max_tokens, "ignore_eos": True,
        "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    connection.sendall(post("/v1/completions", json.dumps(body).encode()))
    return connection, connection.recv(65536)


def rest_of(connection: socket.socket, first: bytes) -> bytes:
    with connection:
        while chunk := connection.recv(65536):
            first += chunk
    return first


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_finishes_and_exits_with_0(number):
    with serving("m", *SLOW) as server:
        connection, first = start_stream(server, max_tokens=60)
        server.signal(number)
        draining = server.read_until("Draining")
        with server.client() as client:
            refused = client.post("/v1/completions", json={"prompt": "b"})
            ready = client.get("/ready")
        answer = rest_of(connection, first)
        code = server.wait()

    assert draining["in_flight"] == 1
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    assert (ready.status_code, ready.json()["state"]) == (503, "draining")
    assert b'"completion_tokens":60' in answer
    assert b'"finish_reason":"length"' in answer
    assert b"data: [DONE]" in answer
    assert code == 0
    answered = [line for line in server.lines if line["message"] == "Answered"]
    assert {"path": "/v1/completions", "status": 200}.items() <= answered[-1].items()


def test_a_hang_up_reads_the_keys_again_without_losing_a_request(tmp_path):
    file = tmp_path / "keys"
    file.write_text("old\n")

    def models(client, key: str) -> int:
        headers = {"authorization": f"Bearer {key}"}
        status: int = client.get("/v1/models", headers=headers).status_code
        return status

    requested = {"prompt": "a", "max_tokens": 60, "stream": True, "ignore_eos": True,
             "stream_options": {"include_usage": True}}  # fmt: skip
    with (
        serving("m", *SLOW, "--api-key-file", str(file)) as server,
        server.client() as client,
        client.stream(
            "POST", "/v1/completions", headers={"authorization": "Bearer old"}, json=requested
        ) as answer,
    ):
        assert models(client, "old") == 200
        file.write_text("new\n")
        server.signal(signal.SIGHUP)
        assert server.read_until("Loaded the new keys")["keys"] == 1
        assert (models(client, "old"), models(client, "new")) == (401, 200)
        text = answer.read()
    assert b'"completion_tokens":60' in text
    assert text.endswith(b"data: [DONE]\n\n")


def test_the_process_serves_over_mutual_tls_and_over_a_unix_socket(tmp_path):
    make_authority(tmp_path / "tls")
    folder = tmp_path / "tls"
    trust = ssl.create_default_context(cafile=str(folder / "ca.pem"))
    trust.load_cert_chain(folder / "client.pem", folder / "client.key")
    files = ("--ssl-certfile", f"{folder}/server.pem", "--ssl-keyfile", f"{folder}/server.key",
             "--ssl-ca-certs", f"{folder}/ca.pem")  # fmt: skip
    with serving("m", *files) as server:
        assert server.url.startswith("https://127.0.0.1:")
        with server.client(verify=trust) as client:
            answer = client.post("/v1/completions", json={"prompt": "a", "stream": True})
            assert answer.text.endswith("data: [DONE]\n\n")
            server.signal(signal.SIGHUP)
            server.read_until("Loaded the new certificate")
        with server.client(verify=trust) as client:
            assert client.get("/health").status_code == 200

    path = str(tmp_path / "sock")
    with serving("m", "--uds", path) as server:
        assert server.url == f"unix:{path}"
        with httpx.Client(transport=httpx.HTTPTransport(uds=path), timeout=20) as client:
            answer = client.post("http://m/v1/completions", json={"prompt": "a", "stream": True})
            assert answer.text.endswith("data: [DONE]\n\n")
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
    assert not (tmp_path / "sock").exists()


def test_a_server_may_open_as_many_files_as_its_hard_limit_allows():
    with serving("m", inside=("sh", "-c", 'ulimit -S -n 300; exec "$@"', "sh")) as server:
        soft, hard = resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE)
    assert soft == hard > 300


@pytest.mark.parametrize("allowed", ["", "1"])
def test_a_crash_leaves_no_memory_in_a_file_unless_that_is_wanted(allowed):
    """Prompts and keys are in it. Processes that it starts inherit the limit."""
    inside = ("sh", "-c", 'ulimit -S -c "$(ulimit -H -c)"; exec "$@"', "sh")
    with serving("m", inside=inside, env={"OCTAVO_CORE_DUMPS": allowed}) as server:
        soft, hard = resource.prlimit(server.process.pid, resource.RLIMIT_CORE)
    assert soft == (hard if allowed else 0)


def test_the_drain_route_ends_the_process():
    with serving("m") as server:
        with server.client() as client:
            assert client.post("/octavo/v1/drain").status_code == 202
        assert server.wait() == 0


def test_what_outlives_the_shutdown_timeout_ends_with_an_error_and_is_not_cut():
    with serving("m", *SLOW, "--shutdown-timeout", "0.2") as server:
        connection, first = start_stream(server, max_tokens=1500)
        server.signal(signal.SIGTERM)
        answer = rest_of(connection, first)
        code = server.wait()

    assert b'"code":"server_shutdown"' in answer
    assert answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    assert b'"finish_reason":"' not in answer
    assert code == 0


def test_a_second_signal_ends_at_once():
    with serving("m", *SLOW) as server:
        connection, _first = start_stream(server, max_tokens=1500)
        server.signal(signal.SIGTERM)
        server.read_until("Draining")
        server.signal(signal.SIGTERM)
        code = server.wait()
        connection.close()

    assert code == 1


def run(*flags: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "octavo.cli", *flags],
        capture_output=True, text=True, timeout=60, env=environment(**env), check=False,
    )  # fmt: skip


def test_a_port_in_use_is_one_sentence_and_exit_code_2():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = run("serve", "--device", "sim", "--port", str(port))

    assert done.returncode == 2
    assert done.stderr == (
        f"octavo: cannot listen on 127.0.0.1:{port}: Address already in use; "
        "choose others with --host and --port\n"
    )


def test_a_model_that_is_not_there_is_one_sentence_and_exit_code_2(tmp_path):
    done = run("serve", str(tmp_path / "nothing.gguf"), "--device", "cpu", "--port", "0")

    assert done.returncode == 2, done.stderr
    assert "nothing.gguf" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_misspelt_environment_variable_is_warned_of():
    done = run("serve", "--device", "sim", "--max-num-seqs", "0", OCTAVO_PROT="1", OCTAVO_PORT="1")

    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "octavo: warning: OCTAVO_PROT is set, but nothing reads it",
        "octavo: --max-num-seqs must be at least 1; got 0",
    ]


def test_an_administrators_listener_ends_the_process_and_the_other_one_does_not():
    port = closed_port()
    with serving("m", *SLOW, "--admin-port", str(port)) as server:
        with server.client() as client:
            refused = client.post("/octavo/v1/drain")
            assert (refused.status_code, client.get("/ready").status_code) == (404, 200)
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as admin:
            assert admin.get("/ready").status_code == 200
            assert admin.post("/v1/completions", json={"prompt": "a"}).status_code == 404
            assert admin.post("/octavo/v1/drain").status_code == 202
        assert server.wait() == 0


def test_an_administrators_port_that_is_taken_is_named():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = subprocess.run(
            [sys.executable, "-m", "octavo.cli", "serve", "m", "--device", "sim", "--port", "0",
             "--admin-port", str(port)],
            env=environment(), capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
    assert done.returncode != 0
    assert f"cannot listen on 127.0.0.1:{port}" in done.stderr
    assert "--admin-host and --admin-port" in done.stderr
