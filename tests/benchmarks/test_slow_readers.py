"""Slow readers, as few as still mean something; two thousand: the script itself."""

from __future__ import annotations

import pytest

from benchmarks.router.slow_readers import Scale, run

pytestmark = pytest.mark.slow

SCALE = Scale(num_readers=20, seconds=1.0, write_timeout_s=5.0)
# What few readers on a busy machine must keep, too.
KEPT = (
    "refused or not connected",
    "slots that they hold",
    "not disconnected",
    "others that failed",
)


def test_slow_readers_hold_no_slot_and_are_disconnected():
    verdict = run("router", SCALE)
    assert verdict.seen["connections when all were there"] > SCALE.num_readers / 2
    assert not [said for said in verdict.complaints if said.startswith(KEPT)], verdict
