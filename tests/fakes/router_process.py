"""A real `octavo router` process on a free loopback port, and what its clients see of it."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

from tests.fakes.http_client import RawClient
from tests.fakes.process import PATIENCE_S, environment

if TYPE_CHECKING:
    import signal
    from collections.abc import Callable, Iterator

LOOK_S = 0.01


@dataclass
class RouterProcess:
    """Its log is in a file, so that nobody has to read it along."""

    process: subprocess.Popen[bytes]
    log: Path
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def lines(self) -> list[dict[str, Any]]:
        """Of the log, without what is said to a person."""
        return [json.loads(line) for line in self._text.splitlines() if line.startswith("{")]

    @property
    def access_lines(self) -> list[dict[str, Any]]:
        return [line for line in self.lines if line["logger"] == "octavo.access"]

    @property
    def _text(self) -> str:
        return self.log.read_text()

    @cached_property
    def client(self) -> httpx.Client:
        """Made once: that takes longer than what it is used for."""
        return httpx.Client(base_url=self.url, timeout=PATIENCE_S)

    def get(self, path: str) -> Any:
        answer = self.client.get(path)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def would_match(self, body: dict[str, Any], path: str = "/v1/chat/completions") -> int:
        """The cached tokens that it expects where it would send this."""
        reported = self.client.post("/debug/route", params={"path": path}, json=body)
        return int(reported.json()["matched_tokens"])

    def states(self) -> dict[int, str]:
        """Of its endpoints, by port."""
        endpoints = self.get("/octavo/v1/state")["endpoints"]
        return {int(one["url"].rpartition(":")[2]): one["state"] for one in endpoints}

    def metric(self, name: str, **labels: str) -> float:
        """The sum of the samples with this name and these labels."""
        text = self.client.get("/metrics").text
        total = 0.0
        for line in text.splitlines():
            sample = re.fullmatch(r"(\w+)(?:\{(.*)\})? (\S+)", line)
            if sample is None or sample[1] != name:
                continue
            found = dict(re.findall(r'(\w+)="([^"]*)"', sample[2] or ""))
            if labels.items() <= found.items():
                total += float(sample[3])
        return total

    def until(self, fact: Callable[[], bool], limit_s: float = PATIENCE_S) -> None:
        """Processes have no events to wait for."""
        end = time.monotonic() + limit_s
        while time.monotonic() < end:
            if fact():
                return
            try:
                self.process.wait(LOOK_S)
            except subprocess.TimeoutExpired:
                continue
            assert fact(), self._text
            return
        raise AssertionError(f"it did not come true:\n{self._text}")

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self) -> int:
        return self.process.wait(PATIENCE_S)


@contextmanager
def routing(
    *flags: str, ready: bool = True, env: dict[str, str] | None = None
) -> Iterator[RouterProcess]:
    """`octavo router` that listens, and is ready if not otherwise set. Killed at the end."""
    command = [sys.executable, "-m", "octavo.cli", "router", "--host", "127.0.0.1", "--port", "0"]
    command += ["--log-format", "json", "--access-log", "all", *flags]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with log.open("wb") as stderr:
            process = subprocess.Popen(command, stderr=stderr, env=environment(**(env or {})))
        router = RouterProcess(process, log)
        try:
            router.until(lambda: "routes at" in log.read_text())
            match = re.search(r"routes at http://127\.0\.0\.1:(\d+)/v1", log.read_text())
            assert match
            router.port = int(match[1])
            if ready:
                router.until(lambda: router.client.get("/ready").status_code == 200)
            yield router
        finally:
            router.client.close()
            if process.poll() is None:
                process.kill()
            process.wait(PATIENCE_S)


# ── streams as their clients see them ──


@dataclass
class StreamResult:
    """What one client got of one streamed answer."""

    status: int = 0
    served_by: str = ""
    text: str = ""
    ends: list[str] = field(default_factory=list)
    errors: list[dict[str, Any]] = field(default_factory=list)
    ids: set[str] = field(default_factory=set)
    is_done: bool = False


async def stream(
    port: int, body: dict[str, Any], *, path: str = "/v1/chat/completions",
    on_text: Callable[[], None] = lambda: None, more: str = "",
) -> StreamResult:  # fmt: skip
    """The whole of it. `on_text` is called when the first piece of text is there."""
    reported = StreamResult()
    async with await RawClient.open(port) as client:
        await client.post({**body, "stream": True}, path, more)
        head = await client.head()
        reported.status, reported.served_by = head.status, head.header("x-served-by") or ""
        rest = b""
        while piece := await client.chunk():
            *events, rest = (rest + piece).split(b"\n\n")
            for event in events:
                _take(reported, event)
            if reported.text:
                on_text()
        assert not rest, rest
    return reported


def _take(reported: StreamResult, event: bytes) -> None:
    assert not reported.is_done, event
    if event.startswith(b":"):
        assert not event.startswith(b": octavo"), event
        return
    assert event.startswith(b"data: "), event
    if event == b"data: [DONE]":
        reported.is_done = True
        return
    chunk = json.loads(event[6:])
    if "error" in chunk:
        reported.errors.append(chunk["error"])
        return
    reported.ids.add(chunk["id"])
    for choice in chunk["choices"]:
        reported.text += choice.get("text") or (choice.get("delta") or {}).get("content") or ""
        if choice["finish_reason"]:
            reported.ends.append(choice["finish_reason"])


async def streams(
    port: int, bodies: list[dict[str, Any]], *, meanwhile: Callable[[], None], after: int
) -> list[StreamResult]:
    """All at once. `meanwhile` happens when so many of them have begun to speak."""
    begun: set[int] = set()
    is_time = asyncio.Event()

    def spoke(number: int) -> None:
        begun.add(number)
        if len(begun) >= after:
            is_time.set()

    async def watch() -> None:
        await is_time.wait()
        meanwhile()

    async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as group:
        group.create_task(watch())
        tasks = [
            group.create_task(stream(port, body, on_text=partial(spoke, number)))
            for number, body in enumerate(bodies)
        ]
    return [task.result() for task in tasks]
