"""`octavo bench throughput`: all prompts at once through the engine in this process."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from octavo.bench.report import random_prompts, show, write_json
from octavo.commands.bench import add_size_options, with_engine
from octavo.options.parser import CommandParser, positive
from octavo_common.process_tree import cpu_seconds

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(prog: str, argv: Sequence[str]) -> int:
    parser = CommandParser(prog, "Measure the throughput of the engine in this process.")
    add_size_options(parser, input_len=256, output_len=128)
    parser.add_argument("--num-prompts", type=positive, default=64, metavar="N")
    args, config = with_engine(parser, argv)
    from octavo.measure.batch_limits import of_limit
    from octavo.measure.limits import limits_for
    from octavo_engine.core.offline.llm import LLM
    from octavo_engine.state.sampling_params import SamplingParams

    limits = limits_for(config)
    with LLM.from_config(config) as llm:
        info = llm.info
        vocab_size, backend = info.vocab_size, info.backend
        prompts = random_prompts(config.seed, args.num_prompts, args.input_len, vocab_size)
        params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=args.output_len)
        warm = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=2)
        llm.generate([[1, 2, 3, 4]], warm, use_tqdm=False)
        if args.profile:
            llm.start_profile()
        began_at, cpu_before_s = time.perf_counter(), cpu_seconds(os.getpid())
        results = llm.generate(prompts, params)
        elapsed_s = time.perf_counter() - began_at
        cpu_s = cpu_seconds(os.getpid()) - cpu_before_s
        if args.profile:
            llm.stop_profile(args.profile)
    prompt_tokens = sum(map(len, prompts))
    output_tokens = sum(output.num_tokens for result in results for output in result.outputs)
    figures = {
        "model": config.names[0],
        "backend": backend,
        "num_prompts": args.num_prompts,
        "input_len": args.input_len,
        "output_len": args.output_len,
        "elapsed_time_s": elapsed_s,
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "requests_per_second": args.num_prompts / elapsed_s,
        "output_tokens_per_second": output_tokens / elapsed_s,
        "tokens_per_second": (prompt_tokens + output_tokens) / elapsed_s,
        "cpu_s_per_1000_tokens": cpu_s / (prompt_tokens + output_tokens) * 1e3,
        **of_limit(
            limits,
            config,
            info,
            elapsed_s,
            count=args.num_prompts,
            input_len=args.input_len,
            output_len=args.output_len,
        ),
    }
    if args.json != "-":
        show("Throughput", figures)
    write_json(args.json, figures)
    return 0
