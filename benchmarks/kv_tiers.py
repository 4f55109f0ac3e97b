"""Time to first token of a long prompt from host memory, from disk and from a store that engines
share, beside computing it; and what a tier costs where nothing is found in it.

    python -m benchmarks.kv_tiers [--tokens 4000] [--rounds 3] [--pairs 6] [--only cost | hits]
                                  [--recurrent]

One engine for each tier; before a prompt comes again its KV cache is emptied. The shared store is a
folder, read by an engine that did not write it. Answers from a tier must have the text of computed
ones. The cost is that of two engines in turns, of which one saves all it computes to disk: for one
prompt alone, and for the throughput of many requests at once.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx

from benchmarks.gpu.server import write_words
from benchmarks.kv_transfer import ANSWER_TOKENS, MODEL, first_token
from benchmarks.servers import Server, end_cleanly_on_sigterm, free_port, warn_if_busy

LOAD_REQUESTS, LOAD_AT_ONCE, LOAD_PROMPT, LOAD_ANSWER = 16, 8, 500, 40
SHAPE: dict[str, Any] = {  # of granite-4.0-h-350m
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "model_type": "granitemoehybrid",
    "hidden_size": 768,
    "intermediate_size": 2048,
    "shared_intermediate_size": 2048,
    "num_hidden_layers": 32,
    "layer_types": ["attention" if i in (10, 13, 17, 27) else "mamba" for i in range(32)],
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "mamba_n_heads": 48,
    "mamba_d_head": 32,
    "mamba_d_state": 128,
    "num_local_experts": 0,
    "num_experts_per_tok": 0,
    "position_embedding_type": "nope",
    "tie_word_embeddings": True,
    "max_position_embeddings": 32768,
    "vocab_size": 49152,
    "torch_dtype": "bfloat16",
}
SETTLE_S = 8.0  # in which what was computed is written, and found by others


def start(
    name: str, longest: int, folder: Path, flags: list[str], *, recurrent: bool = False
) -> Server:
    port = free_port()
    model, memory = [MODEL], "200MiB"
    if recurrent:
        shape = folder / "shape"
        shape.mkdir(exist_ok=True)
        (shape / "config.json").write_text(json.dumps(SHAPE))
        write_words(shape)
        model, memory = [str(shape), "--load-format", "dummy"], "1200MiB"
    command = [
        sys.executable, "-m", "octavo.cli", "serve", *model, "--served-model-name", MODEL,
        "--device", "cpu", "--port", str(port), "--max-model-len", str(longest),
        "--kv-cache-memory-bytes", memory, *flags,
    ]  # fmt: skip
    return Server.start(command, port=port, log=folder / f"{name}.log")


def body_of(chance: random.Random, num_tokens: int) -> dict[str, Any]:
    prompt = [chance.randrange(1000, 40000) for _ in range(num_tokens)]
    return {"model": MODEL, "prompt": prompt, "max_tokens": ANSWER_TOKENS, "temperature": 0}


def compare(
    name: str, writer: Server, reader: Server, args: argparse.Namespace, chance: random.Random
) -> None:
    bodies = [body_of(chance, args.tokens) for _ in range(args.rounds)]
    computed = []
    for body in bodies:
        computed.append(first_token(writer.url, body))
        httpx.post(f"{writer.url}/reset_prefix_cache", timeout=60).raise_for_status()
    time.sleep(SETTLE_S)
    loaded = []
    for body in bodies:
        loaded.append(first_token(reader.url, body))
        httpx.post(f"{reader.url}/reset_prefix_cache", timeout=60).raise_for_status()
    if [each.text for each in computed] != [each.text for each in loaded]:
        raise SystemExit(f"{name}: two answers to one prompt")
    slow = statistics.median(each.seconds for each in computed)
    quick = statistics.median(each.seconds for each in loaded)
    print(
        f"{name:7} loaded {quick * 1e3:6.0f} ms   computed {slow * 1e3:6.0f} ms: "
        f"{slow / quick:.1f} times"
    )


def cost(plain: Server, saving: Server, args: argparse.Namespace, chance: random.Random) -> None:
    """Of prompts that never come again, in pairs whose order alternates."""
    ratios = []
    for pair in range(args.pairs):
        body = body_of(chance, args.tokens)
        order = [plain, saving] if pair % 2 else [saving, plain]
        seconds = {id(server): first_token(server.url, body).seconds for server in order}
        ratios.append(seconds[id(saving)] / seconds[id(plain)])
    percents = sorted((ratio - 1) * 100 for ratio in ratios)
    print(
        f"without hits a prompt takes {statistics.median(percents):+.1f} % with a disk "
        f"({percents[0]:+.1f} to {percents[-1]:+.1f})"
    )


def tokens_per_s(server: Server, chance: random.Random) -> float:
    """Of prompts and answers, with all of LOAD's requests at once; none comes again."""
    bodies = []
    for _ in range(LOAD_REQUESTS):
        body = body_of(chance, LOAD_PROMPT)
        bodies.append({**body, "max_tokens": LOAD_ANSWER, "ignore_eos": True})

    def run(body: dict[str, Any]) -> None:
        httpx.post(f"{server.url}/v1/completions", json=body, timeout=600).raise_for_status()

    started_at = time.perf_counter()
    with ThreadPoolExecutor(LOAD_AT_ONCE) as pool:
        list(pool.map(run, bodies))
    return LOAD_REQUESTS * (LOAD_PROMPT + LOAD_ANSWER) / (time.perf_counter() - started_at)


