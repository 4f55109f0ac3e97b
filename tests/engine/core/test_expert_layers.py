"""Counts of experts are reported once a second, and when there is nothing to do."""

from __future__ import annotations

from octavo_engine.core.expert_layers import EVERY_S, ExpertLayers


def test_counts_come_now_and_then_and_at_rest() -> None:
    now, counts = 100.0, [[], [3, 4]]
    layers = ExpertLayers(lambda: now)
    layers.forget([[], [1, 0]])
    assert layers.take(lambda: counts, is_idle=False) == [[], [2, 4]]
    assert layers.take(lambda: counts, is_idle=False) == []
    assert layers.take(lambda: counts, is_idle=True) == [[], [2, 4]]
    now += EVERY_S
    assert layers.take(lambda: [[], [9, 4]], is_idle=False) == [[], [8, 4]]
