"""Two layers of different shapes in two groups, over one pool of blocks: the first sees everything,
the second a window, whose older blocks were given back.

Red when: a layer reads or writes by the other group's table; blocks of one group lie where those of
the other do; the step's check looks at entries that no token sees.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from octavo_engine import _native
from tests.kernels.harness import Recorder, pack

WIDE: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 32}
NARROW: dict[str, Any] = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 16}
WINDOW = 24
LENGTH = 100
NUM_BLOCKS = 20
LAYERS = [(0, 0, 2, 32), (1, 0, 1, 16)]


def columns(shape: dict[str, Any]) -> int:
    heads: int = shape["num_heads"] + 2 * shape["num_kv_heads"]
    head_dim: int = shape["head_dim"]
    return heads * head_dim


class Twins:
    """Both layers over the same tokens, and each alone over a cache of its own."""

    def __init__(self, kv_dtype: str) -> None:
        self.team = _native.Team(2)
        rng = np.random.default_rng(3)
        self.inputs = [
            rng.standard_normal((LENGTH, columns(shape))).astype(np.float32)
            for shape in (WIDE, NARROW)
        ]
        self.program, self.outs = self._program([0, 1], [0, 1])
        self.kv = _native.KVCache(NUM_BLOCKS, LAYERS, [0, WINDOW], kv_dtype)
        self.kv.poison(list(range(NUM_BLOCKS)))
        self.free = rng.permutation(NUM_BLOCKS).tolist()
        self.tables = np.full((2, 1, 7), -1, np.int32)
        self.kv_dtype = kv_dtype

    def _program(self, which: list[int], groups: list[int]) -> tuple[_native.Program, list[int]]:
        recorder = Recorder(self.team, LENGTH)
        outs = []
        for layer, (index, group) in enumerate(zip(which, groups, strict=True)):
            shape = (WIDE, NARROW)[index]
            qkv = recorder.buffer(columns(shape))
            out = recorder.buffer(shape["num_heads"] * shape["head_dim"])
            recorder.program.embed(qkv, pack(self.team, self.inputs[index], "f32"), 1.0)
            window = WINDOW if index else 0
            heads = shape["num_heads"], shape["num_kv_heads"], shape["head_dim"]
            recorder.program.attention(out, qkv, layer, *heads, 0.3, window=window, group=group)
            outs.append(out)
        return recorder.program, outs

    def alone(self, index: int) -> np.ndarray[Any, Any]:
        """One layer, which keeps everything, in one step."""
        program, (out,) = self._program([index], [0])
        shape = (WIDE, NARROW)[index]
        layer = (0, 0, shape["num_kv_heads"], shape["head_dim"])
        kv = _native.KVCache(7, [layer], [0], self.kv_dtype)
        program.run(kv, **self.arrays(0, LENGTH, np.arange(7, dtype=np.int32)[None, None]))
        return program.read(out, LENGTH).copy()

    def arrays(self, start: int, end: int, tables: np.ndarray[Any, Any]) -> dict[str, Any]:
        at = np.arange(start, end, dtype=np.int32)
        return {
            "token_ids": at,
            "positions": at,
            "slots": np.ascontiguousarray(tables[:, 0, at // 16] * 16 + at % 16, np.int32),
            "seq_starts": np.array([0, end - start], np.int32),
            "seq_lens": np.array([end], np.int32),
            "rows": np.zeros(1, np.int32),
            "block_tables": tables,
            "logit_rows": np.zeros(0, np.int32),
        }

    def run(self, start: int, end: int) -> list[np.ndarray[Any, Any]]:
        for group in range(2):
            for place in range(-(-end // 16)):
                is_seen = group == 0 or place >= max(0, start - WINDOW + 1) // 16
                if is_seen and self.tables[group, 0, place] < 0:
                    self.tables[group, 0, place] = self.free.pop()
        self.program.run(self.kv, **self.arrays(start, end, self.tables))
        result = [self.program.read(out, end - start).copy() for out in self.outs]
        gone = max(0, end - WINDOW + 1) // 16
        for place in range(gone):
            block = int(self.tables[1, 0, place])
            if block >= 0:
                self.kv.poison([block])
                self.free.append(block)
                self.tables[1, 0, place] = -1
        return result


@pytest.mark.parametrize("kv_dtype", ["f32", "bf16", "int8"])
@pytest.mark.parametrize("chunks", [[40, 1, 1, 30, 28], [16] * 6 + [4], [99, 1]])
def test_the_bits_are_those_of_each_layer_alone(kv_dtype: str, chunks: list[int]) -> None:
    twins = Twins(kv_dtype)
    parts: list[list[np.ndarray[Any, Any]]] = [[], []]
    start = 0
    for count in chunks:
        for index, rows in enumerate(twins.run(start, start + count)):
            parts[index].append(rows)
        start += count
    for index in range(2):
        assert np.array_equal(np.concatenate(parts[index]), twins.alone(index))


def test_only_entries_that_are_seen_must_be_blocks() -> None:
    twins = Twins("f32")
    twins.run(0, 60)
    assert twins.tables[1, 0].tolist()[:2] == [-1, -1]
    arrays = twins.arrays(60, 61, twins.tables)
    twins.program.run(twins.kv, **arrays)
    seen = twins.tables.copy()
    seen[1, 0, 2] = -1  # position 37 is the first that is seen
    with pytest.raises(ValueError, match=r"block_tables\[1\]\[0\]\[2\] is -1"):
        twins.program.run(twins.kv, **{**arrays, "block_tables": seen})
    seen[1, 0, 2], seen[0, 0, 0] = 0, -1
    with pytest.raises(ValueError, match=r"block_tables\[0\]\[0\]\[0\] is -1"):
        twins.program.run(twins.kv, **{**arrays, "block_tables": seen})


def test_a_program_and_a_cache_of_other_groups_do_not_meet() -> None:
    twins = Twins("f32")
    arrays = twins.arrays(0, 1, np.zeros((2, 1, 7), np.int32))
    for layers, windows, message in (
        ([(0, 0, 2, 32), (0, 1, 1, 16)], [0, 24], "layer 1 is of group 1, but in the KV cache of"),
        (LAYERS, [0, 23], "layer 1 sees 24 tokens .* but its group's blocks hold 23"),
        (LAYERS, [24, 24], "layer 0 sees 0 tokens .* but its group's blocks hold 24"),
        (LAYERS, [0, 24, 24], "block_tables are of 2 groups; the cache has 3"),
    ):
        with pytest.raises(ValueError, match=message):
            twins.program.run(_native.KVCache(NUM_BLOCKS, layers, windows, "f32"), **arrays)
    with pytest.raises(ValueError, match="slots are of 1 groups, block_tables of 2"):
        twins.program.run(twins.kv, **{**arrays, "slots": arrays["slots"][:1]})
