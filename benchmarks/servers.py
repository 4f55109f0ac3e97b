"""Server processes under measurement: started, awaited, paused, weighed, stopped.

Each is a session of its own, so that whatever it starts stops with it.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from octavo_common.process_tree import cpu_seconds, process_tree

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

STOP_WITHIN_S = 20.0
BUSY = 1.0  # load average before anything was started
# Thread counts are each server's own business; what the shell says of them is not for all.
_UNSET = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "GOMP_CPU_AFFINITY",
          "KMP_AFFINITY", "OMP_PROC_BIND", "OMP_PLACES", "LD_PRELOAD")  # fmt: skip
# No GPU, and nothing is fetched or reported.
_QUIET = {
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "DO_NOT_TRACK": "1",
}


class NotReady(Exception):
    """A server ended, or took too long, before it answered. Its last lines say why."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Of all of a server's processes; pages that two of them share count once."""

    total_bytes: int
    anonymous_bytes: int  # without mapped files


class Server:
    """One server process that is ready. Use as a context."""

    def __init__(self, process: subprocess.Popen[bytes], url: str, ready_s: float) -> None:
        self.process = process
        self.url = url
        self.ready_s = ready_s

    @classmethod
    def start(
        cls,
        command: Sequence[str],
        *,
        port: int,
        log: Path,
        ready: str = "/health",
        env: Mapping[str, str] | None = None,
        within_s: float = 120.0,
    ) -> Server:
        """Raises NotReady."""
        url = f"http://127.0.0.1:{port}"
        inherited = {name: value for name, value in os.environ.items() if name not in _UNSET}
        started_at = time.perf_counter()
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as file:
            try:
                process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=file, stderr=file,
                    env=inherited | _QUIET | dict(env or {}), start_new_session=True,
                )  # fmt: skip
            except OSError as error:
                raise NotReady(f"{command[0]} cannot be started: {error.strerror}") from None
        server = cls(process, url, 0.0)
        try:
            while not _answers(url + ready):
                if process.poll() is not None:
                    raise NotReady(f"it ended with {process.returncode}: {_complaint(log)}")
                if time.perf_counter() - started_at > within_s:
                    raise NotReady(
                        f"not ready after {within_s:.0f} s; it said last: {_last_line(log)}"
                    )
                time.sleep(0.01)
        except BaseException:
            server.stop()
            raise
        server.ready_s = time.perf_counter() - started_at
        return server

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Ask, then force; whatever it started goes too."""
        for number in (signal.SIGCONT, signal.SIGTERM):
            self._signal(number)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(STOP_WITHIN_S)
        self._signal(signal.SIGKILL)
        self.process.wait()

    def pause(self) -> None:
        """It keeps its memory and uses no core until `resume`."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def cpu_s(self) -> float:
        return cpu_seconds(self.process.pid)

    def memory(self) -> Memory:
        total = anonymous = 0
        for pid in process_tree(self.process.pid):
            with suppress(OSError):  # it has just ended
                for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                    kind, _, size = line.partition(":")
                    if kind == "Pss":
                        total += int(size.split()[0]) * 1024
                    elif kind == "Pss_Anon":
                        anonymous += int(size.split()[0]) * 1024
        return Memory(total, anonymous)

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)


def end_cleanly_on_sigterm() -> None:
    """Whoever ends a benchmark ends its servers too: they are sessions of their own."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def warn_if_busy() -> None:
    """Figures of a machine that does something else are worth nothing."""
    busy = os.getloadavg()[0]
    if busy > BUSY:
        print(
            f"NOTE: this machine is busy (load average {busy:.1f}): what follows shows that it"
            " runs, not how fast",
            file=sys.stderr, flush=True,
        )  # fmt: skip


@contextmanager
def streamed_chat(port: int, body: Mapping[str, Any]) -> Iterator[Iterator[bytes]]:
    """The lines of an answer, over a new connection. Raises SystemExit if there is none."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    try:
        headers = {"Content-Type": "application/json"}
        text = json.dumps({**body, "stream": True, "temperature": 0})
        connection.request("POST", "/v1/chat/completions", text, headers)
        response = connection.getresponse()
        if response.status != 200:
            raise SystemExit(f"The server answered {response.status}: {response.read(500)!r}")
        yield iter(response.readline, b"")
        response.read()
    finally:
        connection.close()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            is_well: bool = answer.status == 200
            return is_well
    except (urllib.error.URLError, OSError):
        return False


def _complaint(log: Path) -> str:
    """Of a process that ended: the last error that it named, else its last line."""
    return _last_line(log, "Error") or _last_line(log)


def _last_line(log: Path, word: str = "") -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").split("\n")]
    said = [line for line in lines if line and word in line]
    if word and not said:
        return ""
    return f"{(said or ['nothing'])[-1][:300]} (all of it: {log})"
