"""KV events from a running scheduler, and on their way to who subscribes.

Red when: a block's name or parent differs from vLLM's; an eviction is not told; a salt is left out
of a name; sequence numbers have holes; a replay misses its beginning or its end; anybody who does
not read holds the engine up.
"""

from __future__ import annotations

import builtins
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from octavo_engine.config import EngineConfig, KVEventsConfig, SchedulerConfig, SimConfig
from octavo_engine.core.build import build_engine
from octavo_engine.core.kv_events.publisher import KVEventPublisher
from octavo_engine.core.kv_events.recorder import KVEventRecorder
from octavo_engine.errors import ConfigError
from octavo_engine.protocol.kv_events import (
    END_OF_REPLAY,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    KVEventBatch,
    from_wire,
    unpack_sequence,
)
from octavo_engine.protocol.prefix_hash import vllm_block_hash, vllm_event_id
from octavo_engine.scheduling.scheduler import Scheduler
from octavo_engine.state.request import EngineRequest
from octavo_engine.state.sampling_params import SamplingParams
from tests.fakes.kv_machine import Loop

if TYPE_CHECKING:
    from collections.abc import Iterator


class Cache:
    """A scheduler with a few blocks, and what its events say."""

    def __init__(self, num_blocks: int = 8) -> None:
        config = SchedulerConfig(max_num_seqs=4, max_model_len=128, max_num_batched_tokens=256)
        self.scheduler = Scheduler(config, num_blocks=num_blocks)
        self.loop = Loop(self.scheduler)
        self.recorder = KVEventRecorder(now=lambda: 1.5)
        self.scheduler.kv.listen(self.recorder)
        self.number = 0

    def run(self, prompt: list[int], *, salt: str = "", max_tokens: int = 1) -> list[Event]:
        self.number += 1
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        self.scheduler.add(
            EngineRequest(
                request_id=str(self.number), prompt_token_ids=prompt, params=params,
                cache_salt=salt,
            )
        )  # fmt: skip
        while self.scheduler.has_work:
            self.loop.step()
        return self.events()

    def events(self) -> list[Event]:
        batch = self.recorder.take()
        return [] if batch is None else batch.events


def chain(tokens: list[int], first_extra: tuple[Any, ...] | None = None) -> list[int]:
    ids, parent = [], None
    for start in range(0, len(tokens) - 15, 16):
        extra = first_extra if start == 0 else None
        parent = vllm_block_hash(parent, tokens[start : start + 16], extra)
        ids.append(vllm_event_id(parent))
    return ids


def stored(ids: list[Any], parent: int | None, tokens: list[int], **more: Any) -> BlockStored:
    return BlockStored(
        ids, parent, tokens, 16, medium="GPU", group_idx=0, kv_cache_spec_kind="full_attention",
        **more,
    )  # fmt: skip


def test_blocks_are_named_as_vllm_names_them():
    prompt = list(range(40))
    assert Cache().run(prompt) == [stored(chain(prompt), None, prompt[:32])]


def test_what_is_added_to_a_prefix_names_its_parent():
    cache, prompt = Cache(), list(range(40))
    ids = chain(prompt + list(range(100, 120)))
    cache.run(prompt)
    longer = prompt + list(range(100, 120))
    assert cache.run(longer) == [stored(ids[2:], ids[1], longer[32:48])]


def test_a_salt_is_part_of_the_first_name_and_published():
    extra = (("cache_salt", "tenant"),)
    prompt = list(range(33))
    event = stored(chain(prompt, extra), None, prompt[:32], extra_keys=[extra, None])
    assert Cache().run(prompt, salt="tenant") == [event]


def test_generated_tokens_make_blocks_too():
    cache, prompt = Cache(), list(range(20))
    events = cache.run(prompt, max_tokens=30)
    tokens = [
        token for event in events if isinstance(event, BlockStored) for token in event.token_ids
    ]
    assert tokens[:20] == prompt
    assert len(tokens) == 48


