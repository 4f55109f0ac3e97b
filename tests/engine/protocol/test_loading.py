"""How far a start is, in words and as others may have written it."""

from __future__ import annotations

import dataclasses

import pytest

from octavo_engine.protocol.loading import LoadProgress, read_progress

GIB = 2**30


@pytest.mark.parametrize(
    ("progress", "words"),
    [
        (LoadProgress("loading", int(1.2 * GIB), int(3.9 * GIB), 400 * 2**20),
         "loading weights: 1.2 of 3.9 GiB at 400.0 MiB/s, 7 s left"),
        (LoadProgress("loading", 50 * 2**20, GIB), "loading weights: 0.0 of 1.0 GiB"),
        (LoadProgress("fetching", 3 * 2**20), "fetching weights: 3.0 MiB"),
        (LoadProgress("fetching"), "fetching weights"),
        (LoadProgress("loading", GIB, GIB, GIB), "loading weights: 1.0 of 1.0 GiB at 1.0 GiB/s"),
        (LoadProgress("loading", 1, 2, 0), "loading weights: 0.0 of 0.0 KiB"),
    ],
)  # fmt: skip
def test_it_reads_as_people_say_it(progress, words):
    assert str(progress) == words


def test_what_is_left_is_rounded_up_and_bounded():
    assert LoadProgress("loading", 0, 1001, 1000).remaining_s == 2
    assert LoadProgress("loading", 7, 7, 1000).remaining_s == 0
    assert LoadProgress("loading", 9, 7, 1000).remaining_s == 0
    assert LoadProgress("loading", 0, 2**53, 1).remaining_s == 2**31 - 1
    assert LoadProgress("loading", 0, 7).remaining_s is None
    assert LoadProgress("fetching", 5, 0, 7).remaining_s is None


def test_the_share_needs_a_whole():
    assert LoadProgress("loading", 1, 4).share == 0.25
    assert LoadProgress("loading", 5, 4).share == 1.0
    assert LoadProgress("fetching", 5).share is None


def test_it_survives_a_body():
    progress = LoadProgress("fetching", 1, 2, 3)
    assert read_progress(dataclasses.asdict(progress)) == progress


@pytest.mark.parametrize(
    "reported", [None, "x", [], {}, {"phase": 7}, {"phase": "polishing", "bytes_done": 1}]
)
def test_what_says_nothing_is_nothing(reported):
    assert read_progress(reported) is None


@pytest.mark.parametrize("count", [-1, True, "7", None, float("nan"), float("inf"), {}])
def test_what_is_no_number_of_bytes_counts_as_unknown(count):
    assert read_progress({"phase": "loading", "bytes_done": count}) == LoadProgress("loading")


def test_numbers_stay_exact_in_any_json():
    assert read_progress({"phase": "loading", "bytes_done": 1e40}) == LoadProgress("loading", 2**53)
