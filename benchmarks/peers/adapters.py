"""LoRA adapters in Octavo's CPU engine beside vLLM and llama.cpp, on this machine.

    benchmarks/peers/setup.sh                      # once
    python -m benchmarks.peers.adapters [--quick] [--rounds N] [--only NAME,...] [--json FILE]

Adapters of rank 16 on all linear layers of SmolLM2 in bf16, a thousand of them. What is measured:

    streams   32 streams, each with one of 1, 8 or 32 adapters, against the same without any
    load      from the call that loads an adapter to the first token of its first request
    many      1,000 adapters by Zipf's law over 16 slots, against 16 adapters
    bits      a batch of mixed requests against each request alone

A loss is compared with what adapters add: the seconds without them, and those in which this machine
could at best read the adapters' bytes, or multiply their numbers, in every step.
Servers take turns as in `benchmarks.peers.run`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from benchmarks.peers import contenders as all_of
from benchmarks.peers.adapter_files import (
    adapter_name,
    num_weights,
    write_adapters,
    write_gguf_adapters,
)
from benchmarks.peers.models import FORMS
from benchmarks.peers.run import VOCAB_SIZE, Standing, add_common_arguments, start_all
from benchmarks.servers import end_cleanly_on_sigterm, warn_if_busy
from octavo.bench import load
from octavo.bench.report import random_prompts
from octavo.http_client import ServerAddress
from octavo.measure.limits import measure_limits

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from benchmarks.peers.contenders import Contender
    from octavo.measure.machine_limits import MachineLimits

BF16_BYTES = 2
LOADED_S = 600.0  # for a server to load one adapter
BASE = "smollm2"


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is sent."""

    streams: int = 32
    distinct: tuple[int, ...] = (1, 8, 32)  # adapters among the streams
    input_len: int = 64
    output_len: int = 64
    loads: int = 5  # a round
    many: int = 1000
    slots: int = 16
    many_requests: int = 256
    mixed: int = 16


QUICK = Sizes(4, (1, 2, 4), 16, 8, 2, 12, 4, 24, 4)


@dataclass(slots=True)
class Measured:
    """Of one server; by the name of the work, a figure of each round."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    load_s: list[float] = field(default_factory=list)
    plain_first_s: list[float] = field(default_factory=list)  # of a first token without a load
    num_same: int | None = None  # answers of the mixed batch that are those alone
    num_mixed: int = 0

    def median(self, work: str) -> float | None:
        values = self.seconds.get(work)
        return statistics.median(values) if values else None


# A server, the number of the round (-1: not counted), and where figures go. Raises OSError, Failed.
Work: TypeAlias = "Callable[[Standing, int, Measured], None]"


def main() -> int:
    args = _arguments()
    sizes = QUICK if args.quick else Sizes()
    rounds = args.rounds or (1 if args.quick else 3)
    end_cleanly_on_sigterm()
    warn_if_busy()
    limits = measure_limits()
    print(limits.describe(), file=sys.stderr, flush=True)
    config_file = args.peers / "models" / FORMS[BASE].safetensors / "config.json"
    if not config_file.exists():
        sys.exit(f"{config_file} is not there; benchmarks/peers/setup.sh models writes it")
    config = json.loads(config_file.read_text())
    folder = args.peers / "adapters"
    write_adapters(folder, config, sizes.many + rounds * sizes.loads)
    failures: dict[str, str] = {}
    found: dict[str, Measured] = {}
    chosen = [c for c in contenders(args.peers, config, max(sizes.distinct), failures)
              if not args.only or any(part in c.name for part in args.only.split(","))]  # fmt: skip
    with ExitStack() as stack:
        standings = start_all(chosen, args.peers, stack, failures)
        take_turns(standings, rounds, few(folder, sizes), found, failures)
    chosen = [with_slots(one, sizes.slots) for one in chosen if can_load(one)]
    with ExitStack() as stack:
        standings = start_all(chosen, args.peers, stack, failures)
        take_turns(standings, rounds, many(folder, sizes), found, failures)
    weights = num_weights(config)
    print(report(limits, sizes, weights, found, failures, rounds))
    if args.json:
        document = as_json(limits, sizes, weights, found, failures, rounds)
        Path(args.json).write_text(json.dumps(document, indent=2) + "\n")
    return 0 if found else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers.adapters",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="a few requests: does it run?")
    add_common_arguments(parser, rounds=3)
    return parser.parse_args()


# -- servers


def contenders(
    peers: Path, config: dict[str, Any], slots: int, failures: dict[str, str]
) -> list[Contender]:
    """The bf16 servers, with room for so many adapters in a step."""
    chosen = []
    for one in all_of.CONTENDERS:
        if one.form != "bf16":
            continue
        if is_llama(one):
            if one.missing(peers):
                failures[one.name] = one.missing(peers)
                continue
            files = write_gguf_adapters(peers / "adapters", config, slots)
            flags = [word for file in files for word in ("--lora", str(file))]
            chosen.append(replace(one, command=(*one.command, *flags, "--lora-init-without-apply")))
        else:
            chosen.append(with_slots(one, slots))
    return chosen


def is_llama(contender: Contender) -> bool:
    """It has its adapters from the start, and requests name them by number."""
    return "{bf16}" in contender.command


def can_load(contender: Contender) -> bool:
    return not is_llama(contender)


def with_slots(contender: Contender, slots: int) -> Contender:
    """It loads adapters by vLLM's routes, and has room for so many in a step."""
    command = contender.command
    if "--enable-lora" in command:
        command = command[: command.index("--enable-lora")]
    flags = ("--enable-lora", "--max-loras", str(slots), "--max-cpu-loras", str(4 * slots),
             "--max-lora-rank", "16")  # fmt: skip
    allowed = {
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "OCTAVO_ALLOW_RUNTIME_LORA_UPDATING": "1",
    }
    return replace(contender, command=(*command, *flags), env={**contender.env, **allowed})


