"""How near decode attention comes to reading its KV cache at the machine's read bandwidth.

    python -m benchmarks.attention [--shape HEADS,KV_HEADS,HEAD_DIM] [--contexts 1024 8192 32768]
        [--sequences 1 8 32] [--formats bf16 int8 fp8_e4m3] [--shared TOKENS] [--isa ISA]
        [--max-gib 5] [--json]

Each sequence decodes one token a step, over layers enough that no cache holds their KV; blocks lie
in no order, as in a pool in use. `speed-up` is the time beside that of the first format. Formats
take turns, round by round, so that a busy neighbour slows all of them. With `--shared` each format
is measured twice, without and with so many first tokens in blocks that all sequences hold.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, NamedTuple, get_args

import numpy as np

from octavo.measure.limits import measure_limits
from octavo_engine import _native
from octavo_engine.backends.native.kv_format import FormatName
from octavo_engine.config import BLOCK_SIZE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

FAR_BEYOND_CACHES = 512 << 20
ROUNDS = 7
MAX_LAYERS = 64


class Shape(NamedTuple):
    """Of one layer's attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    @classmethod
    def parse(cls, text: str) -> Shape:
        try:
            return cls(*(int(part) for part in text.split(",")))
        except (TypeError, ValueError):
            raise argparse.ArgumentTypeError(
                f"must be three numbers such as 32,8,128; got {text!r}"
            ) from None


SHAPES = (Shape(9, 3, 64), Shape(32, 8, 128))  # SmolLM2-135M, Llama-3-8B


@dataclass(frozen=True, slots=True)
class Result:
    """One line of the table."""

    shape: str
    format: str
    context: int
    num_seqs: int
    shared: int  # first tokens that all have in common
    kv_bytes: int  # of a layer: what a step has to read once
    seconds: float  # of a layer
    read_share: float  # of the machine's bandwidth
    speed_up: float  # beside the first format, or with `shared` beside the same without


