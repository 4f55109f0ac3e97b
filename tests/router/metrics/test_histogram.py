"""Histograms: every value in one bucket, however it was counted."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo_router import _fast
from octavo_router.metrics.histogram import LATENCY_BUCKETS, Histogram, tally

BOUNDS = (0.0, 1.0, 2.5)
values = st.lists(
    st.one_of(st.integers(-2, 5), st.floats(-1.0, 4.0), st.sampled_from([1.0, 2.5, float("inf")])),
    max_size=50,
)


@settings(max_examples=200, derandomize=True, deadline=None)
@given(values)
def test_one_by_one_at_once_and_compiled_come_to_the_same(values):
    single = Histogram(BOUNDS)
    for value in values:
        single.observe(value)
    for count_all in (tally, _fast.tally):
        counts = [0, 0, 0, 0]
        total = count_all(BOUNDS, values, counts)
        assert counts == single.counts
        assert total == pytest.approx(single.sum)


def test_a_bound_belongs_to_the_bucket_below_it():
    histogram = Histogram(BOUNDS)
    histogram.observe_all([0.0, 1.0, 1.5, 2.5, 3.0])
    histogram.observe_all([1.0])
    histogram.observe_all([])
    assert histogram.counts == [1, 2, 2, 1]
    assert histogram.sum == 9.0
    assert histogram.cumulative() == [("0.0", 1.0), ("1.0", 3.0), ("2.5", 5.0), ("+Inf", 6.0)]


@pytest.mark.parametrize("count_all", [tally, _fast.tally])
def test_what_is_no_number_is_not_counted_silently(count_all):
    with pytest.raises(TypeError):
        count_all(LATENCY_BUCKETS, ["1"], [0] * (len(LATENCY_BUCKETS) + 1))
