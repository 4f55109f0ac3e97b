"""Kubernetes Events: once a minute per reason, and never an error."""

from __future__ import annotations

import asyncio

from octavo_operator.errors import ClusterUnavailable
from octavo_operator.objects import kinds
from octavo_operator.report.events import EventRecorder
from tests.fakes.clock import ManualClock
from tests.fakes.cluster import FakeCluster
from tests.fakes.operator import make_deployment


def test_events_come_once_a_minute_per_reason():
    cluster, clock = FakeCluster(), ManualClock()
    recorder = EventRecorder(cluster, clock=clock, now_text=lambda: f"{clock.now}")
    body = cluster.put(make_deployment())
    for _ in range(10):
        asyncio.run(recorder.record(body, "Warning", "OutOfMemory", "m"))
    asyncio.run(recorder.record(body, "Normal", "Created", "m"))
    assert len(cluster.all(kinds.EVENT)) == 2
    clock.advance(61)
    asyncio.run(recorder.record(body, "Warning", "OutOfMemory", "m"))
    assert len(cluster.all(kinds.EVENT)) == 3


def test_an_event_that_cannot_be_posted_is_only_logged():
    cluster, clock = FakeCluster(), ManualClock()
    body = cluster.put(make_deployment())

    def fail(call: object) -> None:
        raise ClusterUnavailable("away")

    cluster.before = fail
    recorder = EventRecorder(cluster, clock=clock, now_text=lambda: "t")
    asyncio.run(recorder.record(body, "Normal", "Created", "m"))
    assert cluster.all(kinds.EVENT) == []
