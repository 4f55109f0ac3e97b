"""One line for each request, or for each that failed: what it was, where it went, how long it took.

Never prompts or answers. Lines are written together every 100 ms by a thread, so that a
slow reader of the log does not slow requests down; when it cannot keep up, lines are dropped and
the next one says how many.
"""

from __future__ import annotations

import asyncio
import os
import time
from typing import TYPE_CHECKING, Literal

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable

    from octavo_router.metrics import RequestRecord

FLUSH_S = 0.1
MAX_WAITING = 20_000  # lines; about ten megabytes
MAX_TEXT = 128  # characters of anything that a client chose

Mode = Literal["all", "errors", "none"]
Form = Literal["json", "text"]

_FIELDS = (
    "request_id", "method", "route", "status", "outcome", "code", "model", "pool", "revision",
    "tenant", "endpoint", "policy", "client", "is_stream", "duration_s", "queue_s", "ttft_s",
    "request_bytes", "response_bytes", "prompt_tokens", "cached_tokens", "predicted_tokens",
    "output_tokens", "attempts", "resumes",
)  # fmt: skip


class AccessLog:
    """Belongs to the event loop, but for the writing. `close` writes what is left."""

    def __init__(
        self,
        mode: Mode,
        form: Form,
        *,
        fd: int = 2,
        clock: Callable[[], float] = time.time,
        flush_s: float = FLUSH_S,
    ) -> None:
        self.change(mode)
        self._render = _json if form == "json" else _text
        self._fd = fd
        self._clock = clock
        self._flush_s = flush_s
        self._waiting: list[tuple[float, RequestRecord]] = []
        self._num_dropped = 0
        self._timer: asyncio.TimerHandle | None = None
        self._writing: asyncio.Task[None] | None = None

    def change(self, mode: Mode) -> None:
        """Which requests get a line from now on."""
        self._mode = mode
        self.takes_all = mode == "all"

    def write(self, record: RequestRecord) -> None:
        """Hot path: once per request; nothing is formatted yet."""
        if self._mode == "none" or (self._mode == "errors" and not record.is_error):
            return
        if len(self._waiting) >= MAX_WAITING:
            self._num_dropped += 1
            return
        self._waiting.append((self._clock(), record))
        if self._timer is None and self._writing is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._flush_s, self._flush)

    async def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._writing is not None:
            await self._writing
        data = self._take()
        if data:
            await asyncio.to_thread(_write_all, self._fd, data)

    def _flush(self) -> None:
        self._timer = None
        self._writing = asyncio.create_task(self._write_out(), name="access log")

    async def _write_out(self) -> None:
        try:
            while data := self._take():
                await asyncio.to_thread(_write_all, self._fd, data)
                await asyncio.sleep(self._flush_s)
        finally:
            self._writing = None

    def _take(self) -> bytes:
        waiting, self._waiting = self._waiting, []
        lines = [self._render(at, _fields(record)) for at, record in waiting]
        if self._num_dropped:
            fields: dict[str, object] = {"message": "Dropped lines", "lines": self._num_dropped}
            lines.append(self._render(self._clock(), fields))
            self._num_dropped = 0
        return b"".join(lines)


def _fields(record: RequestRecord) -> dict[str, object]:
    fields: dict[str, object] = {"message": "Answered"}
    for name in _FIELDS:
        value = getattr(record, name)
        if value is None or value in ("", 0) or value is False:
            continue
        if isinstance(value, str):
            value = value[:MAX_TEXT]
        elif isinstance(value, float):
            value = round(value, 6)
        fields[name] = value
    return fields


def _json(at: float, fields: dict[str, object]) -> bytes:
    clock = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(at))
    line = {
        "time": f"{clock}.{int(at % 1 * 1000):03d}Z",
        "level": "info",
        "logger": "octavo.access",
        **fields,
    }
    return msgspec.json.encode(line) + b"\n"


def _text(at: float, fields: dict[str, object]) -> bytes:
    clock = time.strftime("%H:%M:%S", time.localtime(at))
    message = fields.pop("message")
    pairs = [f"{key}={_plain(str(value))}" for key, value in fields.items()]
    return (
        " ".join([clock, "INFO octavo.access", str(message), *pairs, ""]).rstrip().encode() + b"\n"
    )


def _plain(text: str) -> str:
    """Nothing that a client chose can begin a line or colour a terminal."""
    is_plain = text.isprintable() and " " not in text
    return text if is_plain else text.encode("unicode_escape").decode("ascii").replace(" ", "\\x20")


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(fd, view) :]
        except OSError:  # the log's reader is gone; requests go on
            return
