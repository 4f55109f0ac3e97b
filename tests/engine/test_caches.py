"""Which layers share block tables, and what a page then takes."""

from __future__ import annotations

import pytest

from octavo_engine.caches import CacheGroup, CacheSpec, KVSpec, group_layers, one_group


def specs(*windows: int | None) -> list[KVSpec]:
    return [KVSpec(num_kv_heads=2, head_dim=64, window=window) for window in windows]


def pattern(num_layers: int, every: int, window: int = 512) -> list[KVSpec]:
    """One layer of `every` sees everything, as Gemma 3's."""
    return specs(*(None if (i + 1) % every == 0 else window for i in range(num_layers)))


def test_layers_that_are_alike_are_one_group():
    for window in (None, 4096):
        layout = group_layers(specs(*[window] * 30))
        assert layout.groups == (CacheGroup(window, tuple(range(30))),)
        assert [place.region for place in layout.places()] == list(range(30))


@pytest.mark.parametrize(
    ("layers", "sizes"),
    [
        (pattern(26, 6), [4, 4, 4, 4, 4, 4, 2]),  # Gemma 3 1B
        (pattern(18, 6), [3] * 6),  # Gemma 3 270M
        (pattern(62, 6), [10] * 6 + [2]),  # Gemma 3 27B
        (pattern(26, 2), [13, 13]),  # Gemma 2
        (pattern(32, 4), [8] * 4),
        (specs(*[None] * 27, *[512] * 21), [27, 21]),  # the upper layers only
    ],
)
def test_the_first_groups_hold_all_tokens_and_little_of_a_page_is_empty(layers, sizes):
    layout = group_layers(layers)
    assert [len(group.layers) for group in layout.groups] == sizes
    windows = list(layout.windows)
    num_full = windows.count(None)
    assert None not in windows[num_full:]
    assert sorted(layer for group in layout.groups for layer in group.layers) == list(
        range(len(layers))
    )


def test_the_widest_window_comes_first_where_no_layer_sees_everything():
    assert group_layers(specs(16, 64, 16, 64)).windows == (64, 16)


def test_a_page_is_as_large_as_the_largest_parts_that_lie_in_it():
    wide, narrow = KVSpec(8, 128), KVSpec(2, 64, window=100)
    layout = group_layers([wide, narrow, KVSpec(1, 256), narrow])
    assert [(place.group, place.region) for place in layout.places()] == [
        (0, 0), (1, 0), (0, 1), (1, 1),
    ]  # fmt: skip
    sizes: dict[CacheSpec, int] = {wide: 1024, narrow: 128, KVSpec(1, 256): 256}
    assert layout.page_bytes(sizes.__getitem__) == 1024 + 256


def test_one_group_keeps_everything():
    layout = one_group(specs(None, 16))
    assert layout.windows == (None,)
    assert layout.page_bytes(lambda spec: 10) == 20
