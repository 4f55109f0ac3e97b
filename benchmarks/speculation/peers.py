"""vLLM's CPU build and llama.cpp's server beside Octavo, each with and without its speculation, on
the same requests, one stream.

What a client sees: the tokens of an answer behind its first event, and the seconds from that event
to the last one. Acceptance lengths are each server's own account.
"""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.peers.contenders import CONTENDERS
from benchmarks.servers import NotReady, Server, free_port, warn_if_busy
from benchmarks.speculation.figures import Cell, Figures, Run, losses, table
from benchmarks.speculation.measure import is_missing, measure_cell, speculation_of
from benchmarks.speculation.prompts import KINDS
from benchmarks.speculation.reporting import say

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from benchmarks.peers.contenders import Contender
    from benchmarks.speculation.prompts import Request
    from octavo import SamplingParams

WITHIN_S = 600.0  # of one answer
VOCAB_SIZE = 49_152  # of the model that all serve
# The number of draft tokens is put in place of {n}. A match has one length in llama.cpp.
LLAMA_METHODS = {
    "ngram-simple": "--spec-type ngram-simple --spec-ngram-simple-size-n 2 "
    "--spec-ngram-simple-size-m {n}",
    "ngram-cache": "--spec-type ngram-cache --spec-draft-n-max {n}",
}
VLLM_METHODS = ("ngram", "suffix", "draft_model", "medusa", "eagle", "eagle3")


class Speculating(NamedTuple):
    """A contender, and what is added to its command to have it speculate."""

    contender: Contender
    method: str
    flags: tuple[str, ...]


def speculating(args: argparse.Namespace) -> Iterator[Speculating]:
    """All that is to be compared: every contender with each method that it has."""
    methods = args.method or ["ngram"]
    for contender in CONTENDERS:
        if args.only and not any(part in contender.name for part in args.only.split(",")):
            continue
        if "llama.cpp" in contender.name:
            for name, flags in LLAMA_METHODS.items():
                given = flags.format(n=args.draft_tokens)
                yield Speculating(contender, name, tuple(given.split()))
            continue
        for method in methods:
            config = speculation_of(method, num_tokens=args.draft_tokens, quantization="auto")
            if not contender.is_ours:
                config.pop("quantization", None)
                if config["method"] not in VLLM_METHODS:
                    continue
            yield Speculating(contender, method, ("--speculative-config", json.dumps(config)))


@dataclass
class PeerServer:
    """One that is running; it stands still while the other is measured."""

    server: Server
    extra: Mapping[str, Any]

    def answer(
        self, batch: Sequence[Request], params: Sequence[SamplingParams], streams: int
    ) -> Run:
        """One request at a time."""
        assert streams == 1
        self.server.resume()
        try:
            before, processor_s = self._counters(), self.server.cpu_s()
            answers = [self._one(*both) for both in zip(batch, params, strict=True)]
            processor_s = self.server.cpu_s() - processor_s
            after = self._counters()
        finally:
            self.server.pause()
        num_tokens = sum(one.num_tokens for one in answers)
        drafts, accepted = (after[name] - before[name] for name in ("drafts", "accepted"))
        if any(one.num_drafted for one in answers):  # llama.cpp: it does not count steps apart
            accepted = sum(one.num_accepted for one in answers)
            drafts = num_tokens - accepted
        seconds = sum(one.seconds for one in answers)
        if not seconds:
            raise SystemExit(f"{self.server.url}: no answer had two events with text")
        return Run(
            seconds, processor_s, num_tokens, num_tokens - accepted, drafts, accepted, []
        )  # bits of a peer depend on the batch, so its tokens may differ

    def _one(self, request: Request, params: SamplingParams) -> Streamed:
        path, body = body_of(request, params, self.extra)
        sent = urllib.request.Request(
            self.server.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(sent, timeout=WITHIN_S) as reply:
                return read_stream(reply, time.perf_counter)
        except urllib.error.HTTPError as error:
            raise SystemExit(f"{self.server.url}{path} refused: {error.read(300)!r}") from None

    def _counters(self) -> dict[str, int]:
        try:
            with urllib.request.urlopen(f"{self.server.url}/metrics", timeout=10) as reply:
                return counters_of(reply.read().decode())
        except urllib.error.HTTPError:  # llama.cpp's are off, and say nothing of drafts
            return counters_of("")


class Streamed(NamedTuple):
    """An answer, from its first event to its last."""

    num_tokens: int  # behind those of the first event
    seconds: float
    num_drafted: int = 0  # llama.cpp's account
    num_accepted: int = 0


def read_stream(lines: Iterable[bytes], now: Any) -> Streamed:
    """Raises SystemExit where the server does not count tokens."""
    first = last = 0.0
    usage: dict[str, Any] = {}
    timings: dict[str, Any] = {}
    for line in lines:
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line.removeprefix(b"data: "))
        if "error" in event:
            raise SystemExit(f"a server broke a stream off: {event['error']!r:.300}")
        choices = event.get("choices") or [{}]
        if choices[0].get("text") or (choices[0].get("delta") or {}).get("content"):
            last = now()
            first = first or last
        usage, timings = event.get("usage") or usage, event.get("timings") or timings
    if "completion_tokens" not in usage:
        raise SystemExit("a server's stream ended without its number of tokens")
    return Streamed(
        max(0, usage["completion_tokens"] - 1),
        last - first,
        timings.get("draft_n", 0),
        timings.get("draft_n_accepted", 0),
    )


