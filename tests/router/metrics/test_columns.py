"""Sorting out requests that are over: the compiled sorter and its twin find the same."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest

from octavo_router.metrics import RequestRecord, bundle
from octavo_router.metrics.columns import Sorter

fast = pytest.importorskip("octavo_router._fast", reason="the compiled hot path was not built")

KIND = ("model", "status", "is_stream", "attempts")
COLUMNS = ("ended_at", "ttft_s", "prompt_tokens")


def some_records(rng: random.Random, count: int) -> list[RequestRecord]:
    return [
        RequestRecord(
            model=rng.choice(("a", "b", "".join(("long", " name")))),  # equal, not always the same
            status=rng.choice((200, 429, 503)),
            is_stream=rng.random() < 0.5,
            attempts=rng.choice((1, 1000 + count // count)),
            ended_at=float(number),
            ttft_s=rng.choice((None, rng.random())),
            prompt_tokens=rng.randrange(1 << 40),
        )
        for number in range(count)
    ]


@pytest.mark.parametrize("count", [0, 1, 64, 300])
def test_both_sorters_find_the_same(count: int):
    records = some_records(random.Random(count), count)
    found = fast.Sorter(RequestRecord, KIND, COLUMNS).sort_out(records)
    assert found == Sorter(RequestRecord, KIND, COLUMNS).sort_out(records)
    assert all(one is other for row in found for one, other in zip(row[0], row[0], strict=True))
    assert sum(len(row[0]) for row in found) == count


def test_kinds_stand_in_the_order_in_which_they_came():
    records = [RequestRecord(model=name, ended_at=at) for at, name in enumerate("bab", start=1)]
    for sorter in (fast.Sorter, Sorter):
        rows = sorter(RequestRecord, ("model",), ("ended_at",)).sort_out(records)
        assert rows == [[[records[0], records[2]], [1, 3]], [[records[1]], [2]]]


def test_the_compiled_one_takes_records_of_its_class_only():
    @dataclass(slots=True)
    class Other:
        model: str = "m"

    sorter = fast.Sorter(RequestRecord, ("model",), ())
    with pytest.raises(TypeError, match="own class"):
        sorter.sort_out([RequestRecord(), Other()])
    with pytest.raises(AttributeError, match="no_such"):
        fast.Sorter(RequestRecord, ("no_such",), ())
    with pytest.raises(TypeError, match="is not a slot"):
        fast.Sorter(RequestRecord, ("is_error",), ())


def test_groups_name_their_columns():
    record: Any = RequestRecord(ended_at=1.0, queue_s=2.0, cached_tokens=None, output_tokens=7)
    (group,) = bundle.sort_out([record])
    assert group.records == [record]
    assert (group.ended_at, group.queue_s) == ([1.0], [2.0])
    assert (group.cached_tokens, group.output_tokens) == ([None], [7])
