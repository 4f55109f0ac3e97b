"""How near decoding comes to the machine's limits in latent attention, experts and scans.

    python -m benchmarks.layers [--only NAME...] [--sequences 1 8] [--context 8192] [--isa ISA]
        [--one-core] [--json]

Each sequence decodes one token a step, over layers enough that no cache holds what they read; of
experts each token has others than the one before. `read` is the share of the machine's read
bandwidth, of what a step has to bring from memory once: latent vectors and the heads' matrices,
the experts that some token has chosen, states read and written back. `latents` counts the vectors
alone. `limit` is the share of the time that reading or multiplying takes at best, whichever is
longer: many heads that share a vector multiply it more often than it can be read. With `--one-core`
all times are one thread's processor time, for a machine that does other work: then reading alone
counts as the limit.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from octavo.measure.limits import measure_limits
from octavo.measure.machine_limits import MachineLimits
from octavo.measure.weight_formats import BITS
from octavo_engine import _native
from octavo_engine.config import BLOCK_SIZE

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from octavo_engine.backends.native.packing import Packing

FAR_BEYOND_CACHES = 512 << 20
ROUNDS = 7
ARENA = 1 << 28


class Work(NamedTuple):
    """What a step of one layer needs at least."""

    read_bytes: int
    latent_bytes: int = 0
    flops: float = 0.0
    multiplied_in: str = "bf16"


@dataclass(frozen=True, slots=True)
class Result:
    """One line of the table."""

    name: str
    num_seqs: int
    read_mib: float  # of a layer
    ms: float  # of a layer
    gb_s: float
    read_share: float
    latent_share: float | None
    limit_share: float


class Latents(NamedTuple):
    """Attention over latent vectors."""

    num_heads: int
    rank: int = 512
    rope_dim: int = 64
    nope_dim: int = 128
    value_dim: int = 128


class Experts(NamedTuple):
    """A mixture of experts."""

    num_experts: int
    top_k: int
    columns: int
    width: int
    packing: Packing


class Scan(NamedTuple):
    """Mamba 2's (sizes: heads, head_dim, groups, state_size) or the gated delta rule's (key heads,
    value heads, key_dim, value_dim)."""

    kind: str
    sizes: tuple[int, int, int, int]

    @property
    def values(self) -> int:
        """Of a layer's state."""
        a, b, _, d = self.sizes
        return a * b * d if self.kind == "ssd" else b * self.sizes[2] * d


SHAPES: dict[str, Latents | Experts | Scan] = {
    "MLA, 16 heads (DeepSeek V2 Lite)": Latents(16),
    "MLA, 4 heads (one rank of four)": Latents(4),
    "MoE bf16, 8 of 64 (OLMoE)": Experts(64, 8, 2048, 1024, "bf16"),
    "MoE q4, 8 of 128 (Qwen 3 30B-A3B)": Experts(128, 8, 2048, 768, "q4"),
    "MoE mxfp4, 4 of 32 (gpt-oss 20B)": Experts(32, 4, 2880, 2880, "mxfp4"),
    "SSD scan (Nemotron-H 8B)": Scan("ssd", (128, 64, 8, 128)),
    "delta rule (Qwen 3 Next)": Scan("delta", (16, 32, 128, 128)),
}


