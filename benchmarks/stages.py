"""Ways to use the same cores for one model: one process of threads, stages, ranks, engine cores.

    python -m benchmarks.stages [--model demo://smollm2] [--threads 2] [--streams 1 32] [--pairs 8]
        [--quantization auto] [--ways pipeline measured tensor data] [--json]

    pipeline   a stage for each thread, cut by the weights of layers
    measured   the same, cut by the time that layers take
    tensor     a rank for each thread, which share each layer
    data       an engine core for each thread, with the whole model

Each pair is one run of one process and one of the same requests on as many processes as there are
threads, in turns, and the turn that comes first alternates. Answers must be the same, token by
token. The figure is the median of the pairs' ratios; a machine that others use gives none.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from octavo_engine.config import EngineConfig, SchedulerConfig
from octavo_engine.core.offline.llm import LLM
from octavo_engine.state.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence

PROMPT_TOKENS = 64
NEW_TOKENS = 64
WAYS = ("pipeline", "measured", "tensor", "data")


@dataclass(frozen=True, slots=True)
class Ratio:
    """Tokens a second of one way beside one process."""

    way: str
    num_streams: int
    alone_tokens_per_s: float  # the best run of each
    tokens_per_s: float
    ratio: float  # the median of the pairs


def run_once(llm: LLM, num_streams: int, seed: int) -> tuple[float, list[list[int]]]:
    """Tokens a second, and the tokens. No prompt begins as another one did."""
    prompts = [
        [1 + (seed * 7919 + stream * 613 + place * 31) % 40_000 for place in range(PROMPT_TOKENS)]
        for stream in range(num_streams)
    ]
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
    begin = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    took_s = time.perf_counter() - begin
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    return sum(map(len, tokens)) / took_s, tokens


def compare(alone: LLM, other: LLM, way: str, num_streams: int, num_pairs: int) -> Ratio:
    speeds: list[tuple[float, float]] = []
    for pair in range(num_pairs + 1):  # the first one warms up
        order = (alone, other) if pair % 2 else (other, alone)
        runs = {id(llm): run_once(llm, num_streams, pair) for llm in order}
        (first, expected), (second, found) = runs[id(alone)], runs[id(other)]
        if found != expected:
            raise SystemExit(f"{way}: other tokens than those of one process")
        speeds.append((first, second))
    speeds = speeds[1:]
    return Ratio(
        way,
        num_streams,
        alone_tokens_per_s=max(first for first, _ in speeds),
        tokens_per_s=max(second for _, second in speeds),
        ratio=statistics.median(second / first for first, second in speeds),
    )


def settings_of(way: str, size: int) -> dict[str, Any]:
    match way:
        case "pipeline":
            return {"pipeline_parallel_size": size}
        case "measured":
            return {"pipeline_parallel_size": size, "pipeline_layer_partition": "measured"}
        case "tensor":
            return {"tensor_parallel_size": size}
    return {"data_parallel_size": size}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo://smollm2")
    parser.add_argument("--quantization", default="auto")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--ways", choices=WAYS, nargs="+", default=["pipeline"])
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    config = EngineConfig(
        model=args.model,
        device="cpu",
        quantization=args.quantization,
        max_model_len=256,
        num_threads=args.threads,
        scheduler=SchedulerConfig(max_num_seqs=max(args.streams)),
    )
    found: list[Ratio] = []
    with LLM.from_config(config) as alone:
        for way in args.ways:
            with LLM.from_config(config.replace(**settings_of(way, args.threads))) as other:
                found += [compare(alone, other, way, n, args.pairs) for n in args.streams]
    for one in found:
        if args.json:
            print(json.dumps({name: getattr(one, name) for name in Ratio.__slots__}))
        else:
            print(
                f"{one.way:9} {one.num_streams:3} streams: {one.ratio:.3f} of one process "
                f"({one.tokens_per_s:.0f} and {one.alone_tokens_per_s:.0f} tokens/s at best)"
            )


if __name__ == "__main__":
    main()
