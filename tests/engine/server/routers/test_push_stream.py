"""The stream to routers: who may listen, what comes in which order, and who is cut off.

Red when: a delta comes before the snapshot or with a number left out; what one step takes back is
told as stored; a subscriber that does not read grows the server; a lost core leaves a stream open;
nobody hears of a drain.
"""

from __future__ import annotations

import asyncio
import struct
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import httpx
import msgspec
import pytest
import uvloop

from octavo_engine.core.kv_events.residency_feed import ResidencyFeed
from octavo_engine.core.process import wire
from octavo_engine.protocol.endpoints import DRAIN_PATH, STREAM_PATH
from octavo_engine.protocol.stream import CONTENT_TYPE
from octavo_engine.server.routers import push_stream as stream_module
from octavo_engine.server.service import Service
from octavo_engine.server.settings import ServerSettings
from octavo_engine.state.labels import ResidencyChange
from octavo_engine.state.outputs import EngineStats, StepOutput
from tests.fakes.engine import FakeEngine
from tests.fakes.server import RunningServer, running

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.slow


class Core:
    """Takes what the feed sends, and says what the test wants said."""

    def __init__(self) -> None:
        self.engine = FakeEngine()
        self.sent: list[wire.ToEngine] = []
        self.stored = b""
        self.tiers: dict[str, bytes] = {}
        self.engine.residency = ResidencyFeed(self._take)

    def _take(self, message: wire.ToEngine) -> None:
        self.sent.append(message)
        if message == wire.WatchResidency(on=True):
            snapshot = ResidencyChange(snapshot=self.stored, snapshot_tiers=self.tiers)
            self.engine.residency.on_step(StepOutput(residency=snapshot))

    def say(self, server: RunningServer, *steps: StepOutput) -> None:
        """All in one turn of the server's loop."""

        def work() -> None:
            for step in steps:
                self.engine.residency.on_step(step)

        server.call(work)


@contextmanager
def listening(server: RunningServer, **headers: str) -> Iterator[Iterator[tuple[str, Any]]]:
    with (
        server.client() as client,
        client.stream("GET", STREAM_PATH, headers=headers) as answer,
    ):
        assert answer.status_code == 200, answer.read()
        assert answer.headers["content-type"] == CONTENT_TYPE
        yield frames(answer)


def frames(answer: httpx.Response) -> Iterator[tuple[str, Any]]:
    buffer = b""
    for data in answer.iter_raw():
        buffer += data
        while len(buffer) >= 4:
            (length,) = struct.unpack_from("<I", buffer)
            if len(buffer) < 4 + length:
                break
            kind, fields = msgspec.msgpack.decode(buffer[4 : 4 + length])
            buffer = buffer[4 + length :]
            yield kind, fields


def stored(*entries: tuple[int, int]) -> bytes:
    return b"".join(struct.pack("<QI", *entry) for entry in entries)


def keys(*names: int) -> bytes:
    return struct.pack(f"<{len(names)}Q", *names)


@pytest.fixture
def core() -> Core:
    return Core()


@pytest.fixture
def server(core: Core) -> Iterator[RunningServer]:
    with running(core.engine) as server:
        yield server


def test_a_stream_begins_with_who_speaks_and_all_that_is_there(core, server):
    core.stored = stored((1, 16), (2, 40))
    with listening(server) as reported:
        kind, hello = next(reported)
        assert kind == "hello"
        assert hello == {
            "epoch": core.engine.residency.epoch, "model": "fake", "names": ["fake", "alias"],
            "adapters": [], "adapter_digests": {},
            "block_size": 16, "num_blocks": 100, "max_model_len": 256,
            "max_num_seqs": 128, "version": hello["version"], "pod_uid": "", "tokens": True,
            "architecture": "FakeForCausalLM", "format": "safetensors bfloat16",
            "vocab_size": 300, "kv_role": "", "kv_address": "", "kv_follows": False,
            "tiers": [], "kv_store": "",
        }  # fmt: skip
        assert next(reported) == ("snapshot", {"stored": core.stored, "last": True, "tiers": {}})
        kind, first = next(reported)
        assert (kind, first["seq"]) == ("delta", 1)
        assert first["load"]["kv_usage"] == 0.0