def load_adapter(standing: Standing, folder: Path, number: int) -> None:
    """Raises OSError."""
    name = adapter_name(number)
    body = {"lora_name": name, "lora_path": str(folder / name)}
    _post(standing, "/v1/load_lora_adapter", body).close()


def wanted(standing: Standing, number: int | None) -> dict[str, Any]:
    """What a request for an adapter says; None: for the model itself."""
    if is_llama(standing.contender):
        return {"lora": [] if number is None else [{"id": number, "scale": 1.0}]}
    return {"model": BASE if number is None else adapter_name(number)}


# -- work


def take_turns(
    standings: Sequence[Standing], rounds: int, work: Work, found: dict[str, Measured],
    failures: dict[str, str],
) -> None:  # fmt: skip
    """`work` on one server after the other; in the first round, -1, for no figure."""
    for number in range(-1, rounds):
        for standing in standings if number % 2 == 0 else standings[::-1]:
            name = standing.contender.name
            if name in failures:
                continue
            standing.server.resume()
            try:
                work(standing, number, found.setdefault(name, Measured()))
            except (OSError, Failed) as error:
                failures[name] = str(error)
            finally:
                standing.server.pause()


def few(folder: Path, sizes: Sizes) -> Work:
    """As many slots as adapters: streams, loads and bits."""

    def work(standing: Standing, number: int, measured: Measured) -> None:
        if number < 0:
            _load_all(standing, folder, range(max(sizes.distinct)))
        for count in (0, *sizes.distinct):
            _streams(standing, sizes, count, number, measured)
        if number >= 0 and can_load(standing.contender):
            first = sizes.many + number * sizes.loads
            _loads(standing, folder, range(first, first + sizes.loads), measured)
        if number == 0:
            measured.num_mixed = sizes.mixed
            measured.num_same = _same_bits(standing, sizes)

    return work


def many(folder: Path, sizes: Sizes) -> Work:
    """More adapters than slots."""

    def work(standing: Standing, number: int, measured: Measured) -> None:
        if number < 0:
            _load_all(standing, folder, range(sizes.many))
        for count in (sizes.slots, sizes.many):
            _many(standing, sizes, count, number, measured)

    return work


class Failed(Exception):
    """Some requests were not answered as they should be; says how."""


