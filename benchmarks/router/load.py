"""Who takes part when many come at once: engines with seats, slow clients, and steady load."""

from __future__ import annotations

import asyncio
import random
import resource
import socket
import time
from collections import Counter, deque
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final, cast

from benchmarks.router.traffic import MIXES, MODELS, NUM_REQUESTS, Answers, request_bytes
from octavo.bench.report import percentile

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine

LARGE_TOKENS: Final = 65536  # asks for an answer that a slow reader does not take
_LARGE: Final = b'{"text":"' + b"x" * (256 * 1024) + b'"}'
_FULL: Final = b'{"error":{"message":"full","type":"overloaded","code":"full"}}'
_CHAT: Final = "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n"
_DRIP_S: Final = 1.0  # between two bytes of a slow head
_NUM_DRIPS: Final = 50  # they come in so many groups a second
_CONNECTING: Final = 200  # at once
_BIND_ADDRESS_NO_PORT: Final = 24  # of Linux: the port is chosen when it connects


def raise_file_limit(wanted: int) -> int:
    """For this process and its children; as many as can be had."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < wanted:
        for limit in ((wanted, max(wanted, hard)), (min(wanted, hard), hard)):
            try:
                resource.setrlimit(resource.RLIMIT_NOFILE, limit)
                break
            except (OSError, ValueError):  # above the hard one: for the superuser only
                continue
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


class Engine:
    """A plain server: works on some requests at once, lets some wait, refuses more with a 503."""

    def __init__(
        self, *, seats: int = 1_000_000, num_waiting: int = 0, work_s: float = 0.0
    ) -> None:
        self.answers = Answers(MIXES["whole"])
        self.is_refusing = False
        self.num_requests = 0
        self.num_done = 0
        self.num_refused = 0
        self._seats = seats
        self._num_waiting = num_waiting
        self._work_s = work_s
        self._running = 0
        self._waiting: deque[Callable[[], None]] = deque()

    def take(self, done: Callable[[], None]) -> bool:
        """Calls `done` after the work; False: it has no room."""
        self.num_requests += 1
        if self.is_refusing or len(self._waiting) >= self._num_waiting + self._free:
            self.num_refused += 1
            return False
        self._waiting.append(done)
        self._go_on()
        return True

    @property
    def _free(self) -> int:
        return self._seats - self._running

    def _go_on(self) -> None:
        while self._waiting and self._free > 0:
            self._running += 1
            asyncio.get_running_loop().call_later(
                self._work_s, self._finish, self._waiting.popleft()
            )

    def _finish(self, done: Callable[[], None]) -> None:
        self._running -= 1
        self.num_done += 1
        done()
        self._go_on()

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        """Its URL."""
        loop = asyncio.get_running_loop()
        server = await loop.create_server(
            lambda: _EngineConnection(self), "127.0.0.1", 0, backlog=4096
        )
        try:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            server.close()


class _EngineConnection(asyncio.Protocol):
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._received += data
        while (cut := _cut(self._received)) is not None:
            head, body, self._received = cut
            self._take(head, body)

    def _take(self, head: bytes, body: bytes) -> None:
        engine = self._engine
        if not head.startswith(b"POST"):
            is_known = head.startswith(b"GET /v1/models ")
            self._answer(200 if is_known else 404, MODELS if is_known else b"{}")
            return
        if b'"max_tokens":%d' % LARGE_TOKENS in body:
            answer = partial(self._answer, 200, _LARGE)
        else:
            answer = partial(self._transport.write, engine.answers.whole())
        if not engine.take(answer):
            self._answer(503, _FULL)

    def _answer(self, status: int, body: bytes) -> None:
        head = (
            f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\n"
            f"{'retry-after: 1' if status == 503 else 'x-engine: plain'}\r\n"
            f"content-length: {len(body)}\r\n\r\n"
        )
        self._transport.write(head.encode() + body)


def _cut(data: bytes) -> tuple[bytes, bytes, bytes] | None:
    """The first message's head and body, and the rest; None where it is not all there."""
    head, separator, rest = data.partition(b"\r\n\r\n")
    if not separator:
        return None
    at = head.lower().find(b"content-length:")
    length = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
    return (head, rest[:length], rest[length:]) if len(rest) >= length else None


# -- clients that are slow


