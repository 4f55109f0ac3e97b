"""The stand on which routers are measured: engines, a router on a core of its own, and the load.

Engines and load replay the mixes of `traffic`, each in a process of its own. They share the second
core, so that what is measured is one router process on the first.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import ssl
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psutil

from benchmarks.router.traffic import MIXES, Mix, key_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

FIRST_ENGINE_PORT = 9101
ROUTER_PORT = 9300  # beyond the ports of a hundred engines
PLAIN = MIXES["plain"]
_REPLAY = (sys.executable, "-m", "benchmarks.router.replay")


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
def engines(count: int, cores: set[int] | None, mix: Mix = PLAIN) -> Iterator[list[str]]:
    """`count` engines in one process; their URLs."""
    ports = range(FIRST_ENGINE_PORT, FIRST_ENGINE_PORT + count)
    command = [*_REPLAY, "engines", mix.name, str(ports[0]), str(count)]
    with running(command, cores) as process:
        until_answers(ports[0], process, within_s=10)
        yield [f"http://127.0.0.1:{port}" for port in ports]


def until_answers(
    port: int, process: subprocess.Popen[bytes], *, within_s: float, mix: Mix = PLAIN
) -> float:
    """Seconds until a completion comes back."""
    began_at = time.monotonic()
    while time.monotonic() - began_at < within_s:
        if _answers(port, mix):
            return time.monotonic() - began_at
        if process.poll() is not None:
            raise SystemExit(f"it ended with {process.returncode}: {process.args!r}")
        time.sleep(0.01)
    raise SystemExit(f"no answer within {within_s:.0f} s from {process.args!r}")


def _answers(port: int, mix: Mix) -> bool:
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}]}).encode()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key_of(0)}"}
    scheme, tls = "http", None
    if mix.uses_tls:
        scheme, tls = "https", ssl._create_unverified_context()
    url = f"{scheme}://127.0.0.1:{port}/v1/chat/completions"
    request = urllib.request.Request(url, body, headers)
    try:
        with urllib.request.urlopen(request, timeout=2, context=tls) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def load(
    port: int, connections: int, seconds: float, cores: set[int] | None, mix: Mix = PLAIN
) -> dict[str, Any]:
    """One run of the load; what it printed."""
    command = [*_REPLAY, "load", mix.name, str(port), str(connections), str(seconds)]
    pin = (lambda: os.sched_setaffinity(0, cores)) if cores else None
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, preexec_fn=pin)
    return dict(json.loads(done.stdout))


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


def router_config(mix: Mix, folder: Path, *, collector: str) -> Path:
    """The file for a router that is measured with a mix: its keys, certificate and tracing."""
    config: dict[str, Any] = {}
    if mix.num_tenants:
        config["flow"] = {
            "keys": [
                {
                    "tenant": f"tenant-{i}", "key": key_of(i), "requests_per_s": 1e6,
                    "tokens_per_min": 1e12, "max_in_flight": 10_000,
                }
                for i in range(mix.num_tenants)
            ]
        }  # fmt: skip
    if mix.trace_ratio:
        config["tracing"] = {"endpoint": collector, "sample_ratio": mix.trace_ratio}
    if mix.uses_tls:
        cert, key = str(folder / "cert.pem"), str(folder / "key.pem")
        subprocess.run(
            [
                need("openssl", "openssl"), "req", "-x509", "-newkey", "ec", "-pkeyopt",
                "ec_paramgen_curve:prime256v1", "-nodes", "-days", "1", "-subj", "/CN=127.0.0.1",
                "-keyout", key, "-out", cert,
            ],
            check=True, capture_output=True,
        )  # fmt: skip
        config["server"] = {"tls_cert": cert, "tls_key": key}
    file = folder / "router.yaml"
    file.write_text(json.dumps(config))  # JSON is YAML
    return file