def test_evicted_blocks_are_published_in_order():
    cache, prompt = Cache(), list(range(48))
    cache.run(prompt)
    events = cache.run(list(range(200, 200 + 120)))
    removed = [event for event in events if isinstance(event, BlockRemoved)]
    assert removed == [BlockRemoved(list(reversed(chain(prompt))), "GPU", group_idx=0)]


def test_a_cleared_cache_is_one_event():
    cache = Cache()
    cache.run(list(range(48)))
    cache.scheduler.reset_prefix_cache()
    assert cache.events() == [AllBlocksCleared()]
    assert cache.events() == []


# ── on their way ──


@pytest.fixture
def zmq() -> Any:
    return pytest.importorskip("zmq", reason="pyzmq is an extra")


@pytest.fixture
def context(zmq) -> Iterator[Any]:
    with zmq.Context() as context:
        yield context


def config(tmp_path, **fields: Any) -> KVEventsConfig:
    return KVEventsConfig(
        enable_kv_cache_events=True, endpoint=f"ipc://{tmp_path}/events",
        replay_endpoint=f"ipc://{tmp_path}/replay", **fields,
    )  # fmt: skip


def batch(number: int) -> KVEventBatch:
    return KVEventBatch(float(number), [BlockRemoved([number], "GPU")])


def replayed(context: Any, zmq: Any, tmp_path: Any, first: int) -> list[tuple[int, KVEventBatch]]:
    with context.socket(zmq.DEALER) as socket:
        socket.rcvtimeo, socket.linger = 10_000, 0
        socket.connect(f"ipc://{tmp_path}/replay")
        socket.send_multipart((b"", first.to_bytes(8, "big")))
        found: list[tuple[int, KVEventBatch]] = []
        while True:
            empty, topic, number, payload = socket.recv_multipart()
            assert empty == b""
            if number == END_OF_REPLAY:
                assert (topic, payload) == (b"", b"")
                return found
            assert topic == b"kv@pod@model"
            found.append((unpack_sequence(number), from_wire(msgspec.msgpack.decode(payload))))


def test_live_messages_have_three_frames_and_count_from_zero(tmp_path, zmq, context):
    publisher = KVEventPublisher(config(tmp_path, topic="kv@pod@model"))
    try:
        with context.socket(zmq.SUB) as socket:
            socket.rcvtimeo = 10_000
            socket.subscribe(b"kv@")
            socket.connect(f"ipc://{tmp_path}/events")
            # A subscription takes its time; what was missed before it can be replayed.
            number = 0
            while not socket.poll(20):
                publisher.publish(batch(number))
                number += 1
            topic, first, payload = socket.recv_multipart()
        assert topic == b"kv@pod@model"
        seen = unpack_sequence(first)
        assert from_wire(msgspec.msgpack.decode(payload)) == batch(seen)
        assert replayed(context, zmq, tmp_path, 0)[:number] == [
            (i, batch(i)) for i in range(number)
        ]
    finally:
        publisher.close()


def test_a_replay_begins_where_it_is_asked_to_and_goes_back_so_far_only(tmp_path, zmq, context):
    publisher = KVEventPublisher(config(tmp_path, topic="kv@pod@model", buffer_steps=5))
    try:
        for number in range(8):
            publisher.publish(batch(number))
        found: list[tuple[int, KVEventBatch]] = []
        while [number for number, _ in found] != [5, 6, 7]:  # until the thread has sent them all
            found = replayed(context, zmq, tmp_path, 5)
        assert [number for number, _ in replayed(context, zmq, tmp_path, 0)] == [3, 4, 5, 6, 7]
        assert replayed(context, zmq, tmp_path, 8) == []
    finally:
        publisher.close()


def test_a_slow_subscriber_does_not_delay_the_engine(tmp_path, zmq, context):
    publisher = KVEventPublisher(config(tmp_path, hwm=1, max_queue_size=10))
    with context.socket(zmq.SUB) as socket:
        socket.set_hwm(1)
        socket.subscribe(b"")
        socket.connect(f"ipc://{tmp_path}/events")
        for number in range(5000):
            publisher.publish(batch(number))
        publisher.close()


