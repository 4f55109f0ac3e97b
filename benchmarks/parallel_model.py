"""What machines that are not at hand would do, by the simulator: 16 cores, and 8 GPUs.

    python -m benchmarks.parallel_model [--streams 1 32 256] [--context 1024]

The scheduler is the engine's own, and time is that of the simulator (`--device sim` with ranks): a
step reads the weights that it needs and the KV cache of its sequences at the machine's bandwidth,
multiplies at its peak, and ranks add what they wait for each other. So the figures are what is left
when everything else costs nothing: compare ways of one machine, not these figures with measured
ones. Of a mixture of experts the rows of experts are uneven, by a power of their rank, and the
slowest rank decides; "moved" is after `--enable-eplb`. The scheduler's own time is not counted, so
figures do not depend on where they are printed.
"""

from __future__ import annotations

import argparse
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from octavo_engine.backends.native.expert_balance import balance, first_slots, rank_loads
from octavo_engine.backends.sim.backend import SimBackend
from octavo_engine.backends.sim.clock import VirtualClock
from octavo_engine.backends.sim.stages import SimStages
from octavo_engine.config import EngineConfig, SchedulerConfig, SimConfig
from octavo_engine.core.build import build_engine
from octavo_engine.state.request import EngineRequest
from octavo_engine.state.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

NEW_TOKENS: Final = 64
PROMPT_TOKENS: Final = 32  # as simulated; the KV cache that steps read is of `--context` tokens
UNEVEN: Final = 0.6  # the expert chosen n-th most often has 1 / n ** UNEVEN of the first one's rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Units of one kind: what one rank or stage has for itself."""

    name: str
    units: int
    unit: str
    gb_per_s: float  # of each unit
    tflop_per_s: float
    memory_gb: float
    barrier_us: float  # of all ranks
    per_layer: int  # barriers or sums in a layer
    hand_over_us: float  # of a step's rows, from stage to stage


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    name: str
    layers: int
    dense: float  # billions of weights that every step reads
    experts: int = 0  # in each layer
    top_k: int = 0
    expert: float = 0.0  # billions of weights of one expert, of all layers together
    weight_bytes: float = 2.0
    kv_bytes: int = 0  # of a token, all layers

    @property
    def gb(self) -> float:
        return (self.dense + self.experts * self.expert) * self.weight_bytes

    def read_gb(self, rows: float) -> tuple[float, float]:
        """What a step of so many rows reads of the dense weights, and of the experts."""
        hit = 0.0
        if self.experts:
            hit = self.experts * (1 - (1 - self.top_k / self.experts) ** rows)
        return self.dense * self.weight_bytes, hit * self.expert * self.weight_bytes

    @property
    def active(self) -> float:
        return self.dense + self.top_k * self.expert


CORES: Final = Machine(
    name="16 cores (two memory nodes of 8)", units=2, unit="node", gb_per_s=100.0,
    tflop_per_s=2.0, memory_gb=128.0, barrier_us=3.0, per_layer=5, hand_over_us=20.0,
)  # fmt: skip
GPUS: Final = Machine(
    name="8 GPUs (H100, NVLink)", units=8, unit="GPU", gb_per_s=3350.0, tflop_per_s=990.0,
    memory_gb=72.0, barrier_us=10.0, per_layer=2, hand_over_us=15.0,
)  # fmt: skip
CASES: Final = (
    (CORES, ModelShape(name="Llama 3.1 8B, 4 bits", layers=32, dense=8.0, weight_bytes=0.56,
                       kv_bytes=131_072)),
    (CORES, ModelShape(name="Qwen3 30B-A3B, 4 bits", layers=48, dense=1.5, experts=128, top_k=8,
                       expert=0.226, weight_bytes=0.56, kv_bytes=98_304)),
    (GPUS, ModelShape(name="Llama 3.3 70B, bf16", layers=80, dense=70.0, kv_bytes=327_680)),
    (GPUS, ModelShape(name="Qwen3 235B-A22B, fp8", layers=94, dense=8.0, experts=128, top_k=8,
                      expert=1.77, weight_bytes=1.0, kv_bytes=192_512)),
)  # fmt: skip


class Way(NamedTuple):
    """One way to use a machine: its cores, and the ranks or stages of each."""

    name: str
    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    slots: Sequence[int] | None = None  # experts as a whole, and on which ranks they are


def rows_of_experts(count: int) -> list[int]:
    """How uneven they are; in no order."""
    rows = [int(1e6 / number**UNEVEN) for number in range(1, count + 1)]
    random.Random(1).shuffle(rows)
    return rows


