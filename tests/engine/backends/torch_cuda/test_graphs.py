"""When steps are captured and replayed, with a device that only writes down what happens."""

from __future__ import annotations

import dataclasses
import functools
import random

import pytest

from octavo_engine.backends.torch.cuda import MAX_GRAPHS
from octavo_engine.backends.torch.device_step import StepSizes
from octavo_engine.backends.torch.graphs import (
    GraphCache,
    choose_bucket,
    decode_buckets,
    mixed_sizes,
    plan_buckets,
)
from tests.engine.backends.torch_cuda.steps import LIMITS, make_step


class FakeRecorder:
    """Capture runs nothing: what it recorded happens when it is replayed, as on a device."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self._recording = False
        self.is_roomy = True

    def launch(self, what: str) -> str:
        self.log.append(f"record {what}" if self._recording else f"launch {what}")
        return what

    def has_room(self):
        return self.is_roomy

    def capture(self, work):
        self._recording = True
        result = work()
        self._recording = False
        return result, lambda: self.log.append(f"replay {result}")


def test_a_bucket_is_launched_then_captured_then_replayed():
    device = FakeRecorder()
    cache = GraphCache(device, max_graphs=8)
    for _ in range(3):
        assert cache.run(4, lambda: device.launch("four")) == "four"
    assert device.log == ["launch four", "record four", "replay four", "replay four"]
    assert cache.captured == {4}


def test_runs_that_launch_first_or_capture_are_not_usual_ones():
    cache = GraphCache(FakeRecorder(), max_graphs=8)
    seen = []
    for bucket in (4, 4, 4, 8, 4):
        cache.run(bucket, lambda: "")
        seen.append(cache.take_usual())
    assert seen == [False, False, True, False, True]
    cache.run(8, lambda: "")
    cache.run(4, lambda: "")
    assert not cache.take_usual() and cache.take_usual()


def test_what_cannot_be_captured_is_launched_and_not_tried_again():
    device = FakeRecorder()
    attempts: list[int] = []
    device.capture = lambda work: attempts.append(1)  # type: ignore[method-assign]
    cache = GraphCache(device, max_graphs=8)
    for _ in range(4):
        assert cache.run(4, lambda: device.launch("four")) == "four"
    assert device.log == ["launch four"] * 4
    assert (len(attempts), cache.captured) == (1, set())
    cache.clear()  # after a sleep there may be more memory
    cache.run(4, lambda: device.launch("four"))
    cache.run(4, lambda: device.launch("four"))
    assert len(attempts) == 2


def test_a_full_cache_launches_further_buckets_and_keeps_its_graphs():
    device = FakeRecorder()
    cache = GraphCache(device, max_graphs=2)
    for bucket in (1, 1, 2, 2, 3, 3, 3, 1):
        cache.run(bucket, functools.partial(device.launch, str(bucket)))
    assert cache.captured == {1, 2}
    assert device.log[-4:] == ["launch 3", "launch 3", "launch 3", "replay 1"]


def test_a_cleared_cache_starts_anew():
    device = FakeRecorder()
    cache = GraphCache(device, max_graphs=2)
    cache.run(1, lambda: device.launch("one"))
    cache.clear()
    cache.run(1, lambda: device.launch("one"))
    assert device.log == ["launch one", "launch one"]


def test_without_room_steps_are_launched_until_there_is_some():
    device = FakeRecorder()
    cache = GraphCache(device, max_graphs=2)
    device.is_roomy = False
    for _ in range(3):
        cache.run(1, lambda: device.launch("one"))
    device.is_roomy = True
    cache.run(1, lambda: device.launch("one"))
    assert device.log == ["launch one"] * 3 + ["record one", "replay one"]


def test_mixed_steps_have_buckets_of_tokens_and_sequences():
    buckets = plan_buckets(LIMITS, MAX_GRAPHS)

    def bucket(*sequences, **options):
        return mixed_sizes(make_step(list(sequences), **options), buckets, tokens_per_tile=8)

    assert bucket((0, 9)) == StepSizes(tokens=16, seqs=4, logits=4, tiles=6)
    assert bucket((0, 16), (30, 1)) == StepSizes(tokens=32, seqs=4, logits=4, tiles=8)
    assert bucket((0, 60), (0, 60)) == StepSizes(tokens=128, seqs=4, logits=4, tiles=20)
    assert bucket((0, 129)) is None  # more than a step may have
    assert bucket(*[(1, 1)] * 14, (2, 2)) == StepSizes(tokens=16, seqs=16, logits=16, tiles=18)
    assert bucket(*[(1, 1)] * 15, (2, 2)) is None  # no sequence is left to be padding
    assert bucket((0, 9), all_logits=True) is None  # a scored prompt


def test_buckets_are_dense_where_steps_are_small():
    assert decode_buckets(1) == [1]
    assert decode_buckets(3) == [1, 2, 3]
    assert decode_buckets(20) == [1, 2, 4, 8, 16, 20]
    assert decode_buckets(300)[-6:] == [128, 160, 192, 224, 256, 300]


def test_a_step_takes_the_smallest_bucket_that_holds_it():
    sizes = decode_buckets(20)
    assert [choose_bucket(sizes, n) for n in (1, 3, 4, 5, 17, 20)] == [1, 4, 4, 8, 20, 20]
    assert choose_bucket(sizes, 21) is None


@pytest.mark.parametrize("max_seqs", [1, 2, 7, 64, 256, 300, 1024, 4096, 1 << 20])
@pytest.mark.parametrize("max_tokens", [8, 100, 512, 8192])
def test_there_are_no_more_buckets_than_graphs(max_seqs, max_tokens):
    limits = dataclasses.replace(LIMITS, max_seqs=max_seqs, max_tokens=max_tokens)
    buckets = plan_buckets(limits, MAX_GRAPHS)
    assert buckets.total <= MAX_GRAPHS
    assert buckets.decode[-1] == max_seqs  # every decode step has one
    for sizes in (buckets.decode, *buckets.mixed.values()):
        assert sizes == sorted(set(sizes))
    assert all(tokens <= max_tokens and seqs[-1] <= max_seqs
               for tokens, seqs in buckets.mixed.items())  # fmt: skip
    for size, following in zip(buckets.decode[3:], buckets.decode[4:], strict=False):
        if max_seqs <= 1024:
            assert following <= max(2 * size, 8) and following - size <= max(8, size // 4)


@pytest.mark.parametrize("max_seqs", [64, 256, 1024])
def test_traffic_of_all_sizes_captures_each_bucket_once(max_seqs):
    """A day's load in little: the batch grows and shrinks, and prompts come in between."""
    limits = dataclasses.replace(LIMITS, max_seqs=max_seqs, max_tokens=2048)
    buckets = plan_buckets(limits, MAX_GRAPHS)
    device = FakeRecorder()
    cache = GraphCache(device, max_graphs=MAX_GRAPHS)
    rng = random.Random(5)
    num_running, launched_late = 1.0, 0
    for number in range(20_000):
        num_running = min(max_seqs - 1.0, max(1.0, num_running * rng.uniform(0.9, 1.113)))
        seqs = int(num_running)
        bucket: object = choose_bucket(buckets.decode, seqs)
        if rng.random() < 0.3:
            tokens = choose_bucket(list(buckets.mixed), seqs + rng.randint(2, 300))
            if tokens is None:
                continue
            bucket = tokens, choose_bucket(buckets.mixed[tokens], seqs + 1)
        before = len(device.log)
        cache.run(bucket, functools.partial(device.launch, str(bucket)))
        launched_late += number > 10_000 and device.log[before].startswith("launch")
    captures = [entry for entry in device.log if entry.startswith("record")]
    assert 20 < len(captures) == len(set(captures)) <= MAX_GRAPHS
    assert launched_late < 20  # buckets that were met for the first time
