"""The write guard: its rate limit and its deadline."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from octavo_operator.cluster.guard import GuardedCluster, TokenBucket
from octavo_operator.errors import ClusterUnavailable
from octavo_operator.metrics import OperatorMetrics
from tests.fakes.clock import ManualClock
from tests.fakes.cluster import FakeCluster
from tests.fakes.operator import make_deployment

if TYPE_CHECKING:
    from octavo_operator.objects import kinds


def test_try_take_never_overdraws():
    clock = ManualClock()
    bucket = TokenBucket(per_second=10.0, burst=2, clock=clock)
    assert [bucket.try_take() for _ in range(4)] == [True, True, False, False]
    clock.advance(0.1)
    assert [bucket.try_take() for _ in range(2)] == [True, False]


def test_a_write_that_lasts_is_given_up_before_another_replica_may_begin():
    class Slow(FakeCluster):
        async def apply(self, body: kinds.Object) -> kinds.Object:
            await asyncio.sleep(60)
            return body

    clock = ManualClock()
    metrics = OperatorMetrics()
    guarded = GuardedCluster(
        Slow(),
        may_write=lambda: True,
        bucket=TokenBucket(per_second=10.0, burst=3, clock=clock),
        metrics=metrics,
        time_left_s=lambda: 0.01,
    )
    with pytest.raises(ClusterUnavailable, match="no answer while the Lease was surely ours"):
        asyncio.run(guarded.apply(make_deployment()))
    assert metrics.errors[("apply", "TimeoutError")] == 1


def test_a_bucket_lets_a_burst_through_and_then_a_stream():
    clock = ManualClock()
    bucket = TokenBucket(per_second=10.0, burst=3, clock=clock)
    assert [bucket.take() for _ in range(5)] == [0.0, 0.0, 0.0, 0.1, 0.2]
    clock.advance(10.0)
    assert [bucket.take() for _ in range(4)] == [0.0, 0.0, 0.0, 0.1]