def ways(machine: Machine, shape: ModelShape) -> Iterator[Way]:
    units = machine.units
    yield Way(f"one {machine.unit}")
    yield Way(f"tensor {units}", tensor=units)
    yield Way(f"pipeline {units}", pipeline=units)
    yield Way(f"data {units}", data=units)
    if shape.experts:
        loaded = first_slots(shape.experts, shape.experts)
        yield Way(f"tensor {units}, whole experts", tensor=units, slots=loaded)
        moved = balance(rows_of_experts(shape.experts), loaded, units)
        yield Way(f"tensor {units}, whole experts, moved", tensor=units, slots=moved)


def skew_of(way: Way, shape: ModelShape, read: tuple[float, float]) -> float:
    """How much longer than all on average the slowest rank takes."""
    if way.slots is None:
        return 0.0
    loads = rank_loads(rows_of_experts(shape.experts), way.slots, way.tensor)
    uneven = max(loads) * way.tensor / sum(loads) - 1
    return uneven * read[1] / sum(read)


def simulated(
    machine: Machine, shape: ModelShape, way: Way, streams: int, context: int
) -> SimConfig:
    """A step of these streams, as one unit would compute it."""
    rows = streams / way.pipeline  # of a step: as many are under way as there are stages
    read = shape.read_gb(max(1.0, rows))
    flop_ms = 2e9 * shape.active / (machine.tflop_per_s * 1e12) * 1e3
    kv_ms = context * shape.kv_bytes / (machine.gb_per_s * 1e9) * 1e3
    exchange_us = 0.0
    if way.tensor > 1:
        exchange_us = machine.barrier_us * machine.per_layer * shape.layers
    if way.pipeline > 1:
        exchange_us = machine.hand_over_us
    return SimConfig(
        step_base_ms=sum(read) / machine.gb_per_s * 1e3,
        decode_token_ms=flop_ms + kv_ms,
        prefill_token_ms=0.0,  # what is compared is decoding
        kv_blocks=65_536,
        rank_skew=skew_of(way, shape, read),
        exchange_ms=exchange_us * 1e-3,
    )


def fits(machine: Machine, shape: ModelShape, way: Way) -> bool:
    copies = 1.0 if way.slots is None else len(way.slots) / shape.experts
    held = (shape.gb * copies) / (way.tensor * way.pipeline)
    return held <= 0.9 * machine.memory_gb


def tokens_per_s(
    machine: Machine, shape: ModelShape, way: Way, streams: int, context: int
) -> float:
    """Of all streams, once their prompts are computed. Each core has its share of them."""
    own = -(-streams // way.data)
    config = EngineConfig(
        model="sim", device="sim", max_model_len=256,
        tensor_parallel_size=way.tensor, pipeline_parallel_size=way.pipeline,
        scheduler=SchedulerConfig(max_num_seqs=own, max_num_batched_tokens=8192, max_step_ms=1e6),
        sim=simulated(machine, shape, way, own, context),
    )  # fmt: skip
    clock = VirtualClock()
    kind = SimStages if way.pipeline > 1 else SimBackend
    engine, _ = build_engine(config, backend=kind(config, clock), now=clock.now)
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
    for number in range(own):
        prompt = [1 + (number * 613 + place * 31) % 400 for place in range(PROMPT_TOKENS)]
        engine.add(EngineRequest(request_id=str(number), prompt_token_ids=prompt, params=params))
    num_tokens, began_at = 0, clock.now()
    while engine.has_work:
        for output in engine.step().outputs:
            num_tokens += len(output.token_ids)
    engine.close()
    return num_tokens / (clock.now() - began_at) * min(way.data, streams)


def table(machine: Machine, shape: ModelShape, streams: Sequence[int], context: int) -> list[str]:
    lines = [
        f"{machine.name}: {shape.name}, {shape.gb:.0f} GB, tokens/s",
        f"  {'':36}" + "".join(f"{count:>5} stream{'s' * (count > 1):1}" for count in streams),
    ]
    for way in ways(machine, shape):
        cells = "".join(f"{tokens_per_s(machine, shape, way, n, context):12.0f}" for n in streams)
        lines.append(f"  {way.name:36}" + (cells if fits(machine, shape, way) else
                                          f"  {'does not fit':>10}"))  # fmt: skip
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 32, 256], metavar="N")
    parser.add_argument("--context", type=int, default=1024, metavar="TOKENS")
    args = parser.parse_args(arguments)
    for machine, shape in CASES:
        print("\n".join(table(machine, shape, args.streams, args.context)), flush=True)


if __name__ == "__main__":
    main()
