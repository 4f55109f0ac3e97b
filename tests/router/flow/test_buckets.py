"""Token buckets: exact levels, debts, and more than fits."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo_router.flow.buckets import Bucket


def test_it_fills_with_time_up_to_its_capacity():
    bucket = Bucket(2.0, 10.0, now=0.0)
    bucket.take(10.0, 0.0)
    assert bucket.level(0.0) == 0.0
    assert bucket.level(3.0) == 6.0
    assert bucket.level(100.0) == 10.0


def test_the_wait_is_exact():
    bucket = Bucket(2.0, 10.0, now=0.0)
    bucket.take(9.0, 0.0)
    assert bucket.wait_s(1.0, 0.0) == 0.0
    assert bucket.wait_s(4.0, 0.0) == 1.5
    assert bucket.wait_s(4.0, 1.5) == 0.0


def test_more_than_fits_passes_when_it_is_full_and_leaves_a_debt():
    bucket = Bucket(1.0, 10.0, now=0.0)
    assert bucket.wait_s(50.0, 0.0) == 0.0
    bucket.take(50.0, 0.0)
    assert bucket.level(0.0) == -40.0
    assert bucket.wait_s(1.0, 0.0) == 41.0


def test_what_was_not_used_comes_back():
    bucket = Bucket(1.0, 10.0, now=0.0)
    bucket.take(8.0, 0.0)
    bucket.give_back(5.0, 0.0)
    assert bucket.level(0.0) == 7.0
    bucket.give_back(-4.0, 0.0)
    assert bucket.level(0.0) == 3.0
    bucket.give_back(100.0, 0.0)
    assert bucket.level(0.0) == 10.0


def test_a_clock_that_steps_back_takes_nothing_away():
    bucket = Bucket(1.0, 10.0, now=100.0)
    bucket.take(5.0, 100.0)
    assert bucket.level(50.0) == 5.0
    assert bucket.level(101.0) == 6.0


@settings(max_examples=100, derandomize=True, deadline=None)
@given(st.lists(st.tuples(st.floats(0.0, 5.0), st.floats(0.1, 10.0)), max_size=40))
def test_nobody_gets_more_than_the_rate_and_one_bucket(steps):
    bucket = Bucket(2.0, 10.0, now=0.0)
    now = taken = 0.0
    for wait, amount in steps:
        now += wait
        if bucket.wait_s(amount, now) == 0.0:
            bucket.take(amount, now)
            taken += amount
    assert taken <= 10.0 + 2.0 * now + 1e-6
    assert bucket.level(now) == pytest.approx(bucket.level(now))
