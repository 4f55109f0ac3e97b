"""KV events of the tiers: each block that a store has is known by its medium, and no other.

Red when: a block that a store dropped is still reported there; one that came back is not; a cleared
pool makes consumers forget the tiers; a block has another name than in the pool.
"""

import random

import pytest

from octavo_engine.core.kv_events.recorder import KVEventRecorder
from octavo_engine.protocol.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from octavo_engine.tiers.page import split_name
from tests.engine.core.test_kv_tiers import MIB, ask, forget_pool, load_always, make_engine
from tests.fakes.requests import make_prompt

__all__ = ["load_always"]  # a fixture


class Consumer:
    """What somebody who reads the events believes."""

    def __init__(self):
        self.held: dict[str | None, set[int | bytes]] = {}

    def read(self, batch):
        for event in [] if batch is None else batch.events:
            if isinstance(event, AllBlocksCleared):
                self.held = {}
            elif isinstance(event, BlockStored):
                self.held.setdefault(event.medium, set()).update(event.block_hashes)
            elif isinstance(event, BlockRemoved):
                self.held[event.medium] -= set(event.block_hashes)


class Publisher:
    """Hands batches to a consumer at once."""

    def __init__(self, consumer):
        self.publish = consumer.read

    def close(self):
        """Nothing is open."""


def following(**settings):
    engine, backend = make_engine(**settings)
    consumer = Consumer()
    engine.tell_kv_events(KVEventRecorder(), Publisher(consumer))
    return engine, backend, consumer


def test_blocks_in_host_memory_are_reported_until_they_are_dropped():
    engine, backend, consumer = following(kv_offloading_size=8 * 128 / 2**30)  # eight blocks
    ask(engine, backend, make_prompt(100))
    assert len(consumer.held["CPU"]) == 6
    assert consumer.held["CPU"] == consumer.held["GPU"]
    first = set(consumer.held["CPU"])
    forget_pool(engine, backend)
    engine.report([])
    assert consumer.held == {"CPU": first}  # the store keeps what it has
    ask(engine, backend, make_prompt(100, first=50))
    assert len(consumer.held["CPU"]) == len(engine._tiers.host) == 8
    assert len(consumer.held["CPU"] & first) == 2
    engine.close()


def test_blocks_on_disk_are_reported_once_they_are_written(tmp_path):
    engine, backend, consumer = following(kv_disk_path=str(tmp_path))
    ask(engine, backend, make_prompt(100))
    assert engine._tiers.stored[0].store.flush()
    engine.report([])
    assert consumer.held["DISK"] == consumer.held["GPU"]
    for file in tmp_path.glob("*/*.kv"):
        file.unlink()
    engine._tiers.stored[0].store._scan()
    engine.report([])
    assert consumer.held["DISK"] == set()
    engine.close()


@pytest.mark.parametrize("windows", [(None,), (None, 40)])
@pytest.mark.parametrize("seed", range(2))
def test_at_any_time_the_events_add_up_to_what_the_host_store_has(windows, seed):
    chance = random.Random(seed)
    engine, backend, consumer = following(
        windows=windows, kv_offloading_size=chance.choice([4096 / 2**30, MIB])
    )
    for turn in range(20):
        ask(engine, backend, make_prompt(chance.randint(16, 150), first=chance.randrange(4)))
        if chance.random() < 0.2:
            forget_pool(engine, backend)
        engine.report([])
        names = [name for name in engine._tiers.host._pages if split_name(name)[1] == 0]
        assert len(consumer.held["CPU"]) == len(names), turn
    engine.close()
