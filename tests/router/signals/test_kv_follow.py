"""KV events over real ZMQ sockets: order, gaps, replay in both formats, restarts."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import msgspec
import pytest

from octavo_engine.protocol.route_keys import keys_of, pack_keys
from octavo_router.metrics import LabelledCounter
from octavo_router.residency.index import PyResidencyIndex
from octavo_router.signals.kv_follow import END_OF_REPLAY, KvFollower
from octavo_router.signals.kv_residency import KvResidency
from tests.fakes.engine_stream import EngineStream
from tests.fakes.facts import run, until
from tests.fakes.listening import listening

zmq = pytest.importorskip("zmq", reason="KV events need pyzmq")
zmq_asyncio = pytest.importorskip("zmq.asyncio")

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


def stored(number: int) -> bytes:
    """A batch with one block of sixteen tokens, the `number`-th of its chain."""
    event = {
        "type": "BlockStored",
        "block_hashes": [number + 1],
        "parent_block_hash": number or None,
        "token_ids": list(range(16 * number, 16 * number + 16)),
        "block_size": 16,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
    }
    return msgspec.msgpack.encode([1.0, [event], 0])


KEYS = pack_keys(keys_of({"prompt": list(range(160))}, "completion"))


class Publisher:
    """vLLM's side: a PUB socket, and a ROUTER socket that replays what it remembers."""

    def __init__(self) -> None:
        self.context = zmq_asyncio.Context()
        self.live = self.context.socket(zmq.XPUB)  # as PUB, but it hears of subscribers
        self.replay = self.context.socket(zmq.ROUTER)
        self.live_at = f"tcp://127.0.0.1:{self.live.bind_to_random_port('tcp://127.0.0.1')}"
        self.replay_at = f"tcp://127.0.0.1:{self.replay.bind_to_random_port('tcp://127.0.0.1')}"
        self.buffer: list[tuple[int, bytes]] = []
        self.has_topics = True
        self.wanted: list[int] = []

    async def say(self, seq: int, payload: bytes) -> None:
        await self.live.send_multipart([b"kv", seq.to_bytes(8, "big"), payload])

    async def serve_replays(self) -> None:
        while True:
            identity, empty, start = await self.replay.recv_multipart()
            wanted = int.from_bytes(start, "big")
            self.wanted.append(wanted)
            topic = [b"kv"] if self.has_topics else []
            for seq, payload in self.buffer:
                if seq >= wanted:
                    frames = [identity, empty, *topic, seq.to_bytes(8, "big"), payload]
                    await self.replay.send_multipart(frames)
            end = [b""] if self.has_topics else []
            await self.replay.send_multipart([identity, empty, *end, END_OF_REPLAY, b""])


class Listener:
    def __init__(self, publisher: Publisher, *, replays: bool) -> None:
        self.index = PyResidencyIndex()
        self.slot = self.index.add_slot()
        self.tally = LabelledCounter()
        residency = KvResidency(self.index, self.slot, self.tally)
        replay = publisher.replay_at if replays else ""
        self.follower = KvFollower(publisher.live_at, replay, residency, self.tally)

    @property
    def cached(self) -> int:
        return self.index.match(KEYS, [self.slot])[0]


@asynccontextmanager
async def following(*, replays: bool = True) -> AsyncIterator[tuple[Publisher, Listener]]:
    publisher = Publisher()
    listener = Listener(publisher, replays=replays)
    tasks = [
        asyncio.create_task(listener.follower.follow()),
        asyncio.create_task(publisher.serve_replays()),
    ]
    try:
        await asyncio.wait_for(publisher.live.recv(), 10)  # somebody subscribed
        yield publisher, listener
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        publisher.context.destroy(linger=0)


def test_batches_in_order_are_applied():
    async def story() -> None:
        async with following() as (publisher, listener):
            for seq in range(3):
                await publisher.say(seq, stored(seq))
            await until(lambda: listener.cached == 48)
            assert publisher.wanted == []

    run(story())


@pytest.mark.parametrize("has_topics", [True, False])
def test_a_gap_is_filled_by_replay(has_topics):
    async def story() -> None:
        async with following() as (publisher, listener):
            publisher.has_topics = has_topics
            await publisher.say(0, stored(0))
            publisher.buffer = [(seq, stored(seq)) for seq in range(4)]
            await publisher.say(3, stored(3))
            await until(lambda: listener.cached == 64)
            assert publisher.wanted == [1]

    run(story())


def test_who_comes_late_asks_for_the_beginning():
    async def story() -> None:
        async with following() as (publisher, listener):
            publisher.buffer = [(seq, stored(seq)) for seq in range(5)]
            await publisher.say(4, stored(4))
            await until(lambda: listener.cached == 80)
            assert publisher.wanted == [0]

    run(story())


def test_a_gap_that_nobody_replays_means_nothing_is_known():
    async def story() -> None:
        async with following(replays=False) as (publisher, listener):
            await publisher.say(0, stored(0))
            await until(lambda: listener.cached == 16)
            await publisher.say(2, stored(2))
            await until(lambda: listener.cached == 0)
            assert listener.tally["batch", "gap"] == 1

    run(story())


def test_a_new_life_of_the_server_starts_from_nothing():
    async def story() -> None:
        async with following(replays=False) as (publisher, listener):
            for seq in range(3):
                await publisher.say(seq, stored(seq))
            await until(lambda: listener.cached == 48)
            await publisher.say(0, stored(0))
            await until(lambda: listener.cached == 16)
            assert listener.tally["batch", "restart"] == 1

    run(story())


def test_what_cannot_be_read_voids_what_is_known():
    async def story() -> None:
        async with following() as (publisher, listener):
            await publisher.say(0, stored(0))
            await until(lambda: listener.cached == 16)
            await publisher.live.send_multipart([b"kv", b"short", b""])  # not ours: passed over
            await publisher.say(1, b"\xc1")
            await until(lambda: listener.cached == 0)
            await publisher.say(2, stored(0))
            await until(lambda: listener.cached == 16)

    run(story())


def test_a_plain_server_with_events_is_polled_and_followed():
    async def story() -> None:
        publisher = Publisher()
        engine = EngineStream()
        engine.pages = {"/v1/models": (200, b'{"data": [{"id": "m"}]}')}
        try:
            async with engine, listening() as router:
                labels = (("kv-events", publisher.live_at),)
                (endpoint,) = router.add(engine.spec(kind="openai", labels=labels))
                await asyncio.wait_for(publisher.live.recv(), 10)
                await publisher.say(0, stored(0))
                await until(lambda: router.index.match(KEYS, [endpoint.slot]) == [16])
                await until(lambda: endpoint.state == "ready")
                on_disk = ["BlockStored", [1], None, [], 16, None, "DISK"]
                await publisher.say(1, msgspec.msgpack.encode([1.0, [on_disk], 0]))
                await until(lambda: list(endpoint.tier_keys.values()) == ["DISK"])
                await engine.stop()
                await until(lambda: endpoint.state == "down")
                assert router.index.num_keys(endpoint.slot) == 0
                assert endpoint.tier_keys == {}
        finally:
            publisher.context.destroy(linger=0)

    run(story())
