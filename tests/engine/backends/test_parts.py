"""A tile that is encoded in parts has the bits of one that is encoded at once."""

from __future__ import annotations

import numpy as np
import pytest

from octavo_engine.backends.native.facts import OpFacts
from octavo_engine.backends.native.media import NativeMediaEncoder
from octavo_engine.backends.native.parts import op_costs, part_bounds
from tests.engine.models.tiny_seeing import SEEING, seeing_model, tile

MANY = 200  # more than a tiny tower has instructions


@pytest.mark.parametrize("name", SEEING)
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_parts_have_the_bits_of_the_whole(name: str, dtype: str) -> None:
    media = seeing_model(name).backend(dtype, num_threads=2).media
    assert media is not None
    for seed in range(2):
        item = tile(media.config, seed)
        whole = media.encode(item)
        for num_parts in (1, 2, 3, 7, MANY):
            *others, last = (media.encode_part(item, part, num_parts) for part in range(num_parts))
            assert all(rows is None for rows in others)
            assert last is not None and np.array_equal(last, whole)


@pytest.mark.parametrize("dtype", ["f32", "torch"])
def test_parts_that_do_not_follow_are_refused_and_part_0_begins_anew(dtype: str) -> None:
    media = seeing_model("llava").backend(dtype).media
    assert media is not None
    item, other = tile(media.config, 1), tile(media.config, 2)
    whole = media.encode(item)
    for bad in [(item, 2, 4), (item, 1, 3), (other, 1, 4)]:
        media.encode_part(item, 0, 4)
        with pytest.raises(ValueError, match="does not follow"):
            media.encode_part(*bad)
        with pytest.raises(ValueError, match="does not follow"):
            media.encode_part(item, 1, 4)  # what was under way is given up
    media.encode_part(other, 0, 2)
    rows = [media.encode_part(item, part, 4) for part in range(4)]
    assert rows[3] is not None and np.array_equal(rows[3], whole)


@pytest.mark.parametrize("name", SEEING)
def test_costs_are_known_of_all_instructions_of_towers(name: str) -> None:
    """Else parts are cut as if all took the same time."""
    media = seeing_model(name).backend("bf16").media
    assert isinstance(media, NativeMediaEncoder)
    assert media._tower.program.num_instructions == len(media._tower.ops)


def test_attention_costs_what_it_sees() -> None:
    ops = [
        OpFacts("linear", "T", flops_per_row=50),
        OpFacts("attention", "T", flops_per_pair=4),
        OpFacts("attention", "T", flops_per_pair=4, is_segmented=True),
        OpFacts("add", "T"),
    ]
    assert op_costs(ops, num_rows=100, window_rows=16) == [51, 401, 65, 1]


@pytest.mark.parametrize(
    ("costs", "num_parts", "bounds"),
    [
        ([1, 1, 1, 1], 1, [0, 4]),
        ([1, 1, 1, 1], 2, [0, 2, 4]),
        ([9, 1, 1, 9], 3, [0, 1, 3, 4]),
        ([1, 2], 4, [0, 1, 2, 2, 2]),
    ],
)
def test_parts_cost_about_the_same(costs: list[int], num_parts: int, bounds: list[int]) -> None:
    assert part_bounds(costs, num_parts) == bounds
