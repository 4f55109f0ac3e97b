"""The stand on which routers are measured: fixed-answer engines, a router on a core of its own.

Engines are one nginx that answers every completion with the same 300 bytes on several ports; the
load is wrk. Both share the second core, so that what is measured is one router process on the
first.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
import urllib.request
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

FIRST_ENGINE_PORT = 9101
ROUTER_PORT = 9300  # beyond the ports of a hundred engines
ANSWER = json.dumps(
    {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": "m",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hold the left key for a second."},
                "finish_reason": "stop",
            }
        ],
        "usage": {"prompt_tokens": 290, "completion_tokens": 8, "total_tokens": 298},
    },
    separators=(",", ":"),
)
MODELS = '{"object":"list","data":[{"id":"m","object":"model","owned_by":"bench"}]}'


@dataclass(frozen=True, slots=True)
class Cores:
    """Which process runs where; None where the machine has one core only."""

    router: set[int] | None
    others: set[int] | None


def split_cores() -> Cores:
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        return Cores(None, None)
    return Cores({cores[0]}, {cores[1]})


def need(program: str, package: str) -> str:
    """The program's path, or an end that says what to install."""
    found = shutil.which(program) or shutil.which(program, path="/usr/sbin:/usr/local/sbin")
    if found is None:
        raise SystemExit(f"{program} is needed for this measurement: apt-get install {package}")
    return found


@contextmanager
def running(
    command: Sequence[str], cores: set[int] | None, *, env: dict[str, str] | None = None,
    log: Path | None = None,
) -> Iterator[subprocess.Popen[bytes]]:  # fmt: skip
    """A process (and its children), ended with the block."""
    pin = (lambda: os.sched_setaffinity(0, cores)) if cores else None
    with open(log or os.devnull, "ab") as sink:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, start_new_session=True,
            env={**os.environ, **(env or {})}, preexec_fn=pin,
        )  # fmt: skip
    try:
        yield process
    finally:
        for number, patience_s in ((signal.SIGTERM, 10), (signal.SIGKILL, 5)):
            if process.poll() is not None:
                break
            with suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                process.wait(patience_s)


@contextmanager
def engines(count: int, cores: set[int] | None) -> Iterator[list[str]]:
    """`count` fixed-answer engines; their URLs."""
    ports = range(FIRST_ENGINE_PORT, FIRST_ENGINE_PORT + count)
    with tempfile.TemporaryDirectory() as folder:
        listen = "".join(f"listen 127.0.0.1:{port} backlog=4096; " for port in ports)
        temporary = "".join(
            f"{kind}_temp_path {folder}/{kind}; "
            for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        )
        conf = Path(folder) / "nginx.conf"
        conf.write_text(
            f"""worker_processes 1; daemon off; pid {folder}/pid; error_log {folder}/error;
            events {{ worker_connections 8192; }}
            http {{ access_log off; keepalive_requests 1000000000; keepalive_timeout 3600s;
              default_type application/json; {temporary}
              server {{ {listen}
                location = /v1/chat/completions {{ return 200 '{ANSWER}'; }}
                location = /v1/models {{ return 200 '{MODELS}'; }}
                location = /health {{ return 200 '{{}}'; }}
                location / {{ return 404 '{{}}'; }} }} }}"""
        )
        command = [need("nginx", "nginx-light"), "-p", folder, "-c", str(conf), "-e", "error"]
        with running(command, cores) as process:
            until_answers(ports[0], process, within_s=10)
            yield [f"http://127.0.0.1:{port}" for port in ports]


def until_answers(port: int, process: subprocess.Popen[bytes], *, within_s: float) -> float:
    """Seconds until a completion comes back."""
    began_at = time.monotonic()
    while time.monotonic() - began_at < within_s:
        if _answers(port):
            return time.monotonic() - began_at
        if process.poll() is not None:
            raise SystemExit(f"it ended with {process.returncode}: {process.args!r}")
        time.sleep(0.01)
    raise SystemExit(f"no answer within {within_s:.0f} s from {process.args!r}")


def _answers(port: int) -> bool:
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}]}).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions",
        body,
        {"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=2) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def wrk(port: int, connections: int, seconds: int, cores: set[int] | None) -> dict[str, Any]:
    """One run of the load; what it printed."""
    script = str(Path(__file__).with_name("prompts.lua"))
    command = [
        need("wrk", "wrk"), "-t1", f"-c{connections}", f"-d{seconds}s", "--timeout", "10s",
        "-s", script, f"http://127.0.0.1:{port}",
    ]  # fmt: skip
    pin = (lambda: os.sched_setaffinity(0, cores)) if cores else None
    done = subprocess.run(command, check=True, capture_output=True, text=True, preexec_fn=pin)
    line = next(line for line in done.stdout.splitlines() if line.startswith("JSON "))
    return dict(json.loads(line.removeprefix("JSON ")))


def tree(pid: int) -> list[psutil.Process]:
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


def cpu_s(pid: int) -> float:
    """CPU time of a process and its children so far."""
    total = 0.0
    for process in tree(pid):
        with suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system
    return total


def rss_mib(pid: int) -> float:
    total = 0
    for process in tree(pid):
        with suppress(psutil.NoSuchProcess):
            total += process.memory_info().rss
    return total / 2**20
