"""Whatever goes wrong on either side, at whatever byte, everything is given back, files included.

A random life over real sockets: engines answer, err, stall, close or reset after any number of
bytes; clients leave, by either kind of end, within what they ask or within what they are told. When
nobody has anything more to say and time has passed, all is as it was at the beginning.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter
from random import Random
from typing import TYPE_CHECKING, Any, cast

import pytest

from octavo_engine.protocol.endpoints import RESUME_HEADER, STREAM_HEADER
from octavo_engine.protocol.resume import begin_line, token_line
from octavo_router.flow.quarantine import DeathWatch
from tests.fakes.http_client import RawClient, chat, post_bytes
from tests.fakes.router_rig import Rig, fast_config, on_loop, routing_to
from tests.fakes.upstream import CHAT, Peer, Received, ScriptedUpstream, fixed

if TYPE_CHECKING:
    from octavo_router.endpoints.endpoint import Kind
    from octavo_router.routing.dispatcher import Dispatcher

pytestmark = pytest.mark.slow

NUM_ENGINES = 3
NUM_ROUNDS = 6
NUM_CLIENTS = 14  # in a round, at once
LONG_S = 700.0  # beyond every limit
QUIET_TURNS = 10
CONFIG = fast_config(
    limits={"write_buffer_bytes": 16384},
    timeouts={"connect_s": 5.0},
    retry={"quarantine_s": 0.0},  # all that is asked here, engines die of
)
CLOSES = "connection: close\r\n"
BEGIN = begin_line(id="c-1", created=1, seed=7, answers=1, prompt_tokens=4, cached=0)


def whole(body: bytes, status: str = "200 OK", more: str = "") -> bytes:
    head = f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\n{more}"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


def chunked(content_type: str, pieces: list[bytes]) -> bytes:
    head = f"HTTP/1.1 200 OK\r\ncontent-type: {content_type}\r\ntransfer-encoding: chunked\r\n\r\n"
    chunks = (b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
    return head.encode() + b"".join(chunks) + b"0\r\n\r\n"


def stream(random: Random, *, tells_tokens: bool) -> bytes:
    """Words, of which some are long; with the tokens in between where the router asked for them."""
    count = random.randrange(1, 6)
    pieces = []
    for number in range(count):
        finish = '"stop"' if number == count - 1 else "null"
        text = "w" * random.choice((1, 1, 9000))
        delta = f'{{"index": 0, "delta": {{"content": "{text}"}}, "finish_reason": {finish}}}'
        line = (b"" if number else BEGIN) + token_line(0, [number]) if tells_tokens else b""
        pieces.append(line + f'data: {{"choices": [{delta}]}}\n\n'.encode())
    return chunked("text/event-stream", [*pieces, b"data: [DONE]\n\n"])


class Engines:
    """What any of them does with a request."""

    def __init__(self, random: Random) -> None:
        self.num_stalling = 0
        self.is_well = False  # from now on they behave
        self._random = random

    def answer(self, request: Received) -> bytes:
        random = self._random
        goes_on = request.header(RESUME_HEADER) is not None  # of a stream that another has begun
        if goes_on or request.json.get("stream"):
            return stream(random, tells_tokens=request.header(STREAM_HEADER) is not None)
        large = {**CHAT, "filler": "x" * random.choice((0, 0, 300_000, 1_500_000))}
        answers = (
            whole(json.dumps(CHAT).encode()),
            whole(json.dumps(large).encode()),
            chunked("application/json", [json.dumps(CHAT).encode()]),
            whole(json.dumps(CHAT).encode(), more="connection: close\r\n"),
            whole(b'{"error":{"code":"full"}}', "503 Full", "retry-after: 1\r\n"),
            whole(b'{"error":{"code":"no"}}', "400 Bad"),
            whole(b'{"error":{"code":"broken"}}', "500 Broken"),
            b"HTTP/1.1 200 OK\r\nnonsense\r\n\r\n",
        )
        return random.choices(answers, (8, 4, 3, 2, 2, 1, 1, 1))[0]

    async def serve(self, peer: Peer, request: Received) -> None:
        random = self._random
        if self.is_well:
            await fixed(peer, request)
            return
        data = self.answer(request)
        how = random.choice(("well", "well", "close", "reset", "stall"))
        if how == "well":
            cut = random.randrange(len(data))
            for piece in (data[:cut], data[cut:]):
                if piece:
                    await peer.send(piece)
                    await asyncio.sleep(0)
            return
        cut = random.choice((0, random.randrange(300), random.randrange(len(data))))
        # Who has said all and reads no more would hold up whoever is sent there next.
        await peer.send(data[: min(cut, len(data) - 1)])
        if how == "close":
            peer.close()
        elif how == "reset":
            peer.reset()
        else:
            self.num_stalling += 1
            try:
                await peer.left()
            finally:
                self.num_stalling -= 1


class Client:
    """Asks once or several times, and ends its connection in one of many ways."""

    def __init__(self, random: Random, port: int) -> None:
        self._random = random
        self._port = port
        self.statuses: list[int] = []

    async def live(self) -> None:
        random = self._random
        small = random.random() < 0.3
        client = await RawClient.open(self._port, receive_buffer=4096 if small else 0)
        act = random.choice(
            (self.stay, self.stay, self.leave_asking, self.leave_reading, self.half)
        )
        try:
            await act(client)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the answer was cut; the router may show it no other way
        finally:
            if random.random() < 0.5:
                client.reset()
            client.writer.close()

    def ask(self) -> bytes:
        random = self._random
        text = f"{'system ' * random.choice((1, 60))}{random.randrange(40)}"
        more = random.choice(("", "", "", "x-octavo-explain: 1\r\n", "idempotency-key: "))
        if more.endswith(": "):
            more += f"{random.randrange(2**40)}\r\n"
        return post_bytes(chat(text, stream=random.random() < 0.4), more=more)

    async def stay(self, client: RawClient) -> None:
        count = self._random.choice((1, 1, 3))
        await client.send(b"".join(self.ask() for _ in range(count)))
        await self._read(client, count)

    async def half(self, client: RawClient) -> None:
        await client.send(self.ask())
        client.half_close()
        await self._read(client, 1)

    async def leave_asking(self, client: RawClient) -> None:
        data = self.ask()
        await client.send(data[: self._random.randrange(len(data) + 1)])

    async def leave_reading(self, client: RawClient) -> None:
        await client.send(self.ask())
        await client.reader.readexactly(self._random.choice((1, 100, 20_000, 200_000)))

    async def _read(self, client: RawClient, count: int) -> None:
        client.reader._limit = 2**24  # type: ignore[attr-defined]  # events may be long
        for _ in range(count):
            answer = await client.answer()
            self.statuses.append(answer.status)


def num_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def what_is_left(rig: Rig) -> dict[str, Any]:
    """Of anything that a request holds while it lives; empty where nothing is."""
    pools = [rig.upstreams.of(endpoint).pool for endpoint in rig.endpoints]
    dispatcher = cast("Dispatcher", rig.proxy.dispatcher)
    left = {
        "exchanges": len(rig.proxy.exchanges),
        "clients": len(rig.shared.connections),
        "watched": len(rig.deadlines) - len(pools),
        "connections in use": [pool.num_open - pool.num_idle for pool in pools],
        "connections on their way": [pool.num_connecting for pool in pools],
        "reserved": [
            number
            for one in rig.endpoints
            for number in (one.in_flight, one.pending_tokens, one.own_tokens, one.recent_tokens)
        ],
        "prompts being computed": dispatcher.underway.num_computing,
        "tenants": [one.in_flight for one in rig.gate.tenants._anonymous.values()],
        "in line": len(rig.gate._queues) + len(rig.gate._called),
        "budget": [rig.proxy.budget.num_active, rig.proxy.budget.num_repeating],
        "unproven": [
            known.copies.total() if isinstance(known, DeathWatch) else known is not True
            for known in rig.proxy.quarantine.watched.values()
        ],
        "under a key": len(rig.proxy._idempotency._running),
    }
    return {
        name: found
        for name, found in left.items()
        if (any(found) if isinstance(found, list) else found)
    }


async def pass_time(rig: Rig, engines: Engines, tasks: list[asyncio.Task[None]]) -> None:
    """Until all clients are done. When for some turns nobody has anything to say, time passes."""
    num_quiet = 0
    while not all(task.done() for task in tasks):
        is_quiet = len(rig.proxy.exchanges) <= engines.num_stalling
        num_quiet = num_quiet + 1 if is_quiet else 0
        if num_quiet == QUIET_TURNS:
            num_quiet = 0
            rig.later(LONG_S)
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("kind", ["openai", "octavo"])
@pytest.mark.parametrize("seed", range(3))
def test_everything_is_given_back(seed: int, kind: Kind, caplog: pytest.LogCaptureFixture):
    random = Random(f"{seed} {kind}")
    statuses: list[int] = []

    @on_loop
    async def run() -> None:
        engines = Engines(random)
        async with (
            ScriptedUpstream(engines.serve) as a,
            ScriptedUpstream(engines.serve) as b,
            ScriptedUpstream(engines.serve) as c,
            routing_to(a.port, b.port, c.port, config=CONFIG, kind=kind) as rig,
        ):
            for pool in (rig.upstreams.of(one).pool for one in rig.endpoints):
                pool._close_idle()
            await rig.until(lambda: rig.upstreams.num_connections == 0)
            await rig.until(lambda: a.num_open + b.num_open + c.num_open == 0)
            await asyncio.sleep(0)
            files = num_files()
            for _ in range(NUM_ROUNDS):
                engines.is_well = False
                clients = [Client(random, rig.port) for _ in range(NUM_CLIENTS)]
                tasks = [asyncio.create_task(client.live()) for client in clients]
                await pass_time(rig, engines, tasks)
                await asyncio.gather(*tasks)
                await rig.until(lambda: not what_is_left(rig))
                for client in clients:
                    statuses.extend(client.statuses)

                engines.is_well = True
                async with await RawClient.open(rig.port) as next_one:
                    answer = await next_one.ask(chat())
                    assert (answer.status, answer.json) == (200, CHAT)
                rig.later(LONG_S)  # what is idle ends
                await rig.until(lambda: num_files() == files)
                assert rig.upstreams.num_connections == 0

    run()
    assert {200, 502, 504} <= set(statuses) <= {200, 400, 500, 502, 503, 504}
    ours = [one.getMessage() for one in caplog.records if one.levelname in ("ERROR", "CRITICAL")]
    assert not ours


async def watched(port: int, request: bytes) -> tuple[int, bool]:
    """What a client that stays sees of its request: the status, and whether all of a good answer
    came."""
    client = await RawClient.open(port)
    await client.send(request)
    head = await client.head()
    body = await client.ended()
    client.writer.close()
    length = head.header("content-length")
    if length is None:
        is_whole = body.endswith(b"0\r\n\r\n") and b'"error"' not in body
    else:
        is_whole = len(body) == int(length)
    return head.status, head.status == 200 and is_whole


@pytest.mark.parametrize("kind", ["openai", "octavo"])
def test_metrics_count_what_clients_saw(kind: Kind):
    """By status, and by whether it was a success: nothing is counted as better than it was."""
    random = Random(kind)
    seen: list[tuple[int, bool]] = []

    @on_loop
    async def run() -> None:
        engines = Engines(random)
        async with (
            ScriptedUpstream(engines.serve) as a,
            ScriptedUpstream(engines.serve) as b,
            routing_to(a.port, b.port, config=CONFIG, kind=kind) as rig,
        ):
            for _ in range(NUM_ROUNDS):
                requests = [
                    post_bytes(chat(str(number), stream=number % 2 == 0), more=CLOSES)
                    for number in range(NUM_CLIENTS)
                ]

                async def live(request: bytes) -> None:
                    seen.append(await watched(rig.port, request))

                tasks = [asyncio.create_task(live(request)) for request in requests]
                await pass_time(rig, engines, tasks)
                await asyncio.gather(*tasks)
            await rig.until(lambda: not what_is_left(rig))
            counted: Counter[str] = Counter()
            for (_, _, code, _, outcome), count in rig.metrics.requests.items():
                counted[code] += count
                counted[outcome] += count
            assert counted.pop("ok") == sum(is_good for _, is_good in seen)
            for outcome in ("failed", "rejected", "gone"):
                counted.pop(outcome, None)
            assert counted == Counter(str(status) for status, _ in seen)

    run()
    assert {status for status, _ in seen} >= {200, 502}
    assert (200, False) in seen  # a stream that failed after its status was sent