def counters_of(text: str) -> dict[str, int]:
    """Of Octavo's and of vLLM's metrics, which have the same names behind their own."""
    found = {"drafts": 0, "accepted": 0}
    names = {"spec_decode_num_drafts": "drafts", "spec_decode_num_accepted_tokens": "accepted"}
    for line in text.splitlines():
        name, _, value = line.rpartition(" ")
        name = name.partition("{")[0].removesuffix("_total")
        name = name.removeprefix("octavo_").removeprefix("vllm:")
        if name in names:
            found[names[name]] += int(float(value))
    return found


def body_of(
    request: Request, params: SamplingParams, extra: Mapping[str, Any]
) -> tuple[str, dict[str, Any]]:
    """Path and body, as all of them read it."""
    body: dict[str, Any] = {
        "model": "smollm2",
        "max_tokens": params.max_tokens,
        "temperature": params.temperature,
        "seed": params.seed,
        "stream": True,
        "stream_options": {"include_usage": True},
        **extra,
    }
    if request.token_ids:
        # Noise is often followed by an end at once, and then there is nothing to time.
        return "/v1/completions", body | {"prompt": list(request.token_ids), "ignore_eos": True}
    body["messages"] = [{"role": "user", "content": request.content}]
    if request.schema is not None:
        schema = {"name": "answer", "schema": request.schema}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    return "/v1/chat/completions", body


def compare(args: argparse.Namespace) -> None:
    """Raises SystemExit where an answer cannot be read."""
    figures, until = Figures(args.out), time.monotonic() + 60 * args.minutes
    if not args.print_only:
        warn_if_busy()
        for one in speculating(args):
            if time.monotonic() < until:
                _measure(one, args, figures, until)
    say("\n".join(["", *table(figures.cells)]))
    for sentence in losses(figures.cells):
        say(f"Slower than without: {sentence}")


def _measure(one: Speculating, args: argparse.Namespace, figures: Figures, until: float) -> None:
    """The two servers of a contender, in turn. What cannot be started is named and left out."""
    name = f"{one.contender.name}, {one.method}"
    cells = [cell for cell in peer_cells(name, args) if is_missing(cell, args, figures)]
    if not cells:
        return
    if missing := one.contender.missing(args.peers):
        say(f"{name}: left out: {missing}")
        return
    with ExitStack() as running:
        try:
            servers = [
                _start(one.contender, flags, args, running, name) for flags in ((), one.flags)
            ]
        except NotReady as error:
            say(f"{name}: left out: {error}")
            return
        for cell in cells:
            measure_cell(cell, (servers[0], servers[1]), args, figures, VOCAB_SIZE, until)


def peer_cells(name: str, args: argparse.Namespace) -> list[Cell]:
    """One stream of every kind."""
    names = ("draft_tokens", "requests", "max_tokens", "temperature")
    settings = json.dumps({one: getattr(args, one) for one in names})
    return [Cell(name, kind, 1, settings) for kind in args.kind or KINDS]


def _start(
    contender: Contender, flags: Sequence[str], args: argparse.Namespace, running: ExitStack,
    name: str,
) -> PeerServer:  # fmt: skip
    port = free_port()
    log: Path = args.out.parent / f"{name.replace(' ', '-').replace('/', '-')}-{bool(flags)}.log"
    server = Server.start(
        [*contender.start_command(port, args.peers), *flags],
        port=port,
        log=log,
        ready=contender.ready,
        env=contender.environment(port, args.peers),
        within_s=contender.within_s,
    )
    running.enter_context(server)
    server.pause()
    return PeerServer(server, contender.extra)