def test_an_empty_cache_has_an_empty_snapshot(core, server):
    with listening(server) as reported:
        next(reported)
        assert next(reported) == ("snapshot", {"stored": b"", "last": True, "tiers": {}})


def test_a_large_snapshot_comes_in_parts_of_a_megabyte(core, server):
    core.stored = stored(*((i, 16) for i in range(200_000)))
    with listening(server) as reported:
        next(reported)
        parts = [next(reported)[1] for _ in range(3)]
    assert b"".join(part["stored"] for part in parts) == core.stored
    assert [part["last"] for part in parts] == [False, False, True]
    assert all(len(part["stored"]) <= 2**20 for part in parts)


def test_changes_come_in_order_and_numbered(core, server):
    with listening(server) as reported:
        for _ in range(3):
            next(reported)
        for number in (2, 3, 4):
            change = ResidencyChange(stored=stored((number, 32)), evicted=keys(number - 1))
            core.say(server, StepOutput(residency=change))
            kind, delta = next(reported)
            assert (kind, delta["seq"]) == ("delta", number)
            assert (delta["stored"], delta["evicted"]) == (change.stored, change.evicted)


def test_of_several_steps_in_one_frame_the_last_word_counts(core, server):
    with listening(server) as reported:
        for _ in range(3):
            next(reported)
        core.say(
            server,
            StepOutput(residency=ResidencyChange(stored=stored((1, 16), (2, 16), (3, 16)))),
            StepOutput(residency=ResidencyChange(evicted=keys(1, 9))),
            StepOutput(residency=ResidencyChange(stored=stored((2, 32), (9, 48)))),
        )
        _, delta = next(reported)
        assert set(struct.iter_unpack("<QI", delta["stored"])) == {(2, 32), (3, 16), (9, 48)}
        assert delta["evicted"] == keys(1)


def test_what_tiers_hold_comes_by_medium_and_the_last_word_counts(core, server):
    core.tiers = {"CPU": stored((7, 16)), "DISK": stored((8, 32))}
    with listening(server) as reported:
        next(reported)
        parts = [next(reported)[1] for _ in range(3)]
        assert [part["tiers"] for part in parts] == [
            {},
            {"CPU": stored((7, 16))},
            {"DISK": stored((8, 32))},
        ]
        assert [part["last"] for part in parts] == [False, False, True]
        next(reported)
        core.say(
            server,
            StepOutput(residency=ResidencyChange(stored=stored((1, 16), (2, 32), (3, 48)))),
            StepOutput(
                residency=ResidencyChange(
                    evicted=keys(1, 2, 3), tiers={"CPU": stored((1, 16), (2, 32), (3, 48))}
                )
            ),
            StepOutput(
                residency=ResidencyChange(evicted=keys(2, 3), tiers={"DISK": stored((2, 32))})
            ),
            StepOutput(residency=ResidencyChange(stored=stored((1, 16)))),
        )
        _, delta = next(reported)
        assert delta["stored"] == stored((1, 16))
        assert set(struct.iter_unpack("<Q", delta["evicted"])) == {(2,), (3,)}
        assert delta["tiers"] == {"DISK": stored((2, 32))}


def test_load_comes_when_it_changed(core, server):
    with listening(server) as reported:
        for _ in range(3):
            next(reported)
        stats = EngineStats(
            num_running=3, num_waiting=2, queued_tokens=70, kv_blocks_total=100, kv_blocks_used=25,
            step_ms=8.0, prefill_tokens_per_s=1000.0,
        )  # fmt: skip
        core.say(server, StepOutput(stats=stats))
        _, delta = next(reported)
        assert delta["load"] == {
            "running": 3, "waiting": 2, "queued_tokens": 70, "kv_usage": 0.25, "step_s": 0.008,
            "prefill_tokens_per_s": 1000.0, "is_saturated": False, "computed_tokens": 0,
        }  # fmt: skip


def test_silence_is_broken_every_second(core, server):
    with listening(server) as reported:
        for _ in range(3):
            next(reported)
        kind, delta = next(reported)
        assert (kind, delta["seq"], delta["stored"]) == ("delta", 2, b"")
        assert delta["load"] is not None