def test_a_batch_that_finds_no_room_leaves_a_gap_in_the_numbers(tmp_path, zmq, context):
    publisher = KVEventPublisher(
        config(tmp_path, topic="kv@pod@model", max_queue_size=1, buffer_steps=2000)
    )
    try:
        found: list[tuple[int, KVEventBatch]] = []
        for first in range(0, 2000, 200):
            for number in range(first, first + 200):
                publisher.publish(batch(number))
            found = replayed(context, zmq, tmp_path, 0)
            if found and len(found) <= found[-1][0]:
                break
        assert len(found) <= found[-1][0]
        assert found == [(number, batch(number)) for number, _ in found]
    finally:
        publisher.close()


def test_an_address_that_cannot_be_used_is_named(zmq):
    with pytest.raises(ConfigError, match=r"ipc:///nowhere/at/all"):
        KVEventPublisher(
            KVEventsConfig(enable_kv_cache_events=True, endpoint="ipc:///nowhere/at/all")
        )


def test_without_pyzmq_the_error_says_what_to_install(tmp_path, monkeypatch):
    real = builtins.__import__

    def importing(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "zmq":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", importing)
    with pytest.raises(ConfigError, match=r"pip install pyzmq"):
        KVEventPublisher(config(tmp_path))


# ── settings ──


def test_the_settings_have_the_names_and_defaults_of_vllm():
    text = '{"enable_kv_cache_events": true, "publisher": "zmq", "topic": "t", "hwm": 7}'
    parsed = EngineConfig(kv_events_config=text).kv_events
    assert parsed == KVEventsConfig(enable_kv_cache_events=True, topic="t", hwm=7)
    assert parsed.is_on
    assert not EngineConfig().kv_events.is_on


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not valid JSON"),
        ("[]", "must be a JSON object"),
        ('{"endpont": "tcp://*:1"}', "unknown field endpont"),
        ('{"hwm": "1"}', "hwm has the wrong type"),
        ('{"enable_kv_cache_events": 1}', "enable_kv_cache_events has the wrong type"),
        ('{"buffer_steps": 0}', "buffer_steps must be at least 1"),
        ('{"publisher": "kafka"}', "publisher must be zmq or null"),
    ],
)
def test_settings_that_cannot_work_name_the_field(text, message):
    with pytest.raises(ConfigError, match=message):
        EngineConfig(kv_events_config=text)


def test_events_of_a_cache_that_is_off_are_refused():
    with pytest.raises(ConfigError, match="--enable-prefix-caching"):
        EngineConfig(
            kv_events_config='{"enable_kv_cache_events": true}',
            scheduler=SchedulerConfig(enable_prefix_caching=False),
        )


def test_an_engine_with_the_setting_publishes_what_it_caches(tmp_path, zmq, context):
    text = msgspec.json.encode(
        {
            "enable_kv_cache_events": True, "endpoint": f"ipc://{tmp_path}/events",
            "replay_endpoint": f"ipc://{tmp_path}/replay", "topic": "kv@pod@model",
        }
    ).decode()  # fmt: skip
    sim = SimConfig(time_scale=0.0, kv_blocks=16)
    engine, _ = build_engine(
        EngineConfig(model="sim", device="sim", max_model_len=128, sim=sim, kv_events_config=text)
    )
    try:
        prompt = list(range(40))
        params = SamplingParams(max_tokens=1)
        engine.add(EngineRequest(request_id="a", prompt_token_ids=prompt, params=params))
        while engine.has_work:
            engine.step()
        found: list[tuple[int, KVEventBatch]] = []
        while not found:  # until the thread has sent it
            found = replayed(context, zmq, tmp_path, 0)
    finally:
        engine.close()
    events = [event for _, sent in found for event in sent.events]
    assert events[0] == AllBlocksCleared()  # what came before it is of an engine that is gone
    assert isinstance(events[1], BlockStored)
    assert events[1].block_hashes == chain(prompt)