def throughput(
    plain: Server, saving: Server, args: argparse.Namespace, chance: random.Random
) -> None:
    """The same in pairs, whose order alternates, after one that does not count."""
    ratios = []
    for pair in range(args.pairs + 1):
        order = [plain, saving] if pair % 2 else [saving, plain]
        rate = {id(server): tokens_per_s(server, chance) for server in order}
        ratios.append(rate[id(saving)] / rate[id(plain)])
    percents = sorted((ratio - 1) * 100 for ratio in ratios[1:])
    print(
        f"without hits throughput changes by {statistics.median(percents):+.1f} % with a disk "
        f"({percents[0]:+.1f} to {percents[-1]:+.1f}); {unsaved(saving):.0f} blocks not saved"
    )


def unsaved(server: Server) -> float:
    lines = httpx.get(f"{server.url}/metrics").text.splitlines()
    return sum(
        float(line.rpartition(" ")[2])
        for line in lines
        if line.startswith("octavo_kv_tier_failures_total") and 'reason="unsaved"' in line
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=3, help="prompts of each tier")
    parser.add_argument("--pairs", type=int, default=6, help="of the cost without hits")
    parser.add_argument("--only", choices=("cost", "hits"), help="leave the others out")
    parser.add_argument("--recurrent", action="store_true", help="a model with recurrent states")
    args = parser.parse_args()
    os.environ["OCTAVO_DEV_MODE"] = "1"  # for /reset_prefix_cache
    end_cleanly_on_sigterm()
    warn_if_busy()
    chance = random.Random(1)
    longest = args.tokens + ANSWER_TOKENS + 1
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))

        def serve(name: str, *flags: str) -> Server:
            return stack.enter_context(
                start(name, longest, folder, list(flags), recurrent=args.recurrent)
            )

        if args.only == "cost":
            both = serve("plain"), serve("disk", "--kv-disk-path", str(folder / "disk"))
            cost(*both, args, chance)
            throughput(*both, args, chance)
            return
        shared = ("--kv-shared-store", str(folder / "shared"))
        host = serve("host", "--kv-offloading-size", "2")
        disk = serve("disk", "--kv-disk-path", str(folder / "disk"))
        writer, reader, plain = serve("writer", *shared), serve("reader", *shared), serve("plain")
        compare("host", host, host, args, chance)
        compare("disk", disk, disk, args, chance)
        compare("shared", writer, reader, args, chance)
        if args.only == "hits":
            return
        cost(plain, disk, args, chance)
        throughput(plain, disk, args, chance)


if __name__ == "__main__":
    main()