def test_everybody_gets_the_same_from_their_own_snapshot_on(core, server):
    with listening(server) as early:
        for _ in range(3):
            next(early)
        core.say(server, StepOutput(residency=ResidencyChange(stored=stored((1, 16)))))
        assert next(early)[1]["stored"] == stored((1, 16))
        core.stored = stored((1, 16))
        with listening(server) as late:
            next(late)
            assert next(late)[1]["stored"] == stored((1, 16))
            assert next(late)[1]["seq"] == 1
            core.say(server, StepOutput(residency=ResidencyChange(stored=stored((2, 16)))))
            assert next(late)[1]["stored"] == stored((2, 16))
            assert next(early)[1]["stored"] == stored((2, 16))


def test_a_drain_is_told_to_those_who_listen_and_to_those_who_come(core, server):
    with listening(server) as reported:
        for _ in range(3):
            next(reported)
        with server.client() as client:
            assert client.post(DRAIN_PATH).status_code == 202
        assert next(reported) == ("draining", {"deadline_s": 120.0})
        with listening(server) as late:
            assert [next(late)[0] for _ in range(4)] == ["hello", "snapshot", "delta", "draining"]


def test_a_lost_core_ends_the_stream_and_the_next_has_another_epoch(core, server):
    with listening(server) as reported:
        _, hello = next(reported)
        server.call(core.engine.residency.on_lost)
        assert {kind for kind, _ in reported} <= {"snapshot", "delta"}  # and then it ends
    with listening(server) as reported:
        assert next(reported)[1]["epoch"] != hello["epoch"]


def test_nobody_listens_while_the_model_is_loaded(core, server):
    core.engine.state, core.engine.progress = "loading", 0.42
    with server.client() as client:
        answer = client.get(STREAM_PATH)
    assert answer.status_code == 503
    assert answer.json()["progress"] == 0.42  # for the operator's status
    assert answer.headers["retry-after"] == "1"


def test_the_core_is_told_when_the_last_one_leaves(core, server):
    with listening(server) as reported:
        next(reported)
    end = time.monotonic() + 30  # its leaving is noticed by the server, not by us
    while core.sent[-1] != wire.WatchResidency(on=False) and time.monotonic() < end:
        time.sleep(0.01)
    assert core.sent == [wire.WatchResidency(on=True), wire.WatchResidency(on=False)]
    assert len(server.service.hub) == 0


def test_keys_are_asked_for_like_everywhere():
    with running(settings=ServerSettings(api_keys=("secret",))) as server:
        with server.client() as client:
            assert client.get(STREAM_PATH).status_code == 401
        with listening(server, authorization="Bearer secret") as reported:
            assert next(reported)[0] == "hello"


def test_one_that_does_not_read_is_cut_off(core, server, monkeypatch):
    monkeypatch.setattr(stream_module, "MAX_QUEUE_BYTES", 1 << 16)
    with server.client() as client, client.stream("GET", STREAM_PATH) as answer:
        assert answer.status_code == 200
        # The socket takes some, the rest waits in the queue; nobody reads here.
        change = StepOutput(
            residency=ResidencyChange(stored=stored(*((i, 1) for i in range(9000))))
        )
        for _ in range(400):
            core.say(server, change)
            server.call(server.service.hub._flush)
            if not len(server.service.hub):
                break
        assert len(server.service.hub) == 0
        with pytest.raises(httpx.HTTPError):
            answer.read()
    with listening(server) as reported:
        assert next(reported)[0] == "hello"


def test_a_wake_that_is_due_already_does_not_stop_the_next_one_on_uvloop():
    """uvloop gives a timer whose time has come no `when`: asking for it broke the listener."""

    async def work() -> tuple[float, float]:
        hub = Service(Core().engine, ServerSettings()).hub
        now = asyncio.get_running_loop().time()
        hub._wake_at(now - 1.0)
        hub._wake_at(now - 2.0)
        due = hub._wakes_at
        hub._stop_timer()
        return now, due

    now, due = uvloop.run(work())
    assert due == now - 2.0
