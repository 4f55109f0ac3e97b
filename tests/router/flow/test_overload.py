"""The gate under more than its engines can do, in virtual time: nobody's time is spent in vain."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from dataclasses import dataclass, field
from functools import partial

import pytest

from octavo.study.timeline import Timeline
from octavo_router.config.settings import FlowConfig, KeyConfig
from octavo_router.errors import Rejected
from octavo_router.flow.admission import AdmissionGate, Ticket
from octavo_router.flow.keys import make_table
from tests.fakes.endpoints import make_request

SEATS = 16  # of all engines together
BEHIND = 4  # that an engine may have waiting at hand
CAPACITY = 16.0  # requests a second
PATIENCE_S = 5.0


@dataclass(eq=False)
class Client:
    sent_at: float
    tenant: str = ""
    ended_at: float = 0.0
    ending: str = ""
    ticket: Ticket | None = None
    refused_at: float = 0.0
    retry_after_s: float = 0.0


@dataclass
class Engines:
    """So many at once, a second each, first come, first served."""

    timeline: Timeline
    running: set[Client] = field(default_factory=set)
    waiting: deque[Client] = field(default_factory=deque)
    empty: bool = False

    # the gate's view

    def room(self, pool: str, revision: str) -> int:
        return max(0, SEATS + BEHIND - len(self.running) - len(self.waiting))

    def has_room(self, pool: str, revision: str) -> bool:
        return self.room(pool, revision) > 0

    def is_empty(self, pool: str, revision: str) -> bool:
        return self.empty


class World:
    def __init__(self, *, has_deadline: bool = True, keys=(), stream: bool = False, **flow) -> None:
        self.timeline = Timeline()
        self.engines = Engines(self.timeline)
        self.gate = AdmissionGate(
            FlowConfig(**flow), make_table(keys, {}), self.engines, self.timeline.clock
        )
        self.clients: list[Client] = []
        self._has_deadline = has_deadline
        self._is_stream = stream
        self._rng = random.Random(1)
        self._tasks: set[asyncio.Task[None]] = set()

    def load(self, rate: float, *, start: float, end: float, tenant: str = "") -> None:
        at = start
        while (at := at + self._rng.expovariate(rate)) < end:
            self.timeline.at(at, lambda: self.arrive(tenant))

    async def run(self, until: float) -> None:
        """Tasks that an event wakes run before the next one. Who waits then leaves."""
        for tick in range(int(until * 4)):
            self.timeline.at(tick / 4, self.gate.tick)
        while self.timeline._events and self.timeline.now < until:
            self.timeline.now, _, event = min(self.timeline._events)
            self.timeline._events.remove(min(self.timeline._events))
            event()
            for _ in range(4):
                await asyncio.sleep(0)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def arrive(self, tenant: str = "") -> None:
        now = self.timeline.now
        client = Client(now, tenant)
        self.clients.append(client)
        owner = self.gate.authenticate(f"Bearer {tenant}" if tenant else "", "")
        request = make_request(("r", 4), max_tokens=50, stream=self._is_stream)
        deadline = now + PATIENCE_S if self._has_deadline else now + 600.0
        try:
            entry = self.gate.admit(request, owner, deadline=deadline)
        except Rejected as error:
            self._refuse(client, error)
            return
        waiting = None
        if isinstance(entry, Ticket):
            self._begin(client, entry)
        else:
            waiting = entry
            task = asyncio.get_running_loop().create_task(self._wait(client, waiting))
            self._tasks.add(task)

        def leave() -> None:
            if client.ending:
                return
            client.ending, client.ended_at = "late" if self._has_deadline else "left", now + 5.0
            if client.ticket is None:
                if waiting is not None and not self._has_deadline:
                    waiting.cancel()
                return
            self.engines.running.discard(client)
            if client in self.engines.waiting:
                self.engines.waiting.remove(client)
            client.ticket.release(16, 20, "" if self._has_deadline else "left")
            self._go_on()

        self.timeline.after(PATIENCE_S, leave)

    async def _wait(self, client: Client, waiting) -> None:
        try:
            ticket = await waiting
        except Rejected as error:
            self._refuse(client, error)
            return
        self._begin(client, ticket)

    def _refuse(self, client: Client, error: Rejected) -> None:
        client.ending, client.ended_at = client.ending or "refused", self.timeline.now
        client.refused_at, client.retry_after_s = self.timeline.now, error.retry_after_s or 0.0

    def _begin(self, client: Client, ticket: Ticket) -> None:
        client.ticket = ticket
        self.engines.waiting.append(client)
        self._go_on()

    def _go_on(self) -> None:
        engines = self.engines
        while engines.waiting and len(engines.running) < SEATS:
            client = engines.waiting.popleft()
            engines.running.add(client)
            self.timeline.after(self._rng.uniform(0.9, 1.1), partial(self._done, client))
        self.gate.wake("pool")

    def _done(self, client: Client) -> None:
        if client in self.engines.running:
            self.engines.running.remove(client)
            client.ending, client.ended_at = "whole", self.timeline.now
            assert client.ticket is not None
            client.ticket.release(16, 50, "whole")
            self._go_on()

    def served(self, start: float, end: float, tenant: str = "") -> float:
        whole = [c for c in self.clients if c.ending == "whole" and c.tenant == tenant]
        return sum(start <= c.ended_at < end for c in whole) / (end - start)


@pytest.mark.slow
@pytest.mark.parametrize("times", [1.3, 3.0])
@pytest.mark.parametrize(
    "kind",
    [{"has_deadline": True}, {"has_deadline": False}, {"has_deadline": False, "stream": True}],
    ids=["deadlines", "clients that leave", "streams that are left"],
)
def test_engines_work_only_for_those_who_get_it(kind, times):
    async def story() -> None:
        world = World(**kind)
        world.load(times * CAPACITY, start=0.0, end=40.0)
        world.load(0.5 * CAPACITY, start=40.0, end=50.0)
        await world.run(50.0)
        assert world.served(10.0, 40.0) >= 0.95 * CAPACITY
        known = [c for c in world.clients if c.sent_at > 20.0]
        refused = [c for c in known if c.ending == "refused"]
        assert refused
        at_once = sum(c.refused_at == c.sent_at for c in refused)
        assert at_once >= (0.99 if times >= 3.0 else 0.95) * len(refused)
        assert all(1.0 <= c.retry_after_s <= 30.0 for c in refused)
        lost = [c for c in known if c.ending in ("left", "late")]
        assert len(lost) <= 0.05 * len(refused)
        later = [c for c in world.clients if 42.0 <= c.sent_at < 47.0]
        assert {c.ending for c in later} == {"whole"}

    asyncio.run(story())


def test_a_tenant_that_asks_for_little_is_not_refused_for_one_that_asks_for_much():
    keys = (KeyConfig(key="much", tenant="much"), KeyConfig(key="little", tenant="little"))

    async def story() -> None:
        world = World(keys=keys)
        world.load(3 * CAPACITY, start=0.0, end=30.0, tenant="much")
        world.load(0.2 * CAPACITY, start=0.0, end=30.0, tenant="little")
        await world.run(36.0)
        little = [c for c in world.clients if c.tenant == "little" and c.sent_at > 5.0]
        assert sum(c.ending == "whole" for c in little) >= 0.95 * len(little)

    asyncio.run(story())


def test_what_was_never_measured_refuses_nobody():
    async def story() -> None:
        world = World()
        for _ in range(200):
            world.arrive()
        assert {client.ending for client in world.clients} == {""}
        await world.run(0.0)

    asyncio.run(story())


def test_a_queue_that_nobody_is_in_takes_one_whatever_was_foreseen():
    async def story() -> None:
        world = World()
        world.load(3 * CAPACITY, start=0.0, end=10.0)
        await world.run(10.0)
        assert not world.gate._queues
        world.engines.waiting.extend([Client(0.0)] * 100)  # no room
        world.arrive()
        assert world.clients[-1].ending == ""
        await world.run(10.0)

    asyncio.run(story())


def test_patient_clients_may_wait_as_long_as_is_configured():
    async def story() -> None:
        world = World(has_deadline=False, queue_timeout_s=3.0)
        world.load(3 * CAPACITY, start=0.0, end=30.0)
        await world.run(30.0)
        done = [c for c in world.clients if c.ending == "whole" and c.ended_at > 15.0]
        assert 2.5 <= max(c.ended_at - c.sent_at for c in done) <= PATIENCE_S

    asyncio.run(story())
