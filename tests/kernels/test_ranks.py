"""The barrier and the ring of several ranks, each rank here a thread with its own mapping."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from octavo_engine import _native

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def file() -> Iterator[int]:
    descriptor = os.memfd_create("octavo-test")
    yield descriptor
    os.close(descriptor)


def make_ranks(file: int, size: int, patience_s: float = 60.0) -> list[_native.Ranks]:
    return [_native.Ranks(rank, size, 1, file, patience_s) for rank in range(size)]


@pytest.mark.parametrize("pause_s", [0.0, 0.02], ids=["spinning", "parked"])
def test_nobody_passes_before_all_have_arrived(file: int, pause_s: float) -> None:
    size, rounds = 3, 40
    arrived = [0] * size

    def work(ranks: _native.Ranks) -> None:
        for number in range(1, rounds + 1):
            if ranks.rank == number % size:
                time.sleep(pause_s)
            arrived[ranks.rank] = number
            assert ranks.barrier()
            assert min(arrived) >= number

    with ThreadPoolExecutor(size) as threads:
        list(threads.map(work, make_ranks(file, size)))
    assert arrived == [rounds] * size


def test_a_rank_that_fails_ends_every_wait(file: int) -> None:
    ranks = make_ranks(file, 3)
    with ThreadPoolExecutor(2) as threads:
        waiting = [threads.submit(each.barrier) for each in ranks[:2]]
        time.sleep(0.02)
        assert not any(each.done() for each in waiting)
        ranks[0].fail(2)
        assert [each.result(10) for each in waiting] == [False, False]
    ranks[1].fail(1)  # only the first one counts
    assert [each.failed for each in ranks] == [2, 2, 2]
    assert not ranks[2].barrier()


def test_a_barrier_gives_up_the_rank_that_is_behind(file: int) -> None:
    ranks = make_ranks(file, 3, patience_s=0.3)
    with ThreadPoolExecutor(2) as threads:
        waiting = [threads.submit(each.barrier) for each in (ranks[0], ranks[2])]
        assert [each.result(10) for each in waiting] == [False, False]
    assert ranks[0].failed == 1


def test_messages_arrive_whole_and_in_order(file: int) -> None:
    rings = [_native.Ring(rank, 3, file, 1000) for rank in range(3)]
    sent = [bytes([number % 251]) * (number * 7 % 1001) for number in range(300)]

    def read(ring: _native.Ring) -> list[bytes]:
        return [ring.take() for _ in sent]

    with ThreadPoolExecutor(2) as threads:
        readers = [threads.submit(read, ring) for ring in rings[1:]]
        for message in sent:
            assert rings[0].put(message, 10.0)
        assert all(reader.result(10) == sent for reader in readers)


def test_a_reader_that_sleeps_is_woken(file: int) -> None:
    writer, reader = (_native.Ring(rank, 2, file, 10) for rank in range(2))
    found: list[bytes] = []
    thread = threading.Thread(target=lambda: found.append(reader.take()))
    thread.start()
    time.sleep(0.05)
    writer.put(b"now", 1.0)
    thread.join(5)
    assert found == [b"now"]


def test_a_reader_may_wait_for_a_while_only(file: int) -> None:
    writer, reader = (_native.Ring(rank, 2, file, 10) for rank in range(2))
    assert reader.take_within(0.0) is None
    assert reader.take_within(0.05) is None
    writer.put(b"late", 1.0)
    assert reader.take_within(0.0) == b"late"
    assert reader.take_within(0.01) is None


def test_a_full_ring_says_who_does_not_read(file: int) -> None:
    rings = [_native.Ring(rank, 3, file, 10) for rank in range(3)]
    for _ in range(4):
        assert rings[0].put(b"x", 0.01)
    for _ in range(2):
        rings[1].take()
    assert not rings[0].put(b"y", 0.01)
    assert rings[0].slowest == 2
    rings[2].take()
    assert rings[0].put(b"y", 0.01)


def test_what_cannot_be_is_refused(file: int) -> None:
    ring = _native.Ring(0, 2, file, 10)
    with pytest.raises(ValueError, match="a message of 11 bytes; the most are 10"):
        ring.put(b"x" * 11, 1.0)
    with pytest.raises(ValueError, match="rank 0 only writes"):
        ring.take()
    with pytest.raises(ValueError, match="rank 1 only reads"):
        _native.Ring(1, 2, file, 10).put(b"x", 1.0)
    with pytest.raises(ValueError, match="rank is 2 of 2"):
        _native.Ranks(2, 2, 1, file, 1.0)
    with pytest.raises(ValueError, match="size is 65"):
        _native.Ranks(0, 65, 1, file, 1.0)
    with pytest.raises(ValueError, match="no rank 7 of 2"):
        _native.Ranks(0, 2, 1, file, 1.0).fail(7)
    with pytest.raises(ValueError, match="4 threads; every rank must have the same number"):
        _native.Program(_native.Team(4), 64, 1, 1, ranks=_native.Ranks(0, 2, 2, file, 1.0))
    team = _native.Team(1)
    with pytest.raises(ValueError, match="first_row is 8; it must be a multiple of 16"):
        _native.Packed([(16, "f32")], 4, first_row=8, total_rows=64)
    with pytest.raises(ValueError, match="32 rows from row 48 on, of 64"):
        _native.Packed([(32, "f32")], 4, first_row=48, total_rows=64)
    with pytest.raises(ValueError, match="parts of two halves need mode glu"):
        program = _native.Program(team, 4096, 1, 1)
        half = _native.Packed([(32, "f32")], 4, first_row=0, total_rows=64, of_halves=True)
        program.linear(program.buffer(0, 64, "f32", "T"), program.buffer(512, 4, "f32", "T"), half)
