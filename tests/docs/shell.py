"""Runs the marked blocks of a page as a newcomer would, on ports and in folders of their own."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from typing import TYPE_CHECKING

from tests.docs.pages import ROOT

if TYPE_CHECKING:
    from pathlib import Path

    from tests.docs.pages import Block

_START_S = 120.0  # for a server on a busy machine
_RUN_S = 120.0
_PORT = re.compile(r"\b(8000|8001|8002|8080)\b")
# `octavo` may not be installed where tests run; `up` and `router` have no variable for the port.
_SHIM = """#!/bin/bash
case "$1 $*" in
  up*--port*|router*--port*) ;;
  up*|router*) set -- "$@" --port "$DOCS_ROUTER_PORT" ;;
esac
exec "$DOCS_PYTHON" -m octavo.cli "$@"
"""


class Newcomer:
    """A shell in an empty folder that has the clone's manifests, and what it has started."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "clone"
        self._ports: dict[str, str] = {}
        self._started: list[subprocess.Popen[bytes]] = []
        self._log = folder / "background.log"
        programs = folder / "bin"
        for made in (self._folder, programs):
            made.mkdir()
        for shared in ("manifests", "benchmarks"):
            (self._folder / shared).symlink_to(ROOT / shared)
        (programs / "octavo").write_text(_SHIM)
        (programs / "octavo").chmod(0o755)
        (programs / "python").symlink_to(sys.executable)
        (folder / ".curlrc").write_text("fail-with-body\nshow-error\nsilent\n")
        roots = [str(ROOT / part) for part in (".", "common", "engine", "router", "operator")]
        self._environ = {
            **{key: value for key, value in os.environ.items() if not key.startswith("OCTAVO_")},
            "PATH": f"{programs}:{os.environ['PATH']}",
            "PYTHONPATH": ":".join(roots),
            "DOCS_PYTHON": sys.executable,
            "DOCS_ROUTER_PORT": self._port("8080"),
            "OCTAVO_PORT": self._port("8000"),
            "OCTAVO_HOME": str(folder / "home"),
            "OCTAVO_NUM_THREADS": "1",
            "OCTAVO_KV_CACHE_MEMORY_BYTES": "128MiB",
            "CURL_HOME": str(folder),
            "no_proxy": "127.0.0.1,localhost",
        }

    def follow(self, block: Block) -> None:
        """Does what the block's mark says. Raises AssertionError with the page and line."""
        text = _PORT.sub(lambda match: self._port(match[1]), block.text)
        if block.mark == "save":
            (self._folder / block.argument).write_text(text)
        elif block.mark == "start":
            self._start(block, text, self._here(block.argument))
        else:
            self._run(block, text)

    def leave(self) -> None:
        """Ends what still runs: politely, then surely."""
        for process in self._started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
        for process in self._started:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def _run(self, block: Block, text: str) -> None:
        shell = block.language in ("sh", "shell", "bash", "")
        text = re.sub(r"^\$ ", "", text, flags=re.M)
        command = (
            ["bash", "-euo", "pipefail", "-c", text] if shell else [sys.executable, "-c", text]
        )
        done = subprocess.run(
            command, cwd=self._folder, env=self._environ, text=True, timeout=_RUN_S,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        assert done.returncode == 0, f"{block.where} failed:\n{text}\n{done.stdout}{self._tail()}"
        assert block.argument in done.stdout, f"{block.where} printed:\n{done.stdout}"

    def _start(self, block: Block, text: str, url: str) -> None:
        text = re.sub(r"^\$ ", "", text, flags=re.M)
        with self._log.open("ab") as log:
            process = subprocess.Popen(
                ["bash", "-euo", "pipefail", "-c", text], cwd=self._folder, env=self._environ,
                stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
        self._started.append(process)
        give_up_at = time.monotonic() + _START_S
        while not _answers(url):
            assert process.poll() is None, f"{block.where} ended:\n{self._tail()}"
            assert time.monotonic() < give_up_at, f"{block.where}: {url} is silent:\n{self._tail()}"
            time.sleep(0.05)

    def _here(self, text: str) -> str:
        return _PORT.sub(lambda match: self._port(match[1]), text)

    def _port(self, written: str) -> str:
        if written not in self._ports:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                self._ports[written] = str(probe.getsockname()[1])
        return self._ports[written]

    def _tail(self) -> str:
        text = self._log.read_text(errors="replace") if self._log.exists() else ""
        return f"\nIn the background:\n{text[-4000:]}" if text else ""


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False
