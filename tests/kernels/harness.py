"""Runs single instructions of the extension on rows, and paged attention on sequences."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from octavo_engine import _native

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    Floats = NDArray[np.float32]
    Ints = NDArray[np.int32]

ISAS = _native.available_isas()


def bf16(values: NDArray[np.floating]) -> Floats:
    """Rounded to the nearest bf16, ties to even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return rounded.astype(np.uint32).view(np.float32).reshape(np.shape(values))


def raw(values: NDArray[np.floating]) -> NDArray[np.uint8]:
    return np.ascontiguousarray(values, np.float32).view(np.uint8).reshape(-1)


def pack(team: _native.Team, matrix: Floats, dtype: str) -> _native.Packed:
    rows, cols = matrix.shape
    packed = _native.Packed(rows, cols, dtype)
    packed.pack(team, 0, raw(matrix), "F32", len(matrix))
    return packed


def uniform_kv(
    num_layers: int, num_blocks: int, num_kv_heads: int, head_dim: int, dtype: str
) -> _native.KVCache:
    """A cache of layers that are all alike and keep all tokens."""
    layers = [(0, layer, num_kv_heads, head_dim) for layer in range(num_layers)]
    return _native.KVCache(num_blocks, layers, [0], dtype)


class Recorder:
    """A program whose buffers lie one behind the other in a large arena."""

    def __init__(
        self,
        team: _native.Team,
        max_tokens: int,
        max_logit_rows: int = 0,
        activation_bits: int = 16,
    ) -> None:
        self.program = _native.Program(team, 1 << 30, max_tokens, max_logit_rows, activation_bits)
        self._max_rows = max(max_tokens, max_logit_rows)
        self._offset = 0

    def buffer(self, cols: int, dtype: str = "f32", rows: str = "T") -> int:
        number = self.program.buffer(self._offset, cols, dtype, rows)
        self._offset += -(-self._max_rows * cols * 4 // 64) * 64
        return number


@dataclass
class StepArrays:
    """The arrays of one step; by default one sequence of `num_tokens` in blocks 0, 1, …"""

    num_tokens: int
    logit_rows: Sequence[int] = ()
    changes: dict[str, object] = field(default_factory=dict)

    def arrays(self) -> dict[str, Any]:
        count = np.arange(self.num_tokens)
        arrays: dict[str, object] = {
            "token_ids": count,
            "positions": count,
            "slots": count[None],
            "seq_starts": [0, self.num_tokens],
            "seq_lens": [self.num_tokens],
            "rows": [0],
            "block_tables": np.arange(-(-self.num_tokens // 16) or 1)[None, None],
            "logit_rows": self.logit_rows,
        }
        return {name: np.asarray(v, np.int32) for name, v in (arrays | self.changes).items()}


def run_rows(
    team: _native.Team,
    x: Floats,
    build: Callable[[Recorder, int], int],
    *,
    logit_rows: Sequence[int] = (),
    rows: str = "T",
    activation_bits: int = 16,
) -> Floats:
    """Feed x to the instructions that `build` adds; the rows of the buffer it returns."""
    recorder = Recorder(team, max(1, len(x)), len(logit_rows), activation_bits)
    src = recorder.buffer(x.shape[1])
    table = pack(team, x if len(x) else np.zeros((1, x.shape[1]), np.float32), "f32")
    recorder.program.embed(src, table, 1.0)
    dst = build(recorder, src)
    kv = uniform_kv(1, len(x) // 16 + 1, 1, 16, "f32")
    recorder.program.run(kv, **StepArrays(len(x), logit_rows).arrays())
    return recorder.program.read(dst, len(x) if rows == "T" else len(logit_rows)).copy()


@dataclass(frozen=True)
class AttentionCase:
    """A layer's attention and what it is given."""

    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    scale: float = 0.2
    rotary_dim: int = 32
    window: int = 0
    is_chunked: bool = False
    query_scales: Floats | None = None
    soft_cap: float = 0.0
    q_norm: Floats | None = None
    k_norm: Floats | None = None
    kv_dtype: str = "f32"
    dst_dtype: str = "f32"

    @property
    def qkv_cols(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    def cos_sin(self, num_positions: int) -> Floats | None:
        if self.rotary_dim == 0:
            return None
        half = self.rotary_dim // 2
        inv_freq = 10000.0 ** -(np.arange(half) / half)
        angles = np.arange(num_positions)[:, None] * inv_freq
        return np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)


class PagedAttention:
    """Sequences computed in any order of steps, over shuffled and poisoned blocks. Those in
    `prefixes` begin with so many tokens of another one, in its blocks."""

    def __init__(
        self,
        case: AttentionCase,
        qkv: Sequence[Floats],
        team: _native.Team,
        *,
        max_tokens: int = 4096,
        seed: int = 0,
        prefixes: Mapping[int, tuple[int, int]] = MappingProxyType({}),
    ) -> None:
        self.case, self.qkv = case, list(qkv)
        self.lengths = [0] * len(qkv)
        self.outputs = [np.zeros((0, case.num_heads * case.head_dim), np.float32) for _ in qkv]
        widths = [-(-len(rows) // 16) for rows in qkv]
        num_blocks = sum(widths) + 3
        self.kv = uniform_kv(1, num_blocks, case.num_kv_heads, case.head_dim, case.kv_dtype)
        self.kv.poison(list(range(num_blocks)))
        free = iter(np.random.default_rng(seed).permutation(num_blocks))
        self.block_tables = np.full((len(qkv), max(widths) + 1), -1, np.int32)
        for row, width in enumerate(widths):
            self.block_tables[row, :width] = [next(free) for _ in range(width)]
        for row, (other, length) in prefixes.items():
            self.block_tables[row, : length // 16] = self.block_tables[other, : length // 16]
            self.lengths[row] = length
        self._first_id = np.cumsum([0, *(len(rows) for rows in qkv)])
        recorder = Recorder(team, max_tokens)
        self.program = recorder.program
        source = recorder.buffer(case.qkv_cols)
        self._dst = recorder.buffer(case.num_heads * case.head_dim, case.dst_dtype)
        self.program.embed(source, pack(team, np.concatenate(self.qkv), "f32"), 1.0)
        self.program.attention(
            self._dst,
            source,
            layer=0,
            num_heads=case.num_heads,
            num_kv_heads=case.num_kv_heads,
            head_dim=case.head_dim,
            scale=case.scale,
            rotary_dim=case.rotary_dim,
            cos_sin=case.cos_sin(max(len(rows) for rows in qkv)),
            window=case.window,
            is_chunked=case.is_chunked,
            query_scales=case.query_scales,
            soft_cap=case.soft_cap,
            q_norm=case.q_norm,
            k_norm=case.k_norm,
        )

    def step(self, counts: Sequence[tuple[int, int]]) -> None:
        """Compute the next `count` tokens of each named sequence."""
        ids, positions, slots, starts, lens = [], [], [], [0], []
        for seq, count in counts:
            span = np.arange(self.lengths[seq], self.lengths[seq] + count)
            ids.append(self._first_id[seq] + span)
            positions.append(span)
            slots.append(self.block_tables[seq, span // 16] * 16 + span % 16)
            starts.append(starts[-1] + count)
            self.lengths[seq] += count
            lens.append(self.lengths[seq])
        as_ints = lambda parts: np.concatenate(parts).astype(np.int32)  # noqa: E731
        self.program.run(
            self.kv,
            as_ints(ids),
            as_ints(positions),
            as_ints(slots)[None],
            np.array(starts, np.int32),
            np.array(lens, np.int32),
            np.array([seq for seq, _ in counts], np.int32),
            self.block_tables[None],
            np.zeros(0, np.int32),
        )
        rows = self.program.read(self._dst, starts[-1])
        for (seq, _), begin, end in zip(counts, starts[:-1], starts[1:], strict=True):
            self.outputs[seq] = np.concatenate([self.outputs[seq], rows[begin:end]])
