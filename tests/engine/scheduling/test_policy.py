"""The order of sequences under each policy, and the queue of those that wait."""

from __future__ import annotations

from octavo_engine.config import SchedulerConfig
from octavo_engine.scheduling.policy import WaitingQueue, place_in_line
from tests.fakes.requests import make_sequence


def test_places_in_line():
    fcfs, priority = SchedulerConfig(), SchedulerConfig(policy="priority", aging_s=5.0)
    assert place_in_line(fcfs, priority=9, number=1, arrived_at=50.0) < place_in_line(
        fcfs, priority=0, number=2, arrived_at=1.0
    )
    waits = place_in_line(priority, priority=1, number=1, arrived_at=100.0)
    assert place_in_line(priority, priority=0, number=2, arrived_at=104.9) < waits
    assert place_in_line(priority, priority=0, number=3, arrived_at=105.1) > waits


def test_the_waiting_queue_keeps_order_and_counts_tokens():
    queue = WaitingQueue()
    sequences = [make_sequence(i + 1) for i in range(4)]
    for i in (2, 0, 3, 1):
        sequences[i].order = (0.0, i)
        queue.push(sequences[i])
    assert list(queue) == sequences
    assert queue.num_tokens == 10
    queue.remove(sequences[2])
    assert list(queue) == [*sequences[:2], sequences[3]]
    assert queue.num_tokens == 7
