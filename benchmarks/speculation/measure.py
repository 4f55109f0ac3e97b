"""The same requests with and without speculation, in turn, and what it gains."""

from __future__ import annotations

import json
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Protocol

from benchmarks.speculation.answers import KV_BYTES, MAX_LEN, params_of
from benchmarks.speculation.figures import Cell, Figures, Pair, Run, losses, table
from benchmarks.speculation.prompts import KINDS, requests
from benchmarks.speculation.reporting import say
from octavo import LLM, SamplingParams
from octavo.measure.steal_time import StealTime, describe
from octavo_engine.core.engine import Engine
from octavo_engine.models.config import ModelConfig
from octavo_engine.weights.source import resolve_model

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Sequence

    from benchmarks.speculation.prompts import Request

SEED = 1_000_000  # of requests that are measured
STREAMS = (1, 4, 16, 64)
WITHOUT_FILES = ("ngram", "suffix")
WARM_UP = 2  # requests of a stream before anything is timed: what steps take is learnt
WARM_UP_TOKENS = 2048  # of all streams, at most
MANY = 8  # streams from which on a pair is so long that one fewer is enough


class Server(Protocol):
    """Something that answers requests."""

    def answer(
        self, batch: Sequence[Request], params: Sequence[SamplingParams], streams: int
    ) -> Run: ...


class OctavoServer:
    """An engine in this process."""

    def __init__(self, args: argparse.Namespace, speculation: dict[str, Any] | None) -> None:
        self.llm = LLM(
            args.model, max_model_len=MAX_LEN, kv_cache_memory_bytes=KV_BYTES,
            num_threads=args.threads, quantization=args.weights, speculative_config=speculation,
        )  # fmt: skip
        engine = self.llm._engine
        assert isinstance(engine, Engine)
        self._engine = engine

    def answer(
        self, batch: Sequence[Request], params: Sequence[SamplingParams], streams: int
    ) -> Run:
        """So many at a time."""
        self.llm.reset_prefix_cache()
        before, processor_s = self._engine.stats(), time.process_time()
        started, token_ids = time.perf_counter(), []
        for first in range(0, len(batch), streams):
            part = slice(first, first + streams)
            token_ids += self._answer(batch[part], params[part])
        seconds = time.perf_counter() - started
        after = self._engine.stats()
        return Run(
            seconds,
            time.process_time() - processor_s,
            sum(map(len, token_ids)),
            after.steps - before.steps,
            after.spec_drafts - before.spec_drafts,
            after.spec_accepted_tokens - before.spec_accepted_tokens,
            token_ids,
        )

    def _answer(
        self, batch: Sequence[Request], params: Sequence[SamplingParams]
    ) -> list[list[int]]:
        if batch[0].token_ids:
            outputs = self.llm.generate(
                [list(request.token_ids) for request in batch], params, use_tqdm=False
            )
        else:
            chats = [[{"role": "user", "content": request.content}] for request in batch]
            outputs = self.llm.chat(chats, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]


def speculation_of(method: str, *, num_tokens: int, quantization: str) -> dict[str, Any]:
    """`ngram`, `suffix`, `mtp`, or METHOD=FOLDER, as --speculative-config has it."""
    name, _, folder = method.partition("=")
    values: dict[str, Any] = {"method": name}
    if name == "ngram":
        values |= {"prompt_lookup_min": 2, "prompt_lookup_max": 5}
    if name != "suffix":
        values["num_speculative_tokens"] = num_tokens
    if folder:
        values["model"] = folder
    if name not in WITHOUT_FILES:
        values["quantization"] = quantization
    return values


def batch_of(
    kind: str, streams: int, args: argparse.Namespace, vocab_size: int,
    max_tokens: int | None = None,
) -> tuple[list[Request], list[SamplingParams]]:  # fmt: skip
    """Requests of so many streams: at one some in turn, at many one of each."""
    count = max(streams, args.requests)
    batch = requests(kind, count, seed=SEED, held_out=True, vocab_size=vocab_size)
    temperature = 1.0 if kind == "random" else args.temperature
    params = [
        params_of(
            request,
            max_tokens=max_tokens or args.max_tokens,
            temperature=temperature,
            seed=SEED + index,
        )
        for index, request in enumerate(batch)
    ]
    return batch, params


