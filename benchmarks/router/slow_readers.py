"""Two thousand clients that read ten bytes a second of their streams, beside ordinary ones.

    python -m benchmarks.router.slow_readers [--quick] [--json FILE] [alone|router]

In front of one engine alone, and of one behind a router: `octavo serve --device sim`, the real
scheduler in modelled time. Half of the slow readers ask for more than the sockets on the way take,
so that their streams stop in the middle; the others' streams are over before they are read. First
ordinary clients have the engine for themselves, then the slow readers are there, then those are
disconnected after the stated time. Ends with status 1 where a bound of
`benchmarks/faults/bounds.json` is not kept.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import selectors
import socket
import sys
import tempfile
import time
import urllib.request
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from multiprocessing import Pipe, get_context
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from benchmarks.faults.bounds import judge
from benchmarks.router.load import raise_file_limit
from benchmarks.router.overload import Verdict
from benchmarks.servers import Server, free_port
from octavo.bench.report import percentile
from octavo_engine.protocol.metric_names import KV_CACHE_USAGE_PERC, NUM_REQUESTS_RUNNING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from multiprocessing.connection import Connection

Place = Literal["alone", "router"]
PLACES: Final[tuple[Place, ...]] = ("alone", "router")

BYTES_A_SECOND: Final = 10
RECEIVE_BUFFER: Final = 4096
_NICE: Final = 10  # slow readers may wait for a processor
_ARRIVALS_A_SECOND: Final = 200
_PAUSED_WITHIN_S: Final = 120.0  # until then they are computed for, as all are
_CLIENTS: Final = 16  # ordinary ones
_TOKENS: Final = 32
_LOOK_S: Final = 0.25
_FEW_FILES: Final = 40
_SOON, _LATE = 180, 1500  # tokens of slow readers, of 600 bytes each with their logprobs
_SIM: Final = (
    "--device", "sim", "--served-model-name", "m", "--sim-step-base-ms", "20",
    "--sim-decode-token-ms", "0", "--sim-prefill-token-ms", "0",
    "--sim-kv-blocks", "16384",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Scale:
    num_readers: int
    seconds: float  # of each measurement
    write_timeout_s: float  # after which slow readers are disconnected


FULL = Scale(num_readers=2000, seconds=8.0, write_timeout_s=60.0)
QUICK = Scale(num_readers=60, seconds=2.0, write_timeout_s=8.0)


# -- clients ---------------------------------------------------------------------------------------


def _request(body: dict[str, object]) -> bytes:
    payload = json.dumps({"model": "m", "ignore_eos": True, "stream": True, **body}).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n"
        f"content-type: application/json\r\ncontent-length: {len(payload)}\r\n\r\n"
    )
    return head.encode() + payload


def _slow_request(number: int) -> bytes:
    """Every second one ends soon: all of its answer is then unread."""
    max_tokens = _SOON if number % 2 else _LATE
    return _request({"prompt": f"Reader {number}", "max_tokens": max_tokens, "logprobs": 20})


@dataclass
class Ordinary:
    """Closed-loop clients that read all they get: how many answers a second, and how soon."""

    port: int
    took_s: list[float] = field(default_factory=list)
    num_failed: int = 0
    answers_a_second: float = 0.0

    async def run(self, seconds: float) -> None:
        ends_at = time.perf_counter() + seconds

        async def client(number: int) -> None:
            while (began_at := time.perf_counter()) < ends_at:
                body = _request({"prompt": f"Client {number}", "max_tokens": _TOKENS})
                if await self._ask(body):
                    self.took_s.append(time.perf_counter() - began_at)
                else:
                    self.num_failed += 1

        began_at = time.perf_counter()
        async with asyncio.TaskGroup() as tasks:
            for number in range(_CLIENTS):
                tasks.create_task(client(number))
        self.answers_a_second = len(self.took_s) / (time.perf_counter() - began_at)

    async def _ask(self, request: bytes) -> bool:
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        except OSError:
            return False
        answer = b""
        try:
            writer.write(request)
            answer = await reader.read(-1)
        except OSError:
            pass
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()
        return answer.startswith(b"HTTP/1.1 200 ") and b"data: [DONE]" in answer


@contextmanager
def slow_readers(port: int, number: int) -> Iterator[list[int]]:
    """They come one after the other; the block begins when all were there. In the list: how many
    could not connect, or were refused."""
    ours, theirs = Pipe()
    process = get_context("spawn").Process(target=_live, args=(port, number, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        yield [int(ours.recv())]
    finally:
        ours.close()
        process.join(10.0)
        process.kill()


def _live(port: int, number: int, pipe: Connection) -> None:
    os.nice(_NICE)
    raise_file_limit(number + 1000)
    sockets: set[socket.socket] = set()
    num_failed = 0
    began_at = last_at = time.monotonic()
    for count in range(number):
        try:
            sockets.add(_connect(port, _slow_request(count)))
        except OSError:
            num_failed += 1
        if time.monotonic() - last_at >= 1.0:
            last_at = time.monotonic()
            num_failed += _read_a_little(sockets)
        time.sleep(max(0.0, began_at + (count + 1) / _ARRIVALS_A_SECOND - time.monotonic()))
    pipe.send(num_failed)
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        while not selector.select(1.0):  # readable: the other end is closed
            _read_a_little(sockets)


def _connect(port: int, request: bytes) -> socket.socket:
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER)
    sock.settimeout(20.0)
    sock.connect(("127.0.0.1", port))
    sock.sendall(request)
    sock.setblocking(False)
    return sock


def _read_a_little(sockets: set[socket.socket]) -> int:
    """How many had an end."""
    num_ended = 0
    for sock in list(sockets):
        try:
            if sock.recv(BYTES_A_SECOND):
                continue
        except BlockingIOError:
            continue
        except OSError:
            pass
        sock.close()
        sockets.discard(sock)
        num_ended += 1
    return num_ended


# -- servers ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Rig:
    """What is measured: one engine, and perhaps the router before it."""

    port: int
    engine: Server
    router: Server | None

    @property
    def front(self) -> Server:
        return self.router or self.engine

    def num_files(self) -> int:
        return len(os.listdir(f"/proc/{self.front.process.pid}/fd"))

    def engine_metric(self, name: str) -> float:
        try:
            with urllib.request.urlopen(f"{self.engine.url}/metrics", timeout=10) as answer:
                text: str = answer.read().decode()
        except OSError:  # it is too busy to say: no bound holds
            return float("inf")
        return sum(
            float(line.rpartition(" ")[2])
            for line in text.splitlines()
            if line.startswith((f"{name}{{", f"{name} "))
        )


def serve(stack: ExitStack, place: Place, scale: Scale) -> Rig:
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    octavo = [sys.executable, "-m", "octavo.cli"]
    port = free_port()
    command = [*octavo, "serve", "demo://smollm2", *_SIM, "--port", str(port),
               "--write-timeout", str(scale.write_timeout_s), "--queue-timeout", "inf"]  # fmt: skip
    engine = stack.enter_context(
        Server.start(command, port=port, log=folder / "engine.log", ready="/ready")
    )
    if place == "alone":
        return Rig(port, engine, None)
    router_port, config = free_port(), folder / "router.yaml"
    settings = {
        "server": {"port": router_port},
        "discovery": {"upstreams": [{"url": engine.url}]},
        "timeouts": {"write_s": scale.write_timeout_s},
        # All of them are served in the end, as by the engine alone.
        "flow": {"max_in_flight": 2 * scale.num_readers, "queue_timeout_s": 600.0},
    }
    config.write_text(json.dumps(settings))  # which is YAML
    command = [*octavo, "router", "--config", str(config)]
    router = stack.enter_context(
        Server.start(command, port=router_port, log=folder / "router.log", ready="/ready")
    )
    return Rig(router_port, engine, router)


def _socket_bytes() -> int:
    """Of the kernel, for all TCP sockets of this machine."""
    for line in Path("/proc/net/sockstat").read_text().splitlines():
        if line.startswith("TCP:"):
            return int(line.split()[-1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


@dataclass(frozen=True, slots=True)
class Memory:
    """In bytes."""

    engine: int
    router: int
    sockets: int

    @classmethod
    def of(cls, rig: Rig) -> Memory:
        router = rig.router.memory().anonymous_bytes if rig.router is not None else 0
        return cls(rig.engine.memory().anonymous_bytes, router, _socket_bytes())


# -- the scenario ----------------------------------------------------------------------------------


def run(place: Place, scale: Scale) -> Verdict:
    raise_file_limit(4 * scale.num_readers + 2000)
    with ExitStack() as stack:
        rig = serve(stack, place, scale)
        asyncio.run(Ordinary(rig.port).run(1.0))
        quiet = Ordinary(rig.port)
        asyncio.run(quiet.run(scale.seconds))
        before = Memory.of(rig)
        with slow_readers(rig.port, scale.num_readers) as failed:
            all_there_at = time.monotonic()
            paused_s = _until(lambda: not rig.engine_metric(NUM_REQUESTS_RUNNING), _PAUSED_WITHIN_S)
            held = Memory.of(rig)
            num_there = rig.num_files()
            running = rig.engine_metric(NUM_REQUESTS_RUNNING)
            blocks = rig.engine_metric(KV_CACHE_USAGE_PERC)
            among = Ordinary(rig.port)
            asyncio.run(among.run(scale.seconds))
            patience_s = scale.write_timeout_s * 2 + 20.0
            _until(lambda: rig.num_files() <= _FEW_FILES, patience_s)
            cut_s = time.monotonic() - all_there_at
            num_left = max(0, rig.num_files() - _FEW_FILES)
            time.sleep(1.0)
            after = Memory.of(rig)
    seen = {
        "slow readers": scale.num_readers,
        "refused or not connected": failed[0],
        "connections when all were there": num_there,
        "all paused after, s": paused_s,
        "slots that they hold": running,
        "share of the KV cache that they hold": blocks,
        "others' answers a second, quiet": quiet.answers_a_second,
        "others' answers a second, of quiet": among.answers_a_second / quiet.answers_a_second,
        "others' p99, ms, quiet": 1e3 * percentile(quiet.took_s, 99),
        "others' p99, times quiet": percentile(among.took_s or [1e9], 99)
        / percentile(quiet.took_s, 99),
        "others that failed": quiet.num_failed + among.num_failed,
        "engine's memory for each, KiB": (held.engine - before.engine) / 1024 / scale.num_readers,
        "router's memory for each, KiB": (held.router - before.router) / 1024 / scale.num_readers,
        "sockets' memory for each, KiB": (held.sockets - before.sockets) / 1024 / scale.num_readers,
        "not disconnected after the stated time": num_left,
        "last one disconnected, times the stated time": cut_s / scale.write_timeout_s,
        "engine's memory afterwards, of before": after.engine / before.engine,
        "router's memory afterwards, of before": after.router / max(before.router, 1),
        "sockets' memory afterwards, MiB": (after.sockets - before.sockets) / 2**20,
    }
    name = "slow readers, " + ("engine alone" if place == "alone" else "through the router")
    verdict = Verdict(name, seen)
    judge("slow readers", verdict)
    return verdict


def _until(fact: Callable[[], bool], seconds: float) -> float:
    """The seconds that it took to come true, or that were waited."""
    began_at = time.monotonic()
    while not fact() and time.monotonic() - began_at < seconds:
        time.sleep(_LOOK_S)
    return time.monotonic() - began_at


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("places", nargs="*", choices=[*PLACES, []], metavar="alone|router")
    parser.add_argument("--quick", action="store_true", help="fewer readers, seconds each")
    parser.add_argument("--json", metavar="FILE", help="write what was seen there as well")
    args = parser.parse_args(arguments)
    verdicts = []
    for place in args.places or PLACES:
        verdicts.append(run(place, QUICK if args.quick else FULL))
        verdicts[-1].show()
    if args.json:
        Path(args.json).write_text(json.dumps([asdict(one) for one in verdicts], indent=2) + "\n")
    return 1 if any(verdict.complaints for verdict in verdicts) else 0


if __name__ == "__main__":
    sys.exit(main())
