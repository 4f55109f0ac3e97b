"""Comparison of applied and found objects."""

from __future__ import annotations

import pytest

from octavo_operator.objects.compare import holds


class TestCompare:
    @pytest.mark.parametrize(
        ("found", "applied"),
        [
            ({"a": 1, "more": 2}, {"a": 1}),
            ({"cpu": "1"}, {"cpu": "1000m"}),
            ({"memory": "8Gi"}, {"memory": "8589934592"}),
            ({}, {"flag": False}),
            ({}, {"empty": {}}),
            ({"a": 1}, {"a": 1, "absent": None}),
            ([{"n": 1, "default": True}], [{"n": 1}]),
        ],
    )
    def test_what_the_server_adds_or_rewrites_is_no_drift(self, found, applied):
        assert holds(found, applied)

    @pytest.mark.parametrize(
        ("found", "applied"),
        [
            ({"a": 1}, {"a": 2}),
            ({}, {"a": 1}),
            ([1, 2], [1]),
            ([1], [1, 2]),
            ({"a": "1"}, {"a": "2"}),
            ({"flag": True}, {"flag": False}),
            ({"flag": True}, {"flag": 1.5}),
            ([1], []),
        ],
    )
    def test_what_others_changed_is(self, found, applied):
        assert not holds(found, applied)
