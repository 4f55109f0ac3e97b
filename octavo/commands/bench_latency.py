"""`octavo bench latency`: one batch, again and again, through the engine in this process."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from octavo.bench.report import random_prompts, show, summary, write_json
from octavo.commands.bench import add_size_options, with_engine
from octavo.options.parser import CommandParser, not_negative, positive

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(prog: str, argv: Sequence[str]) -> int:
    parser = CommandParser(prog, "Measure how long one batch takes.")
    add_size_options(parser, input_len=32, output_len=128)
    parser.add_argument("--batch-size", type=positive, default=1, metavar="N")
    parser.add_argument("--num-iters", type=positive, default=5, metavar="N")
    parser.add_argument("--num-iters-warmup", type=not_negative, default=1, metavar="N")
    args, config = with_engine(parser, argv)
    from octavo.measure.batch_limits import of_limit
    from octavo.measure.limits import limits_for
    from octavo_engine.core.offline.llm import LLM
    from octavo_engine.state.sampling_params import SamplingParams

    limits = limits_for(config)
    times: list[float] = []
    with LLM.from_config(config) as llm:
        info = llm.info
        vocab_size, backend = info.vocab_size, info.backend
        params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=args.output_len)
        for number in range(args.num_iters_warmup + args.num_iters):
            # New prompts every time: a prefix found in the cache would be no work.
            prompts = random_prompts(
                config.seed + number, args.batch_size, args.input_len, vocab_size
            )
            if args.profile and number == args.num_iters_warmup:
                llm.start_profile()
            began_at = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            if number >= args.num_iters_warmup:
                times.append(time.perf_counter() - began_at)
        if args.profile:
            llm.stop_profile(args.profile)
    figures = {
        "model": config.names[0],
        "backend": backend,
        "batch_size": args.batch_size,
        "input_len": args.input_len,
        "output_len": args.output_len,
        "num_iters": args.num_iters,
        **summary("latency", times),
        "min_latency_ms": min(times) * 1e3,
        "ms_per_output_token": min(times) * 1e3 / args.output_len,
        **of_limit(
            limits,
            config,
            info,
            min(times),
            count=args.batch_size,
            input_len=args.input_len,
            output_len=args.output_len,
        ),
    }
    if args.json != "-":
        show("Latency of a batch", figures)
    write_json(args.json, figures)
    return 0
