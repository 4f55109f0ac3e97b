"""What the API server costs: per request, and per streamed token. The simulator takes no time.

    python -m benchmarks.api [--json] [--requests 2000] [--streams 64] [--tokens 256]

The server runs in a process of its own, its engine core in another one, as with a real model. A
request's figure is the whole way of a sequential client over loopback, its own work included; that
of an empty answer (/health) is shown beside it. Streams are read by raw sockets that only count.
CPU seconds are those of the API process alone, so tokens per CPU second say what a free core could
do, whatever else this machine is busy with. Flat out, what piles up leaves as one event; paced,
the engine makes 25,000 tokens a second, each of which should be an event of its own; the first and
last steps of a stream are part of the time. Budgets: 1 ms a request at p50, 20,000 tokens/s.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec
import psutil

if TYPE_CHECKING:
    from collections.abc import Iterator

PACE = 25_000  # tokens a second
PAYLOADS: dict[str, tuple[str, dict[str, Any]]] = {
    "completion": ("/v1/completions", {"prompt": "Once upon a time", "max_tokens": 1}),
    "chat": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "Once upon a time"}], "max_tokens": 1},
    ),
    "chat, streamed": (
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": "Once upon a time"}],
            "max_tokens": 1,
            "stream": True,
        },
    ),
}


async def serve(step_ms: float) -> None:
    """The server's process: prints its port, lives until stdin ends."""
    from octavo_common.logs import set_up_logging
    from octavo_engine.config import EngineConfig, SchedulerConfig, SimConfig
    from octavo_engine.core.async_engine import AsyncEngine
    from octavo_engine.core.connect import in_child_process
    from octavo_engine.server.app import build_app
    from octavo_engine.server.http.listen import open_port
    from octavo_engine.server.run import make_server
    from octavo_engine.server.settings import ServerSettings

    set_up_logging("text", "warning")
    config = EngineConfig(
        model="sim", device="sim", max_model_len=4096,
        scheduler=SchedulerConfig(max_num_seqs=256, max_queue=4096),
        sim=SimConfig(
            kv_blocks=65_536, step_base_ms=step_ms, decode_token_ms=0.0, prefill_token_ms=0.0
        ),
    )  # fmt: skip
    settings = ServerSettings()
    engine = await AsyncEngine.start(config, connect=in_child_process)
    await engine.ready()
    listener = open_port("127.0.0.1", 0)
    server = make_server(build_app(engine, settings), settings)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    print(listener.getsockname()[1], flush=True)
    await asyncio.to_thread(sys.stdin.read)
    server.leave()
    await serving
    await engine.stop()


@contextmanager
def serving(step_ms: float) -> Iterator[tuple[int, psutil.Process]]:
    command = [sys.executable, "-m", "benchmarks.api", "--serve", str(step_ms)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        yield int(process.stdout.readline()), psutil.Process(process.pid)
        process.stdin.close()


class Client:
    """One connection; knows just enough HTTP for the answers it requested."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def open(cls, port: int) -> Client:
        return cls(*await asyncio.open_connection("127.0.0.1", port, limit=1 << 22))

    def send(self, path: str, body: dict[str, Any] | None) -> None:
        data = b"" if body is None else msgspec.json.encode(body)
        head = f"{'GET' if body is None else 'POST'} {path} HTTP/1.1\r\nhost: 127.0.0.1\r\n"
        if body is not None:
            head += f"content-type: application/json\r\ncontent-length: {len(data)}\r\n"
        self.writer.write(head.encode() + b"\r\n" + data)

    async def answer(self) -> bytes:
        """The whole body."""
        head = (await self.reader.readuntil(b"\r\n\r\n")).lower()
        if not head.startswith(b"http/1.1 200"):
            raise SystemExit(f"refused: {head[:200]!r} {await self.reader.read(500)!r}")
        if b"content-length" in head:
            length = int(head.split(b"content-length:")[1].split(b"\r\n")[0])
            return await self.reader.readexactly(length)
        return await self.reader.readuntil(b"\r\n0\r\n\r\n")

    def close(self) -> None:
        self.writer.close()


async def requests(port: int, path: str, body: dict[str, Any] | None, count: int) -> list[float]:
    """Milliseconds of each, one after the other on one connection, sorted."""
    client = await Client.open(port)
    times = []
    for number in range(count + count // 10):
        began_at = time.perf_counter()
        client.send(path, body)
        await client.answer()
        if number >= count // 10:
            times.append((time.perf_counter() - began_at) * 1e3)
    client.close()
    return sorted(times)


async def streams(port: int, api: psutil.Process, args: argparse.Namespace) -> dict[str, float]:
    body = {
        "prompt": "Once upon a time", "max_tokens": args.tokens, "ignore_eos": True,
        "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip

    async def one() -> tuple[int, int]:
        client = await Client.open(port)
        client.send("/v1/completions", body)
        answer = await client.answer()
        client.close()
        (usage,) = (line for line in answer.split(b"\n") if b'"usage":' in line)
        tokens = msgspec.json.decode(usage.removeprefix(b"data: "))["usage"]["completion_tokens"]
        return tokens, answer.count(b"data: ")

    await asyncio.gather(*(one() for _ in range(args.streams)))  # warm
    cpu_before, began_at = sum(api.cpu_times()[:2]), time.perf_counter()
    counts = []
    for _ in range(args.rounds):
        counts += await asyncio.gather(*(one() for _ in range(args.streams)))
    elapsed_s = time.perf_counter() - began_at
    cpu_s = sum(api.cpu_times()[:2]) - cpu_before
    tokens, events = (sum(column) for column in zip(*counts, strict=True))
    return {
        "streams": args.streams,
        "tokens_per_s": tokens / elapsed_s,
        "tokens_per_cpu_s": tokens / cpu_s,
        "events_per_token": events / tokens,
        "cpu_us_per_token": cpu_s / tokens * 1e6,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--serve", type=float, metavar="STEP_MS", help=argparse.SUPPRESS)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    try:
        import uvloop as loops
    except ImportError:
        import asyncio as loops  # type: ignore[no-redef]  # what both have is enough
    if args.serve is not None:
        loops.run(serve(args.serve))
        return
    figures: dict[str, Any] = {}
    with serving(0.0) as (port, api):
        for name, (path, body) in {"empty": ("/health", None), **PAYLOADS}.items():
            times = loops.run(requests(port, path, body, args.requests))
            figures[name] = {
                "p50_ms": statistics.median(times), "p99_ms": times[len(times) * 99 // 100]
            }  # fmt: skip
        figures["flat out"] = loops.run(streams(port, api, args))
    with serving(args.streams / PACE * 1e3) as (port, api):
        figures["paced"] = loops.run(streams(port, api, args))
    if args.json:
        print(json.dumps(figures, indent=2))
        return
    for name, row in figures.items():
        print(f"{name:<15}" + "  ".join(f"{key} {value:,.3f}" for key, value in row.items()))


if __name__ == "__main__":
    main()
