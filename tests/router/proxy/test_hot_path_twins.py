"""The compiled hot path and Python's leave the same behind: every byte, number and time."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING, Any

import pytest

from octavo_engine.protocol.stream import Load
from octavo_router.config.settings import RouterConfig
from octavo_router.proxy import exchange
from octavo_router.residency import native
from tests.fakes.clock import ManualClock
from tests.fakes.http_client import post_bytes
from tests.fakes.router_rig import on_loop
from tests.fakes.socketless_router import SocketlessRouter

if TYPE_CHECKING:
    from collections.abc import Callable

    from octavo_router.endpoints.endpoint import Kind

ANSWER = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"
NUM_CLIENTS = 24
NUM_STEPS = 900
KINDS: tuple[Kind, ...] = ("openai", "octavo", "openai", "octavo")
HEADS = (
    "",
    "authorization: Bearer secret\r\n",
    "x-request-id: mine\r\ntraceparent: 00-1-2-01\r\n",
    "x-llm-d-inference-fairness-id: somebody\r\n",
    "x-octavo-explain: 1\r\n",
    "connection: close\r\n",
)


@pytest.fixture
def connections() -> None:
    """None are real here: see `SocketlessRouter`."""


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> ManualClock:
    clock = ManualClock()
    monkeypatch.setattr(time, "monotonic", clock)
    monkeypatch.setattr(exchange, "_SUSPECT_S", 0.0)  # pauses go by another clock
    monkeypatch.setattr(exchange, "_GONE_ON_S", 0.0)
    monkeypatch.setattr(exchange, "_HELD_S", 1000.0)
    return clock


def difference(fast: object, slow: object) -> object:
    """The first thing that differs, for a message that can be read."""
    if isinstance(fast, list) and isinstance(slow, list) and len(fast) == len(slow):
        return next(
            (number, difference(one, other))
            for number, (one, other) in enumerate(zip(fast, slow, strict=True))
            if one != other
        )
    if isinstance(fast, dict) and isinstance(slow, dict) and fast.keys() == slow.keys():
        return next(
            (key, difference(fast[key], slow[key])) for key in slow if fast[key] != slow[key]
        )
    return fast, slow


class Twins:
    """Two routers to which the same happens; one of them is all Python."""

    def __init__(self, clock: ManualClock) -> None:
        self.clock = clock
        config = RouterConfig()
        config = replace(
            config,
            routing=replace(config.routing, sample_every=16, balance_slack=3),
            retry=replace(config.retry, max_attempts=2),
        )
        fast = native.load()
        # Only the words in which a bad body is refused are the reader's own.
        slow = replace(native.in_python("it is the truth"), scan=fast.scan)
        self.fast, self.slow = (
            SocketlessRouter(path, clock, kinds=KINDS, num_clients=NUM_CLIENTS, config=config)
            for path in (fast, slow)
        )
        assert fast.is_native
        assert not slow.is_native

    async def both(self, act: Callable[[SocketlessRouter], object]) -> None:
        for router in (self.fast, self.slow):
            act(router)
            for _ in range(3):
                await asyncio.sleep(0)
        fast, slow = self.fast.state(), self.slow.state()
        for name in slow:
            assert fast[name] == slow[name], (name, difference(fast[name], slow[name]))


def chat(random: Random) -> bytes:
    system = f"system {random.randrange(6)} " * random.choice((1, 40, 120))
    body: dict[str, Any] = {
        "model": "m" if random.random() < 0.97 else "who",
        "messages": [
            {"role": "system", "content": system},
            {"role": "user", "content": f"question {random.randrange(50):02}"},
        ],
    }
    if random.random() < 0.3:
        body["stream"] = True
        if random.random() < 0.5:
            body["stream_options"] = {"include_usage": True}
    return json.dumps(body).encode() if random.random() < 0.98 else b'{"model": }'


def request(random: Random) -> bytes:
    body = chat(random)
    head = random.choice(HEADS) if random.random() < 0.4 else ""
    return (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n{head}"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    ).encode() + body


def stream(random: Random) -> list[bytes]:
    """Events, with or without the tokens in them; sometimes in one piece, or without an end."""
    begin = b': octavo begin {"id": "c-1", "created": 1, "seed": 7, "answers": 1, "stops": []}\n'
    count, tells = random.randrange(1, 5), random.random() < 0.5
    events = []
    for number in range(count):
        finish = '"stop"' if number == count - 1 else "null"
        delta = f'{{"index": 0, "delta": {{"content": "w{number}"}}, "finish_reason": {finish}}}'
        line = (begin if number == 0 else b"") + b": octavo 0 %d\n" % number if tells else b""
        events.append(line + f'data: {{"choices": [{delta}]}}\n\n'.encode())
    if random.random() < 0.5:
        usage = b'{"prompt_tokens": 9, "completion_tokens": %d}' % count
        events.append(b'data: {"choices": [], "usage": %b}\n\n' % usage)
    if random.random() < 0.9:
        events.append(b"data: [DONE]\n\n")
    head = (
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    )
    pieces = [head, *(b"%x\r\n%b\r\n" % (len(event), event) for event in events), b"0\r\n\r\n"]
    return [b"".join(pieces)] if random.random() < 0.3 else pieces


def answer(random: Random) -> list[bytes]:
    """What an engine says, as it arrives."""
    if random.random() < 0.2:
        return stream(random)
    prompt, output = random.randrange(1, 900), random.randrange(9)
    usage = {"prompt_tokens": prompt, "completion_tokens": output}
    if random.random() < 0.3:
        usage |= {"prompt_tokens_details": {"cached_tokens": random.randrange(prompt)}}  # type: ignore[dict-item]  # as engines say it
    text = "word " * (30_000 if random.random() < 0.05 else 3)
    body = json.dumps({"choices": [text], **({"usage": usage} if random.random() < 0.9 else {})})
    status = random.choices(("200 OK", "500 Broken", "400 Bad"), (30, 1, 1))[0]
    kind = "text/html" if random.random() < 0.02 else "application/json"
    close = "connection: close\r\n" if random.random() < 0.05 else ""
    head = f"HTTP/1.1 {status}\r\ncontent-type: {kind}\r\nx-engine: 1\r\n{close}"
    if random.random() < 0.1:
        chunks = f"{len(body):x}\r\n{body}\r\n0\r\n\r\n"
        return [f"{head}transfer-encoding: chunked\r\n\r\n".encode(), chunks.encode()]
    whole = f"{head}content-length: {len(body)}\r\n\r\n{body}".encode()
    at = random.randrange(1, len(whole)) if random.random() < 0.15 else len(whole)
    return [piece for piece in (whole[:at], whole[at:]) if piece]


class Life:
    """A random one: clients come, ask, leave; engines answer, err, die, tell their load."""

    def __init__(self, twins: Twins, seed: int) -> None:
        self.twins = twins
        self.random = Random(seed)
        self.said: dict[int, bytes] = {}  # by client: its last request

    async def live(self) -> None:
        acts = (self.ask, self.answer, self.lose, self.leave, self.tell, self.tick)
        for _ in range(NUM_STEPS):
            self.twins.clock.advance(self.random.random() * 0.02)
            [act] = self.random.choices(acts, (52, 40, 2, 2, 4, 2))
            await act()

    async def ask(self) -> None:
        clients = enumerate(self.twins.slow.clients)
        idle = [number for number, client in clients if client.owner is None]
        if not idle:
            return
        number, data = self.random.choice(idle), request(self.random)
        if self.random.random() < 0.4:
            data = self.said.get(number, data)  # a client mostly repeats its own head
        self.said[number] = data
        if self.twins.slow.client_wires[number].is_cut:
            await self.twins.both(lambda router: router.renew_client(number))
        await self.twins.both(lambda router: router.clients[number].data_received(data))

    async def answer(self) -> None:
        count = len(self.twins.slow.busy)
        if not count:
            return
        at = self.random.randrange(count)
        fast, slow = self.twins.fast.busy[at], self.twins.slow.busy[at]
        for piece in answer(self.random):
            if slow.user is not None:
                await self.twins.both(
                    lambda router, piece=piece: (  # type: ignore[misc]  # a default is no type
                        fast if router is self.twins.fast else slow
                    ).data_received(piece)
                )

    async def lose(self) -> None:
        """An engine closes a connection."""
        if count := len(self.twins.slow.busy):
            at = self.random.randrange(count)
            await self.twins.both(lambda router: router.wire_of(router.busy[at]).cut())

    async def leave(self) -> None:
        number = self.random.randrange(NUM_CLIENTS)
        await self.twins.both(lambda router: router.client_wires[number].cut())

    async def tell(self) -> None:
        id_ = self.random.choice(list(self.twins.slow.registry.endpoints))
        load = Load(
            running=self.random.randrange(40),
            waiting=self.random.randrange(3),
            queued_tokens=self.random.randrange(2000),
            kv_usage=self.random.random(),
            prefill_tokens_per_s=self.random.choice((0.0, 500.0, 4000.0)),
            is_saturated=self.random.random() < 0.1,
        )

        def act(router: SocketlessRouter) -> None:
            endpoint = router.registry.endpoints[id_]
            endpoint.load, endpoint.load_at = load, self.twins.clock.now

        await self.twins.both(act)

    async def tick(self) -> None:
        clock = self.twins.clock
        clock.advance(self.random.choice((0.3, 1.0, 11.0)))
        await self.twins.both(lambda router: router.dispatcher.tick())
        await self.twins.both(lambda router: router.check_deadlines(clock.now))
        await self.twins.both(lambda router: router.throttle.tick())


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_both_hot_paths_leave_the_same_behind(clock: ManualClock, seed: int):
    @on_loop
    async def run() -> None:
        twins = Twins(clock)
        await Life(twins, seed).live()
        endings = Counter((one.is_stream, one.outcome) for one in twins.fast.records)
        assert endings[True, "ok"] > 20 and endings[False, "ok"] > 60

    run()


@pytest.mark.parametrize("side", ["engine", "client"])
def test_a_mistake_of_ours_costs_one_request_and_holds_nothing(
    clock: ManualClock, caplog: pytest.LogCaptureFixture, side: str
):
    @on_loop
    async def run() -> None:
        twins = Twins(clock)

        async def ask_of(number: int) -> None:
            body = b'{"model":"m","messages":[{"role":"user","content":"hello"}]}'
            data = post_bytes(body)
            await twins.both(lambda router: router.clients[number].data_received(data))

        async def answer_all() -> None:
            while twins.slow.busy:
                await twins.both(lambda router: router.busy[0].data_received(ANSWER))

        def break_wires(router: SocketlessRouter) -> None:
            wires = [w for _, w in router.wires] if side == "engine" else router.client_wires
            for wire in wires:
                wire.is_broken = True

        for number in range(12):
            await ask_of(number)
            await answer_all()
        if side == "engine":
            await twins.both(break_wires)
            await ask_of(0)
        else:
            await ask_of(0)
            await twins.both(break_wires)
            await answer_all()
        assert not twins.fast.proxy.exchanges
        assert twins.fast.client_wires[0].is_cut

    run()
    assert [r.message for r in caplog.records] == ["Unhandled error in request"] * 2
