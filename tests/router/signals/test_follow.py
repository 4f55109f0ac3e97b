"""An engine's story without sockets: what each frame does, and which ones end the stream."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo_engine.protocol.stream import Delta, Draining, Hello, Load, Snapshot
from octavo_router.endpoints.endpoint import Address, Endpoint, EndpointSpec
from octavo_router.errors import Unreachable
from octavo_router.metrics import SignalCounts
from octavo_router.residency.index import PyResidencyIndex
from octavo_router.signals.follow import Follower, StreamBroken
from octavo_router.signals.frames import Frame, FrameReader
from tests.fakes.clock import ManualClock
from tests.fakes.engine_stream import pack_evicted, pack_frame, pack_stored

HELLO = Hello("e1", "m", ["m"])
WHOLE = Snapshot(b"", last=True)


class Rig:
    """A follower and what it writes."""

    def __init__(self) -> None:
        self.index = PyResidencyIndex()
        self.endpoint = Endpoint(EndpointSpec("e", Address("10.0.0.1", 1)))
        self.endpoint.slot = self.index.add_slot()
        self.reported: list[str] = []
        self.num_changes = 0
        self.clock = ManualClock()
        self.follower = Follower(
            self.endpoint,
            self.index,
            counts=SignalCounts(),
            set_state=lambda endpoint, state, reason: self.reported.append(state),
            on_changed=self._changed,
            now=self.clock,
        )
        self.follower.begin()

    def _changed(self, endpoint: Endpoint) -> None:
        self.num_changes += 1

    def take(self, *frames: Frame) -> None:
        for frame in frames:
            self.follower.take(frame)

    @property
    def num_keys(self) -> int:
        return self.index.num_keys(self.endpoint.slot)


def test_adapters_come_with_the_hello_and_change_with_deltas():
    rig = Rig()
    rig.take(Hello("e1", "m", ["m", "a"], adapters=["a"]), WHOLE)
    assert rig.endpoint.adapters == {"a"}
    before = rig.num_changes
    rig.take(Delta(1), Delta(2, adapters=["a", "b"]))
    assert rig.endpoint.adapters == {"a", "b"}
    rig.take(Delta(3, adapters=["b", "a"]), Delta(4, load=Load()))
    assert rig.num_changes == before + 1
    rig.take(Delta(5, adapters=[]))
    assert rig.endpoint.adapters == set()
    assert rig.endpoint.names == ("m",)  # "a" of the hello is no model of its own now


def test_other_weights_under_the_same_name_are_a_change():
    rig = Rig()
    rig.take(Hello("e1", "m", ["m", "a"], adapters=["a"], adapter_digests={"a": "old"}), WHOLE)
    before = rig.num_changes
    rig.take(Delta(1, adapters=["a"], adapter_digests={"a": "old"}))
    assert rig.num_changes == before
    rig.take(Delta(2, adapters=["a"], adapter_digests={"a": "new"}), Delta(3))
    assert (rig.num_changes, rig.endpoint.adapter_digests) == (before + 1, {"a": "new"})


def test_a_hello_voids_what_was_known():
    rig = Rig()
    rig.index.apply(rig.endpoint.slot, pack_stored((1, 16)), b"")
    rig.take(HELLO)
    assert rig.num_keys == 0


def test_a_snapshot_in_parts_is_ready_with_the_last():
    rig = Rig()
    rig.take(HELLO, Snapshot(pack_stored((1, 16)), last=False))
    assert rig.reported == []
    rig.take(Snapshot(pack_stored((2, 32)), last=True))
    assert (rig.reported, rig.num_keys) == (["ready"], 2)


def test_what_is_evicted_goes_before_what_is_stored():
    rig = Rig()
    rig.take(HELLO, WHOLE, Delta(1, pack_stored((1, 16)), pack_evicted(1)))
    assert rig.num_keys == 1


def test_keys_in_tiers_are_known_by_medium_and_void_with_the_next_hello():
    rig = Rig()
    hello = Hello("e1", "m", ["m"], tiers=["CPU", "DISK"])
    first = Snapshot(pack_stored((1, 16)), last=False)
    rig.take(hello, first, Snapshot(b"", last=True, tiers={"DISK": pack_stored((2, 32))}))
    tiers = rig.endpoint.tiers
    assert tiers is not None
    keys = pack_evicted(1, 2)
    assert rig.index.match(keys, [rig.endpoint.slot, *tiers.slots]) == [16, 16, 32]
    rig.take(Delta(1, evicted=pack_evicted(1), tiers={"CPU": pack_stored((1, 16))}))
    assert rig.index.match(keys, [rig.endpoint.slot, *tiers.slots]) == [0, 16, 32]
    rig.follower.begin()
    rig.take(HELLO, WHOLE)  # started anew without tiers
    assert rig.endpoint.tiers is None
    assert rig.index.add_slot() == 1


def test_tiers_of_an_engine_that_announces_none_are_ignored():
    rig = Rig()
    rig.take(HELLO, WHOLE, Delta(1, tiers={"DISK": pack_stored((2, 32))}))
    assert (rig.num_keys, rig.endpoint.tiers) == (0, None)


def test_a_torn_entry_of_a_tier_ends_the_stream():
    with pytest.raises(Unreachable, match="tiers holds 5 bytes for DISK"):
        FrameReader().feed(pack_frame(Delta(1, tiers={"DISK": b"12345"})))


def test_the_same_hello_again_is_no_change():
    rig = Rig()
    for _ in range(2):
        rig.follower.begin()
        rig.take(HELLO, WHOLE)
    assert rig.num_changes == 1
    rig.follower.begin()
    rig.take(Hello("e2", "m", ["m", "new"]), WHOLE)
    assert rig.num_changes == 2


def test_an_engine_that_drains_from_the_start_is_never_ready():
    rig = Rig()
    rig.take(HELLO, Draining(), WHOLE, Delta(1))
    assert rig.reported == ["draining"]


@pytest.mark.parametrize(
    ("frames", "kind"),
    [
        ([WHOLE], "order"),
        ([Delta(1)], "order"),
        ([HELLO, Delta(1)], "order"),
        ([HELLO, HELLO], "second_hello"),
        ([HELLO, WHOLE, WHOLE], "order"),
        ([HELLO, WHOLE, Delta(7), Delta(9)], "gap"),
        ([HELLO, WHOLE, Delta(7), Delta(7)], "repeat"),
        ([HELLO, WHOLE, Delta(7), Delta(8), Delta(6)], "repeat"),
        ([HELLO, WHOLE, Delta(1, load=Load(kv_usage=1.5))], "load"),
        ([HELLO, WHOLE, Delta(1, load=Load(kv_usage=float("nan")))], "load"),
    ],
)
def test_what_does_not_follow_ends_the_stream(frames, kind):
    rig = Rig()
    rig.take(*frames[:-1])
    with pytest.raises(StreamBroken) as broken:
        rig.take(frames[-1])
    assert broken.value.kind == kind


def test_an_endpoint_that_is_gone_takes_no_more_frames():
    rig = Rig()
    rig.take(HELLO, WHOLE)
    rig.endpoint.slot = -1
    with pytest.raises(StreamBroken):
        rig.take(Delta(1, pack_stored((1, 16))))


@settings(derandomize=True, max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 60), max_size=8), st.binary(max_size=40))
def test_frames_come_out_as_they_went_in_however_they_are_cut(cuts, garbage):
    frames: list[Frame] = [HELLO, WHOLE, Delta(1, pack_stored((1, 2))), Draining(1.0)]
    data = b"".join(map(pack_frame, frames))
    reader, got, at = FrameReader(), [], 0
    for cut in [*cuts, len(data)]:
        got += reader.feed(data[at : at + cut])
        at += cut
    assert got == frames
    try:
        reader.feed(garbage)
    except Unreachable:
        return
    assert reader.feed(b"") == []


def test_frames_of_a_kind_that_is_not_known_are_skipped():
    """Newer engines may have more to say."""
    payload = msgspec.msgpack.encode(("weather", {"sun": [1, 2]}))
    unknown = len(payload).to_bytes(4, "little") + payload
    data = unknown + pack_frame(HELLO) + unknown + pack_frame(WHOLE) + unknown
    assert FrameReader().feed(data) == [HELLO, WHOLE]
    reader = FrameReader()
    got = [frame for at in range(len(data)) for frame in reader.feed(data[at : at + 1])]
    assert got == [HELLO, WHOLE]


def test_a_stream_that_begins_anew_keeps_what_the_shared_store_holds():
    rig = Rig()
    hello = Hello("e1", "m", ["m"], tiers=["SHARED_STORAGE"], kv_store="a")
    rig.take(hello, Snapshot(pack_stored((7, 16)), last=True))
    tiers = rig.endpoint.tiers
    assert tiers is not None and rig.index.num_keys(tiers.slots[0]) == 1
    rig.follower.begin()
    rig.take(hello, WHOLE)
    tiers = rig.endpoint.tiers
    assert tiers is not None and rig.index.num_keys(tiers.slots[0]) == 1 and rig.num_keys == 0
    rig.follower.begin()
    rig.take(Hello("e1", "m", ["m"], tiers=["SHARED_STORAGE"], kv_store="b"), WHOLE)
    tiers = rig.endpoint.tiers
    assert tiers is not None and rig.index.num_keys(tiers.slots[0]) == 0