class Crowd:
    """Slow clients of three kinds, as many as were requested: who is sent away comes back.

    idle: has sent one request, and keeps its connection. head: sends a byte of its head a second.
    reader: has requested a large answer, and does not take it.
    """

    def __init__(self, port: int, source: str = "127.0.0.1") -> None:
        self._port = port
        self._source = source
        self._tasks: set[asyncio.Task[None]] = set()
        self._places = asyncio.Semaphore(_CONNECTING)
        self._is_over = False
        self.open: dict[str, set[SlowClient]] = {"idle": set(), "head": set(), "reader": set()}
        self.num_ended: Counter[str] = Counter()  # by the router
        self.num_failed = 0  # connections that were not accepted

    async def gather(self, **numbers: int) -> None:
        await asyncio.gather(
            *(self._open(kind) for kind, number in numbers.items() for _ in range(number))
        )
        self._keep(self._drip())

    @property
    def num_open(self) -> dict[str, int]:
        """Who is there now, by kind."""
        return {kind: len(clients) for kind, clients in self.open.items()}

    async def leave(self) -> None:
        self._is_over = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for clients in self.open.values():
            for client in list(clients):
                client.transport.abort()

    def ended(self, client: SlowClient) -> None:
        self.open[client.kind].discard(client)
        if not self._is_over:
            self.num_ended[client.kind] += 1
            self._keep(self._open(client.kind))

    async def _open(self, kind: str) -> None:
        sock = socket.socket()
        sock.setblocking(False)
        if kind == "reader":
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        loop = asyncio.get_running_loop()
        try:
            sock.setsockopt(socket.IPPROTO_IP, _BIND_ADDRESS_NO_PORT, 1)
            sock.bind((self._source, 0))
            async with self._places:
                await loop.sock_connect(sock, ("127.0.0.1", self._port))
                await loop.create_connection(lambda: SlowClient(self, kind), sock=sock)
        except OSError:
            self.num_failed += 1
            sock.close()

    async def _drip(self) -> None:
        while True:
            clients = list(self.open["head"])
            for group in range(_NUM_DRIPS):
                await asyncio.sleep(_DRIP_S / _NUM_DRIPS)
                for client in clients[group::_NUM_DRIPS]:
                    if not client.transport.is_closing():
                        client.transport.write(b"x")

    def _keep(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class SlowClient(asyncio.Protocol):
    """One of a crowd."""

    def __init__(self, crowd: Crowd, kind: str) -> None:
        self._crowd = crowd
        self.kind = kind

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self._crowd.open[self.kind].add(self)
        if self.kind == "idle":
            self.transport.write(request_bytes(0, 0))
        elif self.kind == "head":
            self.transport.write(f"{_CHAT}X-Slow: ".encode())
        else:
            self.transport.pause_reading()
            body = f'{{"model":"m","messages":[],"max_tokens":{LARGE_TOKENS}}}'
            self.transport.write(f"{_CHAT}Content-Length: {len(body)}\r\n\r\n{body}".encode())

    def connection_lost(self, exc: Exception | None) -> None:
        self._crowd.ended(self)


# -- requests at a rate


@dataclass(slots=True)
class Ending:
    """How one request ended."""

    at_s: float  # when it was sent, since the load began
    took_s: float
    status: int
    says_when: bool  # to come again


@dataclass
class Load:
    """Requests that come when they come, whether or not the ones before are answered."""

    port: int
    rate: float
    seed: int = 0
    endings: list[Ending] = field(default_factory=list)
    num_sent: int = 0
    num_lost: int = 0  # without any answer

    def percentile_ms(self, percent: float) -> float:
        return percentile([one.took_s * 1e3 for one in self.endings] or [0.0], percent)

    async def run(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        rng = random.Random(self.seed)
        idle: list[_Caller] = []
        tasks: set[asyncio.Task[None]] = set()
        began_at, due = loop.time(), 0.0
        while (due := due + rng.expovariate(self.rate)) < seconds:
            await asyncio.sleep(max(0.0, began_at + due - loop.time()))
            request = request_bytes(rng.randrange(NUM_REQUESTS), self.num_sent)
            self.num_sent += 1
            task = asyncio.create_task(self._ask(idle, request, began_at))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        await asyncio.gather(*tasks)
        for caller in idle:
            caller.transport.abort()

    async def _ask(self, idle: list[_Caller], request: bytes, began_at: float) -> None:
        loop = asyncio.get_running_loop()
        sent_at, began = loop.time(), time.perf_counter()  # the loop counts milliseconds
        try:
            while idle and idle[-1].transport.is_closing():
                idle.pop()  # the router need not keep it
            if idle:
                caller = idle.pop()
            else:
                _, caller = await loop.create_connection(_Caller, "127.0.0.1", self.port)
            head = await caller.ask(request)
        except OSError:
            self.num_lost += 1
            return
        idle.append(caller)
        self.endings.append(
            Ending(
                sent_at - began_at, time.perf_counter() - began, int(head.split(b" ", 2)[1]),
                b"\r\nretry-after:" in head.lower(),
            )
        )  # fmt: skip


class _Caller(asyncio.Protocol):
    """A kept connection, one request at a time."""

    def __init__(self) -> None:
        self._received = b""
        self._answer: asyncio.Future[bytes] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    async def ask(self, request: bytes) -> bytes:
        """The answer's head."""
        self._answer = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        return await self._answer

    def data_received(self, data: bytes) -> None:
        self._received += data
        cut = _cut(self._received)
        if cut is not None and self._answer is not None:
            head, _, self._received = cut
            self._answer.set_result(head)
            self._answer = None

    def connection_lost(self, exc: Exception | None) -> None:
        if self._answer is not None:
            self._answer.set_exception(exc or ConnectionResetError("it ended without an answer"))