def _load_all(standing: Standing, folder: Path, numbers: range) -> None:
    if not can_load(standing.contender):
        return
    _say(f"{standing.contender.name}: loads {len(numbers)} adapters")
    for number in numbers:
        load_adapter(standing, folder, number)


def _streams(standing: Standing, sizes: Sizes, count: int, number: int, measured: Measured) -> None:
    adapters = [i % count if count else None for i in range(sizes.streams)]
    seconds = _run(standing, sizes, adapters, sizes.output_len, f"streams/{count}/{number}")
    if number >= 0:
        measured.seconds.setdefault(f"streams {count}", []).append(seconds)
        _say(f"{standing.contender.name}: streams with {count} adapters: {seconds:.3g} s")


def _many(standing: Standing, sizes: Sizes, count: int, number: int, measured: Measured) -> None:
    """By Zipf's law, also among as many as there are slots: the tail alone differs."""
    weights = list(accumulate(1.0 / rank for rank in range(1, count + 1)))
    choose = random.Random(number)
    adapters = choose.choices(range(count), cum_weights=weights, k=sizes.many_requests)
    if number < 0:
        adapters = adapters[: sizes.streams]
    seconds = _run(standing, sizes, adapters, sizes.output_len // 2, f"many/{count}/{number}")
    if number >= 0:
        measured.seconds.setdefault(f"many {count}", []).append(seconds)
        _say(f"{standing.contender.name}: {count} adapters by Zipf's law: {seconds:.3g} s")


def _run(
    standing: Standing, sizes: Sizes, adapters: Sequence[int | None], output_len: int, seed: str
) -> float:
    """Seconds that all of it takes. Raises Failed."""
    number = random.Random(seed).getrandbits(32)
    plan = load.LoadPlan(
        address=ServerAddress.parse(standing.server.url),
        model=BASE,
        prompts=random_prompts(number, len(adapters), sizes.input_len, VOCAB_SIZE),
        output_len=output_len,
        max_concurrency=sizes.streams,
        extra=dict(standing.contender.extra),
        extras=[wanted(standing, adapter) for adapter in adapters],
    )
    results, elapsed_s = asyncio.run(load.run(plan))
    seen = load.figures(plan, results, elapsed_s)
    if seen["failed"] or seen["wrong_length"]:
        raise Failed(f"{seed}: {seen['errors'] or 'answers of another length'}")
    return elapsed_s


def _loads(standing: Standing, folder: Path, numbers: range, measured: Measured) -> None:
    """Adapters that it has not seen, whose files were just written or read: from page cache."""
    for number in numbers:
        (folder / adapter_name(number) / "adapter_model.safetensors").read_bytes()
        measured.plain_first_s.append(_first_token_s(standing, None))
        began_at = time.perf_counter()
        load_adapter(standing, folder, number)
        _first_token_s(standing, number)
        measured.load_s.append(time.perf_counter() - began_at)


def _first_token_s(standing: Standing, number: int | None) -> float:
    body = {"prompt": "Once", "max_tokens": 1, "temperature": 0, "model": BASE}
    began_at = time.perf_counter()
    _post(standing, "/v1/completions", body | wanted(standing, number)).close()
    return time.perf_counter() - began_at


def _same_bits(standing: Standing, sizes: Sizes) -> int:
    """How many of a mixed batch's answers, with their probabilities, are those of each alone."""
    count = max(sizes.distinct) + 1
    bodies = [
        {"model": BASE, "prompt": f"{i}. The capital of France is", "max_tokens": 16,
         "temperature": 0, "logprobs": 1, **standing.contender.extra,
         **wanted(standing, i % count if i % count < count - 1 else None)}
        for i in range(sizes.mixed)
    ]  # fmt: skip

    with ThreadPoolExecutor(len(bodies)) as threads:
        mixed = list(threads.map(lambda body: _answer(standing, body), bodies))
    return sum(_answer(standing, b) == one for b, one in zip(bodies, mixed, strict=True))


def _answer(standing: Standing, body: dict[str, Any]) -> Any:
    with _post(standing, "/v1/completions", body) as answer:
        choice = json.load(answer)["choices"][0]
    scores = (choice.get("logprobs") or {}).get("token_logprobs")
    return choice["text"], scores


def _post(standing: Standing, path: str, body: dict[str, Any]) -> Any:
    """Raises OSError, which a status of 400 and above is too."""
    request = urllib.request.Request(
        standing.server.url + path, json.dumps(body).encode(), {"content-type": "application/json"}
    )
    return urllib.request.urlopen(request, timeout=LOADED_S)


# -- what comes of it


def added_s(limits: MachineLimits, sizes: Sizes, weights: int, count: int) -> float:
    """The least that `count` adapters add to the streams: in each step of one token a stream, and
    for the prompts at once, the slower of reading them and of multiplying with them."""
    peak = limits.gemm_gflop_s.get("bf16") or limits.gemm_gflop_s["float32"]

    def least(num_tokens: int) -> float:
        reading = count * weights * BF16_BYTES / (limits.read_gb_s * 1e9)
        return max(reading, 2.0 * num_tokens * weights / (peak * 1e9))

    steps = sizes.output_len - 1
    return least(sizes.streams * sizes.input_len) + steps * least(sizes.streams)


def rows(
    limits: MachineLimits, sizes: Sizes, weights: int, measured: Measured
) -> dict[str, float | None]:
    """The figures of one server, by name; None where it does not do that."""
    found: dict[str, float | None] = {}
    plain = measured.median("streams 0")
    for count in sizes.distinct:
        with_them = measured.median(f"streams {count}")
        ratio = with_them / plain if with_them and plain else None
        found[f"{count} adapters, times the seconds of none"] = ratio
        bound = plain + added_s(limits, sizes, weights, count) if plain else None
        found[f"{count} adapters, times the bound"] = (
            with_them / bound if with_them and bound else None
        )
    first = statistics.median(measured.load_s) if measured.load_s else None
    found["load to first token, ms"] = None if first is None else 1e3 * first
    plain_first = statistics.median(measured.plain_first_s) if measured.plain_first_s else None
    found["first token without a load, ms"] = None if plain_first is None else 1e3 * plain_first
    few_s, many_s = (measured.median(f"many {n}") for n in (sizes.slots, sizes.many))
    share = 100 * few_s / many_s if few_s and many_s else None
    found[f"{sizes.many:,} adapters, % of the speed of {sizes.slots}"] = share
    same = None if measured.num_same is None else 100 * measured.num_same / measured.num_mixed
    found["mixed answers equal to each alone, %"] = same
    return found


def report(
    limits: MachineLimits, sizes: Sizes, weights: int, found: dict[str, Measured],
    failures: dict[str, str], rounds: int,
) -> str:  # fmt: skip
    """Markdown: a column for each server."""
    lines = [f"{limits.describe()}; {sizes.streams} streams, {sizes.input_len} in, "
             f"{sizes.output_len} out; medians of {rounds} rounds", ""]  # fmt: skip
    columns = {name: rows(limits, sizes, weights, one) for name, one in found.items()}
    lines.append(f"| | {' | '.join(columns)} |")
    lines.append("|---" * (1 + len(columns)) + "|")
    for what in next(iter(columns.values()), {}):
        cells = [column[what] for column in columns.values()]
        shown = ["-" if cell is None else f"{cell:,.3g}" for cell in cells]
        lines.append(f"| {what} | {' | '.join(shown)} |")
    if failures:
        lines += ["", "Not compared:", *(f"- {name}: {why}" for name, why in failures.items())]
    return "\n".join(lines)


def as_json(
    limits: MachineLimits, sizes: Sizes, weights: int, found: dict[str, Measured],
    failures: dict[str, str], rounds: int,
) -> dict[str, Any]:  # fmt: skip
    return {
        "limits": limits.describe(),
        "rounds": rounds,
        "servers": {
            name: {
                "figures": rows(limits, sizes, weights, one),
                "seconds": one.seconds,
                "load_s": one.load_s,
                "plain_first_s": one.plain_first_s,
            }
            for name, one in found.items()
        },
        "failures": failures,
    }


def _say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
