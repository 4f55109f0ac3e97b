"""More than the engines can do: what they can do is done, and the rest is refused at once."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import dataclass, field

import pytest

from octavo_router.flow.keys import KeyTable
from tests.fakes.http_client import Answer, RawClient, chat
from tests.fakes.router_rig import Rig, fast_config, on_loop, routing_to
from tests.fakes.upstream import Peer, Received, ScriptedUpstream, fixed

WORK_S = 0.01
ROOM = 4  # requests at once at an engine


@dataclass
class Worker:
    """Takes its time over each request, and does not take more than it has room for."""

    running: int = 0
    most: int = 0
    num_done: int = 0

    async def __call__(self, peer: Peer, request: Received) -> None:
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(WORK_S)
        self.running -= 1
        self.num_done += 1
        await fixed(peer, request)


@dataclass
class Ledger:
    """Every request that a client made, and how it ended."""

    statuses: list[int] = field(default_factory=list)
    refused_in_s: list[float] = field(default_factory=list)

    def note(self, answer: Answer, took_s: float) -> None:
        self.statuses.append(answer.status)
        if answer.status != 200:
            assert answer.status in (429, 503), answer
            assert int(answer.header("retry-after") or 0) >= 1
            assert answer.header("x-error-code") == answer.code
            self.refused_in_s.append(took_s)


async def insist(rig: Rig, ledger: Ledger, count: int, *, num_tries: int = 1) -> None:
    """One client: a request after the other, tried again at once where it is refused."""
    async with await RawClient.open(rig.port) as client:
        for _ in range(count):
            for _ in range(num_tries):
                began_at = time.monotonic()
                answer = await client.ask(chat())
                ledger.note(answer, time.monotonic() - began_at)
                if answer.status == 200:
                    break
                await asyncio.sleep(0)


@pytest.mark.slow
@pytest.mark.parametrize("times", [2, 5, 20])
def test_goodput_is_that_of_the_engines_and_the_rest_hears_it_at_once(times):
    """More clients than there is room, by this factor."""

    @on_loop
    async def run() -> None:
        worker = Worker()
        config = fast_config(
            flow={"max_in_flight": ROOM, "max_queue": 8}, retry={"throttle_factor": 1000.0}
        )
        async with (
            ScriptedUpstream(worker) as upstream,
            routing_to(upstream.port, config=config) as rig,
        ):
            ledger = Ledger()
            clients = ROOM * times
            async with asyncio.TaskGroup() as tasks:
                for _ in range(clients):
                    tasks.create_task(insist(rig, ledger, 10))
            await rig.settled()
            assert len(ledger.statuses) == clients * 10  # each has an answer
            assert worker.most <= ROOM + 1  # and one whose turn came meanwhile
            assert worker.num_done == len(upstream.requests) == ledger.statuses.count(200)
            # All that fits in the engines and the queue is served at every moment.
            assert ledger.statuses.count(200) >= min(clients, ROOM + 8)
            if times > 3:
                assert ledger.refused_in_s
            assert rig.gate.demand("default").queued == 0
            # What clients saw is what is counted, by code.
            counted: Counter[str] = Counter()
            for (_, _, code, _, _), count in rig.metrics.requests.items():
                counted[code] += count
            assert counted == Counter(map(str, ledger.statuses))
            refusals = [record for record in rig.records if record.status != 200]
            assert len(refusals) == len(ledger.refused_in_s)
            assert all(record.code == "queue_full" for record in refusals)

    run()


@on_loop
async def test_clients_that_try_again_at_once_do_not_keep_the_engines_from_their_work():
    """Each refused request comes three times more; what engines do stays useful work."""
    worker = Worker()
    config = fast_config(flow={"max_in_flight": ROOM, "max_queue": 4})
    async with (
        ScriptedUpstream(worker) as upstream,
        routing_to(upstream.port, config=config) as rig,
    ):
        ledger = Ledger()
        async with asyncio.TaskGroup() as tasks:
            for _ in range(24):
                tasks.create_task(insist(rig, ledger, 12, num_tries=4))
        served = ledger.statuses.count(200)
        assert worker.num_done == served == len(upstream.requests)  # nothing twice or in vain
        assert served > 24  # and it is busy all the time
        assert ROOM <= worker.most <= ROOM + 1
        # Over at once: the next one is served.
        async with await RawClient.open(rig.port) as client:
            assert (await client.ask(chat())).status == 200
        await rig.settled()


@on_loop
async def test_what_nobody_may_send_is_refused_before_its_body_comes():
    """The key is looked at with the head; megabytes are neither read nor kept."""
    async with (
        ScriptedUpstream() as upstream,
        routing_to(upstream.port, table=KeyTable({}, is_required=True)) as rig,
        await RawClient.open(rig.port) as client,
    ):
        await client.send(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 8000000\r\n\r\n"
        )
        answer = await client.answer()
        assert answer.status == 401
        assert not upstream.requests