class Decode:
    """Layers of attention over one cache, and the step that decodes a token of each sequence."""

    def __init__(
        self,
        team: _native.Team,
        shape: Shape,
        kv_format: FormatName,
        context: int,
        num_seqs: int,
        shared: int = 0,
    ) -> None:
        per_seq, num_shared = context // BLOCK_SIZE, shared // BLOCK_SIZE
        num_blocks = num_shared + num_seqs * (per_seq - num_shared)
        layer_bytes = block_bytes(shape, kv_format) * num_blocks
        self.num_layers = min(MAX_LAYERS, -(-FAR_BEYOND_CACHES // layer_bytes))
        self.kv = _native.KVCache(
            num_blocks, [layer_of(shape, index) for index in range(self.num_layers)], [0], kv_format
        )
        self.kv_bytes = self.num_layers * layer_bytes
        self._program = _program(team, shape, self.num_layers, max(num_seqs, BLOCK_SIZE))
        tables = np.random.default_rng(1).permutation(num_blocks).astype(np.int32)
        own = tables[num_shared:].reshape(num_seqs, -1)
        common = np.broadcast_to(tables[:num_shared], (num_seqs, num_shared))
        self._tables = np.ascontiguousarray(np.concatenate([common, own], axis=1))
        first = int(tables[0])
        self._run(np.arange(BLOCK_SIZE) + first * BLOCK_SIZE, np.arange(BLOCK_SIZE), [BLOCK_SIZE])
        others = tables[1:]
        self.kv.copy(
            np.stack([np.full_like(others, first), others, np.full_like(others, BLOCK_SIZE)], 1)
        )
        self._context = context

    def step_s(self) -> float:
        last = self._context - 1
        slots = self._tables[:, -1] * BLOCK_SIZE + last % BLOCK_SIZE
        num_seqs = len(self._tables)
        began_at = time.perf_counter()
        self._run(slots, np.full(num_seqs, last), [self._context] * num_seqs)
        return time.perf_counter() - began_at

    def _run(
        self, slots: NDArray[np.integer], positions: NDArray[np.integer], lens: Sequence[int]
    ) -> None:
        num_tokens, num_seqs = len(slots), len(lens)
        self._program.run(
            self.kv,
            token_ids=np.arange(num_tokens, dtype=np.int32),
            positions=positions.astype(np.int32),
            slots=slots.astype(np.int32)[None],
            seq_starts=np.linspace(0, num_tokens, num_seqs + 1).astype(np.int32),
            seq_lens=np.array(lens, np.int32),
            rows=np.arange(num_seqs, dtype=np.int32),
            block_tables=self._tables[None],
            logit_rows=np.zeros(0, np.int32),
        )


def block_bytes(shape: Shape, kv_format: FormatName) -> int:
    """Of one layer."""
    return _native.KVCache(1, [layer_of(shape, 0)], [0], kv_format).bytes_per_block


def layer_of(shape: Shape, index: int) -> tuple[int, int, int, int]:
    """Group, region, KV heads and their columns."""
    return 0, index, shape.num_kv_heads, shape.head_dim


def _program(team: _native.Team, shape: Shape, num_layers: int, max_tokens: int) -> _native.Program:
    cols = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    out_cols = shape.num_heads * shape.head_dim
    out_at = -(-max_tokens * cols * 4 // 64) * 64
    program = _native.Program(team, out_at + max_tokens * out_cols * 4, max_tokens, 0)
    qkv, out = program.buffer(0, cols, "f32", "T"), program.buffer(out_at, out_cols, "f32", "T")
    rows = np.random.default_rng(2).standard_normal((max_tokens, cols)).astype(np.float32)
    table = _native.Packed(max_tokens, cols, "f32")
    table.pack(team, 0, rows.view(np.uint8).reshape(-1), "F32", max_tokens)
    program.embed(qkv, table, 1.0)
    for layer in range(num_layers):
        program.attention(
            out,
            qkv,
            layer=layer,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            scale=shape.head_dim**-0.5,
        )
    return program


def measure(
    team: _native.Team,
    shape: Shape,
    cases: Sequence[tuple[FormatName, int]],
    context: int,
    num_seqs: int,
    read_gb_s: float,
) -> list[Result]:
    """Of formats and how many tokens are shared, beside the first. Best of several rounds: noise
    only ever makes a machine look slower."""
    decodes = [Decode(team, shape, name, context, num_seqs, shared) for name, shared in cases]
    best = [float("inf")] * len(decodes)
    for _ in range(ROUNDS):
        best = [
            min(so_far, each.step_s() / each.num_layers)
            for so_far, each in zip(best, decodes, strict=True)
        ]
    layer_bytes = [each.kv_bytes // each.num_layers for each in decodes]
    return [
        Result(
            ",".join(map(str, shape)), name, context, num_seqs, shared, num_bytes, seconds,
            num_bytes / seconds / 1e9 / read_gb_s, best[0] / seconds,
        )
        for (name, shared), num_bytes, seconds in zip(cases, layer_bytes, best, strict=True)
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--shape", type=Shape.parse, nargs="+", default=SHAPES)
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 8192, 32768])
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument(
        "--shared", type=int, default=0, help="first tokens that all have in common"
    )
    parser.add_argument("--formats", nargs="+", default=["bf16", "int8", "fp8_e4m3"],
                        choices=get_args(FormatName))  # fmt: skip
    parser.add_argument("--isa", default="", help="default: the best there is")
    parser.add_argument("--max-gib", type=float, default=5.0, help="larger layers are left out")
    parser.add_argument("--json", action="store_true", help="one object a line")
    args = parser.parse_args()
    limits = measure_limits()
    team = _native.Team(limits.num_cores, args.isa)
    if not args.json:
        print(f"{team.isa}, {limits.num_cores} threads, {limits.read_gb_s:.1f} GB/s read")
        print(f"{'heads,kv,dim':<14}{'format':<10}{'context':>8}{'seqs':>6}{'shared':>8}{'MiB':>7}{'ms':>9}"
              f"{'GB/s':>7}{'of read':>9}{'speed-up':>10}")  # fmt: skip
    for shape in args.shape:
        for context in args.contexts:
            for num_seqs in args.sequences:
                num_blocks = context // BLOCK_SIZE * num_seqs
                largest = max(block_bytes(shape, name) for name in args.formats) * num_blocks
                if largest > args.max_gib * 2**30:
                    continue
                shared = min(args.shared, context - BLOCK_SIZE)
                runs = [[(name, 0) for name in args.formats]]
                if shared > 0:
                    runs = [[(name, 0), (name, shared)] for name in args.formats]
                for cases in runs:
                    for result in measure(team, shape, cases, context, num_seqs, limits.read_gb_s):
                        line = json.dumps(asdict(result)) if args.json else _line(result)
                        print(line, flush=True)


def _line(r: Result) -> str:
    return (
        f"{r.shape:<14}{r.format:<10}{r.context:>8}{r.num_seqs:>6}{r.shared:>8}"
        f"{r.kv_bytes / 2**20:>7.0f}"
        f"{r.seconds * 1e3:>9.2f}{r.kv_bytes / r.seconds / 1e9:>7.1f}{r.read_share:>9.0%}"
        f"{r.speed_up:>10.2f}"
    )


if __name__ == "__main__":
    main()
