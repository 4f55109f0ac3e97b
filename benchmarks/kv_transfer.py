"""Time to first token of a long prompt: computed, and with its KV blocks from another engine.

    python -m benchmarks.kv_transfer [--tokens 4000] [--rounds 5] [--kv-cache-memory-bytes 400MiB]

Two engines on this machine, over loopback. One computes a prompt of random tokens; the other
answers it with the first one's blocks, and then computes the same prompt under another cache salt.
Both answers must have the same text.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from benchmarks.servers import Server, end_cleanly_on_sigterm, free_port, warn_if_busy
from tests.fakes.kv_transfer_flags import transfer

MODEL = "demo://smollm2"
ANSWER_TOKENS = 12


class FirstToken(NamedTuple):
    """Of a streamed answer."""

    seconds: float
    text: str


def start(role: str, max_model_len: int, folder: Path, flags: list[str]) -> Server:
    port = free_port()
    command = [
        sys.executable, "-m", "octavo.cli", "serve", MODEL, "--device", "cpu", "--port", str(port),
        "--max-model-len", str(max_model_len), *transfer(role), *flags,
    ]  # fmt: skip
    return Server.start(command, port=port, log=folder / f"{role}.log")


def compute(url: str, body: dict[str, Any]) -> dict[str, Any]:
    """Where the prompt's blocks are then."""
    prefill = {**body, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
    answer = httpx.post(f"{url}/v1/completions", json=prefill, timeout=600)
    found: dict[str, Any] = answer.raise_for_status().json()["kv_transfer_params"]
    return found


def first_token(url: str, body: dict[str, Any]) -> FirstToken:
    started_at = time.perf_counter()
    seconds, text = 0.0, ""
    streamed = {**body, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=streamed, timeout=600) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                seconds = seconds or time.perf_counter() - started_at
                text += json.loads(line[6:])["choices"][0]["text"]
    return FirstToken(seconds, text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--kv-cache-memory-bytes", help="of each engine; default: the engine's")
    args = parser.parse_args()
    memory = args.kv_cache_memory_bytes
    flags = [] if memory is None else ["--kv-cache-memory-bytes", memory]
    end_cleanly_on_sigterm()
    warn_if_busy()
    chance = random.Random(1)
    loaded, computed = [], []
    longest = args.tokens + ANSWER_TOKENS + 1
    with (
        tempfile.TemporaryDirectory() as folder,
        start("kv_producer", longest, Path(folder), flags) as first,
        start("kv_consumer", longest, Path(folder), flags) as second,
    ):
        for number in range(args.rounds):
            prompt = [chance.randrange(1000, 40000) for _ in range(args.tokens)]
            body = {
                "model": MODEL, "prompt": prompt, "max_tokens": ANSWER_TOKENS, "temperature": 0
            }  # fmt: skip
            where = compute(first.url, body)
            one = first_token(second.url, {**body, "kv_transfer_params": where})
            other = first_token(second.url, {**body, "cache_salt": f"round {number}"})
            if one.text != other.text:
                raise SystemExit(f"two answers to one prompt: {one.text!r} and {other.text!r}")
            loaded.append(one.seconds)
            computed.append(other.seconds)
            print(f"loaded {one.seconds * 1e3:7.0f} ms   computed {other.seconds * 1e3:7.0f} ms")
    ratio = statistics.median(computed) / statistics.median(loaded)
    print(
        f"median: loaded {statistics.median(loaded) * 1e3:.0f} ms, computed "
        f"{statistics.median(computed) * 1e3:.0f} ms: {ratio:.1f} times"
    )


if __name__ == "__main__":
    main()
