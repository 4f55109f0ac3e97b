"""When steps are captured and replayed, with a device that only writes down what happens."""

from __future__ import annotations

import functools

from octavo_engine.backends.torch.device_step import StepSizes
from octavo_engine.backends.torch.graphs import (
    GraphCache,
    bucket_sizes,
    choose_bucket,
    mixed_sizes,
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


def test_the_graph_unused_for_longest_makes_room():
    device = FakeRecorder()
    cache = GraphCache(device, max_graphs=2)
    for bucket in (1, 1, 2, 2, 1, 3, 3):
        cache.run(bucket, functools.partial(device.launch, str(bucket)))
    assert cache.captured == {1, 3}
    device.log.clear()
    cache.run(2, lambda: device.launch("2"))
    assert device.log == ["record 2", "replay 2"]  # it is warm: nothing needs to be compiled
    assert cache.captured == {2, 3}


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
    def bucket(*sequences, **options):
        return mixed_sizes(make_step(list(sequences), **options), LIMITS, tokens_per_tile=8)

    assert bucket((0, 9)) == StepSizes(tokens=16, seqs=2, logits=2, tiles=4)
    assert bucket((0, 16), (30, 1)) == StepSizes(tokens=32, seqs=4, logits=4, tiles=8)
    assert bucket((0, 60), (0, 60)) == StepSizes(tokens=128, seqs=4, logits=4, tiles=20)
    assert bucket((0, 129)) is None  # more than a step may have
    assert bucket(*[(1, 1)] * 14, (2, 2)) == StepSizes(tokens=16, seqs=16, logits=16, tiles=18)
    assert bucket(*[(1, 1)] * 15, (2, 2)) is None  # no sequence is left to be padding
    assert bucket((0, 9), all_logits=True) is None  # a scored prompt


def test_buckets_are_dense_where_steps_are_small():
    assert bucket_sizes(1) == [1]
    assert bucket_sizes(3) == [1, 2, 3]
    assert bucket_sizes(20) == [1, 2, 4, 8, 16, 20]
    assert bucket_sizes(300)[-5:] == [248, 256, 272, 288, 300]


def test_a_step_takes_the_smallest_bucket_that_holds_it():
    sizes = bucket_sizes(20)
    assert [choose_bucket(sizes, n) for n in (1, 3, 4, 5, 17, 20)] == [1, 4, 4, 8, 20, 20]
    assert choose_bucket(sizes, 21) is None