class Bench:
    """A program of some layers and the step of single tokens that it runs."""

    def __init__(self, team: _native.Team, num_seqs: int, context: int) -> None:
        self._clock = clock_of(team)
        self.num_seqs = num_seqs
        self._context = context
        self._blocks = max(1, context // BLOCK_SIZE)
        self._team = team
        self.program = _native.Program(team, ARENA, num_seqs, 0)
        self._offset = 0
        self._keep: list[Any] = []  # what the program only refers to
        self.kv = _native.KVCache(1, [(0, 0, 1, 16)], [0], "f32")
        self.states: _native.StateCache | None = None
        self.num_layers = 1

    def buffer(self, columns: int, dtype: str = "f32") -> int:
        number = self.program.buffer(self._offset, columns, dtype, "T")
        self._offset += -(-self.num_seqs * columns * 4 // 64) * 64
        return number

    def random_rows(self, columns: int, *, num_rows: int = 0, scale: float = 1.0) -> int:
        """A buffer with a row of numbers for each token id."""
        into = self.buffer(columns)
        rows = np.random.default_rng(columns).standard_normal((num_rows or self.num_seqs, columns))
        table = packed(self._team, (rows * scale).astype(np.float32), "f32")
        self._keep.append(table)
        self.program.embed(into, table, 1.0)
        return into

    def step_s(self, round_: int) -> float:
        """A step of tokens that the rounds before did not have."""
        count, last = self.num_seqs, self._context - 1
        tables = np.arange(count * self._blocks, dtype=np.int32).reshape(count, -1)
        options: dict[str, Any] = {}
        if self.states is not None:
            options = {
                "states": self.states,
                "state_slots": np.arange(count, dtype=np.int32),
                "state_saves": np.full(count, -1, np.int32),
            }
        arrays: dict[str, Any] = {
            "token_ids": np.arange(count, dtype=np.int32) + round_ * count,
            "positions": np.full(count, last, np.int32),
            "slots": (tables[:, -1] * BLOCK_SIZE + last % BLOCK_SIZE).astype(np.int32)[None],
            "seq_starts": np.arange(count + 1, dtype=np.int32),
            "seq_lens": np.full(count, self._context, np.int32),
            "rows": np.arange(count, dtype=np.int32),
            "block_tables": tables[None],
            "logit_rows": np.zeros(0, np.int32),
        }
        began_at = self._clock()
        self.program.run(self.kv, **arrays, **options)
        return self._clock() - began_at


def clock_of(team: _native.Team) -> Callable[[], float]:
    """A team of one is the thread that calls it."""
    return time.thread_time if team.num_threads == 1 else time.perf_counter


def one_core_limits() -> MachineLimits:
    numbers = np.ones(FAR_BEYOND_CACHES // 8, np.int64)
    best = float("inf")
    for _ in range(ROUNDS):
        began_at = time.thread_time()
        np.bitwise_or.reduce(numbers)
        best = min(best, time.thread_time() - began_at)
    return MachineLimits(1, FAR_BEYOND_CACHES / best / 1e9, {})


def packed(team: _native.Team, matrix: NDArray[np.float32], packing: str) -> _native.Packed:
    rows, columns = matrix.shape
    result = _native.Packed(rows, columns, packing)
    result.pack(team, 0, matrix.view(np.uint8).reshape(-1), "F32", rows)
    return result


def latent_layers(team: _native.Team, shape: Latents, num_seqs: int, context: int) -> Bench:
    bench = Bench(team, num_seqs, context)
    heads, rank, rope, nope, value = shape
    num_blocks = num_seqs * (context // BLOCK_SIZE)
    layer_bytes = num_blocks * BLOCK_SIZE * (rank + rope) * 2
    bench.num_layers = -(-FAR_BEYOND_CACHES // layer_bytes)
    layers = [(0, index, 1, rank + rope) for index in range(bench.num_layers)]
    bench.kv = _native.KVCache(num_blocks, layers, [0], "bf16", [rank] * bench.num_layers)
    q = bench.random_rows(heads * (nope + rope), scale=0.1)
    latents = bench.random_rows(rank + rope)
    out, room = bench.buffer(heads * value), (bench.buffer(heads * nope, "bf16"),
                                              bench.buffer(heads * rank, "bf16"))  # fmt: skip
    rng = np.random.default_rng(3)
    angles = rng.random((context, rope)).astype(np.float32)
    for layer in range(bench.num_layers):
        ups, downs = (
            tuple(
                packed(team, rng.random(of, np.float32) / np.float32(rank), "bf16")
                for _ in range(heads)
            )
            for of in ((rank, nope), (value, rank))
        )
        bench.program.latent_attention(
            out, q, latents, *room, ups, downs, layer=layer, num_heads=heads, first_head=0,
            rank=rank, scale=(nope + rope) ** -0.5, cos_sin=angles, turns_neighbours=False,
            kv_norm=np.ones(rank, np.float32), norm_eps=1e-6, window=0, group=0,
        )  # fmt: skip
        bench._keep.append((ups, downs, angles))
    return bench


def expert_layers(team: _native.Team, shape: Experts, num_seqs: int, rounds: int) -> Bench:
    bench = Bench(team, num_seqs, BLOCK_SIZE)
    experts, top_k, columns, width, packing = shape
    bench.kv = _native.KVCache(num_seqs, [(0, 0, 1, 16)], [0], "f32")
    src = bench.random_rows(columns, num_rows=num_seqs * rounds)
    scores = bench.random_rows(experts, num_rows=num_seqs * rounds)
    dtype = "bf16" if packing == "bf16" else "f32"
    room = (bench.buffer(top_k * columns, dtype), bench.buffer(top_k * width, dtype),
            bench.buffer(top_k * columns))  # fmt: skip
    gate_up, down = (
        tuple(expert_weight(team, of, packing) for _ in range(experts))
        for of in ((2 * width, columns), (columns, width))
    )
    bench.program.moe(bench.buffer(columns), src, scores, *room, gate_up, down, top_k, True, "silu")
    return bench


def expert_weight(team: _native.Team, size: tuple[int, int], packing: str) -> _native.Packed:
    result = _native.Packed(*size, packing)
    if packing == "mxfp4":
        blocks = np.full((size[0] * size[1] // 32, 17), 120, np.uint8)
        result.pack(team, 0, blocks.reshape(-1), "MXFP4", size[0])
        return result
    values = np.full(size, 0.01, np.float32)
    values[:, ::2] = -0.01
    result.pack(team, 0, values.view(np.uint8).reshape(-1), "F32", size[0])
    return result


def scan_layers(team: _native.Team, shape: Scan, num_seqs: int) -> Bench:
    bench = Bench(team, num_seqs, BLOCK_SIZE)
    bench.kv = _native.KVCache(num_seqs, [(0, 0, 1, 16)], [0], "f32")
    bench.num_layers = -(-FAR_BEYOND_CACHES // (4 * shape.values * num_seqs))
    bench.states = _native.StateCache(num_seqs, [shape.values] * bench.num_layers)
    a, b, c, d = shape.sizes
    if shape.kind == "ssd":
        x, dt, out = bench.random_rows(a * b + 2 * c * d), bench.random_rows(a), bench.buffer(a * b)
        heads = a
    else:
        x, dt, out = bench.random_rows(2 * a * c + b * d), bench.random_rows(2 * b), bench.buffer(
            b * d
        )  # fmt: skip
        heads = b
    decay, ones = np.full(heads, -0.1, np.float32), np.ones(heads, np.float32)
    for layer in range(bench.num_layers):
        if shape.kind == "ssd":
            bench.program.ssd_scan(
                out, x, dt, layer, 0, shape.sizes, decay, ones, ones, 0.0, float("inf")
            )
        else:
            bench.program.delta_rule(out, x, dt, layer, 0, shape.sizes, decay, ones)
    return bench


def latent_work(shape: Latents, num_seqs: int, context: int) -> Work:
    vectors = num_seqs * context * (shape.rank + shape.rope_dim) * 2
    weights = shape.num_heads * shape.rank * (shape.nope_dim + shape.value_dim)
    products = num_seqs * (shape.num_heads * context * (2 * shape.rank + shape.rope_dim) + weights)
    return Work(vectors + 2 * weights, vectors, 2.0 * products)


def expert_work(shape: Experts, num_chosen: float, num_seqs: int) -> Work:
    weights = 3 * shape.columns * shape.width
    return Work(
        int(num_chosen * weights * BITS[shape.packing] / 8),
        flops=2.0 * num_seqs * shape.top_k * weights,
        multiplied_in="bf16" if shape.packing == "bf16" else "int8",
    )


def scan_work(shape: Scan, num_seqs: int) -> Work:
    return Work(2 * 4 * shape.values * num_seqs, flops=6.0 * shape.values * num_seqs,
                multiplied_in="float32")  # fmt: skip


def chosen_experts(shape: Experts, num_seqs: int, rounds: Sequence[int]) -> list[int]:
    """How many experts some token of each round has chosen; scores as `random_rows` makes them."""
    rows = (max(rounds) + 1) * num_seqs
    scores = np.random.default_rng(shape.num_experts).standard_normal((rows, shape.num_experts))
    best = np.argsort(-scores, axis=1)[:, : shape.top_k]
    return [len(np.unique(best[r * num_seqs : (r + 1) * num_seqs])) for r in rounds]


def measure(
    team: _native.Team, name: str, num_seqs: int, context: int, limits: MachineLimits
) -> Result:
    """Best of several rounds: noise only ever makes a machine look slower."""
    shape = SHAPES[name]
    rounds = range(1, ROUNDS + 1)
    works: list[Work]
    if isinstance(shape, Latents):
        bench = latent_layers(team, shape, num_seqs, context)
        works = [latent_work(shape, num_seqs, context)] * ROUNDS
        of_round: Callable[[int], int] = lambda _: 0  # noqa: E731
    elif isinstance(shape, Experts):
        bench = expert_layers(team, shape, num_seqs, ROUNDS + 1)
        chosen = chosen_experts(shape, num_seqs, rounds)
        works = [expert_work(shape, count, num_seqs) for count in chosen]
        of_round = lambda round_: round_  # noqa: E731
    else:
        bench = scan_layers(team, shape, num_seqs)
        works = [scan_work(shape, num_seqs)] * ROUNDS
        of_round = lambda _: 0  # noqa: E731
    bench.step_s(of_round(0))
    times = [bench.step_s(of_round(round_)) / bench.num_layers for round_ in rounds]
    return best_of(name, num_seqs, times, works, limits)


def best_of(
    name: str, num_seqs: int, times: Sequence[float], works: Sequence[Work], limits: MachineLimits
) -> Result:
    """The round that came nearest to its own limit."""
    shares = []
    for seconds, work in zip(times, works, strict=True):
        reading = work.read_bytes / limits.read_gb_s / 1e9
        peak = limits.gemm_gflop_s.get(work.multiplied_in, float("inf"))
        shares.append(max(reading, work.flops / peak / 1e9) / seconds)
    best = int(np.argmax(shares))
    seconds, work = times[best], works[best]
    gb_s = work.read_bytes / seconds / 1e9
    latents = work.latent_bytes / seconds / 1e9 / limits.read_gb_s
    return Result(
        name, num_seqs, work.read_bytes / 2**20, seconds * 1e3, gb_s, gb_s / limits.read_gb_s,
        latents if work.latent_bytes else None, shares[best],
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", nargs="+", default=[], help="names that begin so")
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--isa", default="", help="default: the best there is")
    parser.add_argument("--one-core", action="store_true", help="one thread's processor time")
    parser.add_argument("--json", action="store_true", help="one object a line")
    args = parser.parse_args()
    if args.context < BLOCK_SIZE or args.context % BLOCK_SIZE:
        parser.error(f"--context must be a multiple of {BLOCK_SIZE}; got {args.context}")
    names = [n for n in SHAPES if not args.only or n.startswith(tuple(args.only))]
    if not names:
        parser.error(f"--only: no name begins so; there are: {'; '.join(SHAPES)}")
    limits = one_core_limits() if args.one_core else measure_limits()
    team = _native.Team(limits.num_cores, args.isa)
    if not args.json:
        print(f"{team.isa}, {limits.describe()}")
        print(
            f"{'':<36}{'seqs':>5}{'MiB':>8}{'ms':>9}{'GB/s':>7}{'read':>7}{'latents':>9}{'limit':>7}"
        )
    for name in names:
        for num_seqs in args.sequences:
            result = measure(team, name, num_seqs, args.context, limits)
            print(json.dumps(asdict(result)) if args.json else _line(result), flush=True)


def _line(r: Result) -> str:
    latents = "" if r.latent_share is None else f"{r.latent_share:.0%}"
    return (
        f"{r.name:<36}{r.num_seqs:>5}{r.read_mib:>8.1f}{r.ms:>9.3f}{r.gb_s:>7.1f}"
        f"{r.read_share:>7.0%}{latents:>9}{r.limit_share:>7.0%}"
    )


if __name__ == "__main__":
    main()