def cells_of(method: str, args: argparse.Namespace) -> Iterator[Cell]:
    """Single streams of all kinds first: what is cut off by the time is what matters less."""
    settings = json.dumps(
        {
            "model": args.model,
            "draft_tokens": args.draft_tokens,
            "weights": args.weights,
            "quantization": args.quantization,
            "requests": args.requests,
            "max_tokens": args.max_tokens,
            "temperature": args.temperature,
            "threads": args.threads,
        }
    )
    for streams in sorted(args.streams or STREAMS):
        for kind in args.kind or KINDS:
            yield Cell(method, kind, streams, settings)


def measure_cell(
    cell: Cell, servers: tuple[Server, Server], args: argparse.Namespace, figures: Figures,
    vocab_size: int, until: float,
) -> None:  # fmt: skip
    """Pairs that are missing, as long as there is time."""
    batch, params = batch_of(cell.kind, cell.streams, args, vocab_size)
    if is_missing(cell, args, figures) and time.monotonic() < until:
        warm = min(len(batch), WARM_UP * cell.streams)
        short = min(args.max_tokens, max(1, WARM_UP_TOKENS // cell.streams))
        _, warm_params = batch_of(cell.kind, cell.streams, args, vocab_size, max_tokens=short)
        for server in servers:
            server.answer(batch[:warm], warm_params[:warm], cell.streams)
    while is_missing(cell, args, figures) and time.monotonic() < until:
        plain, drafted = _in_turn(servers, batch, params, cell.streams, figures.count(cell) % 2)
        if plain.token_ids != drafted.token_ids:
            raise SystemExit(f"{cell.method}, {cell.kind}: the answers differ; they must not.")
        pair = Pair.of(plain, drafted)
        figures.add(cell, pair)
        say(f"{cell.method}, {cell.kind}, {cell.streams} streams: {pair.plain_tokens_per_s:.0f} "
            f"and {pair.tokens_per_s:.0f} tokens/s, {describe_pair(pair)}")  # fmt: skip


def is_missing(cell: Cell, args: argparse.Namespace, figures: Figures) -> bool:
    """Whether a pair is."""
    wanted: int = args.pairs - (cell.streams >= MANY)
    return figures.count(cell) < max(1, wanted)


def _in_turn(
    servers: tuple[Server, Server],
    batch: Sequence[Request],
    params: Sequence[SamplingParams],
    streams: int,
    first: int,
) -> tuple[Run, Run]:
    """Each is first in every other pair: a machine that gets slower favours neither."""
    runs = {number: servers[number].answer(batch, params, streams) for number in (first, 1 - first)}
    return runs[0], runs[1]


def describe_pair(pair: Pair) -> str:
    parts = [f"{pair.gain:.2f} times as fast"]
    if pair.processor_ratio is not None:
        parts.append(f"{pair.processor_ratio:.2f} times the processor time")
    if pair.acceptance_length is None:
        parts.append("nothing drafted")
    else:
        parts.append(f"acceptance length {pair.acceptance_length:.2f}")
    return ", ".join(parts)


def measure(args: argparse.Namespace) -> None:
    """Raises SystemExit where an answer differs."""
    figures = Figures(args.out)
    if not args.print_only:
        steal, until = StealTime(), time.monotonic() + 60 * args.minutes
        vocab_size = ModelConfig.from_hf(resolve_model(args.model).config).vocab_size
        _measure_octavo(args, figures, vocab_size, until)
        if note := describe(steal.share()):
            say(note)
    say("\n".join(["", *table(figures.cells)]))
    for sentence in losses(figures.cells):
        say(f"Slower than without: {sentence}")


def _measure_octavo(
    args: argparse.Namespace, figures: Figures, vocab_size: int, until: float
) -> None:
    missing = {
        method: [cell for cell in cells_of(method, args) if is_missing(cell, args, figures)]
        for method in args.method or WITHOUT_FILES
    }
    if not any(missing.values()):
        return
    with ExitStack() as all_done:
        plain = OctavoServer(args, None)
        all_done.callback(plain.llm.close)
        for method, cells in missing.items():
            if not cells or time.monotonic() > until:
                continue
            config = speculation_of(
                method, num_tokens=args.draft_tokens, quantization=args.quantization
            )
            with ExitStack() as done:
                drafted = OctavoServer(args, config)
                done.callback(drafted.llm.close)
                for cell in cells:
                    measure_cell(cell, (plain, drafted), args, figures, vocab_size, until)
