"""Octavo's CPU engine beside vLLM and llama.cpp: the same requests, in turn, on this machine.

    benchmarks/peers/setup.sh                 # once: environments and models, 15 GB, an hour
    python -m benchmarks.peers.run [--quick | --full] [--large] [--json FILE] [--only NAME,...]
    python -m benchmarks.peers.run --ranks    # two processes for one model: setup.sh ranks

Every server is started once and then stands still (SIGSTOP) while another is measured. Each round
goes through all of them, the next one the other way round, so that a drift of the machine meets all
alike; prompts of a round are the same for all, and new to their caches. Figures are medians of the
rounds. A server that is not installed, or cannot run here, is named with its reason, and the others
are compared. Beside each figure is what this machine could do at best, from its rate of reading and
of multiplying, measured first; the picture has it as a line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.peers import contenders as all_of
from benchmarks.peers import picture
from benchmarks.peers.bounds import bounds_of
from benchmarks.peers.contenders import FOLDER, Contender
from benchmarks.servers import (
    Memory,
    NotReady,
    Server,
    end_cleanly_on_sigterm,
    free_port,
    warn_if_busy,
)
from octavo.bench import load
from octavo.bench.report import random_prompts
from octavo.http_client import ServerAddress
from octavo.measure.limits import measure_limits
from octavo.measure.steal_time import StealTime

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.peers.bounds import Bounds
    from octavo.measure.machine_limits import MachineLimits

VOCAB_SIZE = 49_152
LOGS = Path("build/peers")


@dataclass(frozen=True, slots=True)
class Scenario:
    """Some requests of one kind; `figures` are the names of what they show."""

    name: str
    concurrency: int
    num_requests: int
    input_len: int
    output_len: int
    figures: tuple[str, ...]

    @property
    def shown(self) -> str:
        return picture.shown_rate(self.figures)


# What a bigger model is worth where memory binds: fewer requests, for the slowest of the servers.
LARGE_SCENARIOS = (
    Scenario("one stream, 32 in, 64 out", 1, 2, 32, 64, ("tok_s", "tpot_ms")),
    Scenario("prompt of 512", 1, 2, 512, 2, ("prompt_tok_s", "ttft_ms")),
    Scenario("8 streams, 128 in, 64 out", 8, 8, 128, 64, ("out_tok_s", "tpot_ms", "cpu_s_1000")),
)
SCENARIOS = (
    Scenario("one stream, 32 in, 128 out", 1, 2, 32, 128, ("tok_s", "tpot_ms")),
    Scenario("prompt of 1024", 1, 3, 1024, 2, ("ttft_ms", "prompt_tok_s")),
    Scenario(
        "32 streams, 256 in, 128 out",
        32,
        32,
        256,
        128,
        ("out_tok_s", "ttft_ms", "tpot_ms", "cpu_s_1000"),
    ),
)
UNITS = {
    "tok_s": "tok/s, 1 ÷ time per token",
    "tpot_ms": "ms per output token, p50",
    "ttft_ms": "ms to first token, p50",
    "prompt_tok_s": "prompt tok/s",
    "out_tok_s": "output tok/s",
    "cpu_s_1000": "CPU-seconds per 1,000 tokens, prompts included",
}
LESS_IS_BETTER = frozenset(("tpot_ms", "ttft_ms", "cpu_s_1000"))


@dataclass(slots=True)
class Standing:
    """A contender with its server, and what was measured of it."""

    contender: Contender
    server: Server
    memory: Memory | None = None  # after all work
    runs: dict[str, list[dict[str, float]]] = field(default_factory=dict)  # by scenario

    def median(self, scenario: str, figure: str) -> float | None:
        values = [run[figure] for run in self.runs.get(scenario, ()) if figure in run]
        return statistics.median(values) if values else None


def main() -> int:
    args = _arguments()
    rounds = args.rounds or (1 if args.quick else 5 if args.full else 2)
    chosen = list(all_of.CONTENDERS)
    if args.full:
        chosen += [*all_of.WITH_INT8, *all_of.WITH_DEFAULTS]
    if args.ranks:
        chosen = list(all_of.WITH_RANKS)
    names = [one.name for one in chosen]
    if args.only:
        chosen = [c for c in chosen if any(part in c.name for part in args.only.split(","))]
        if not chosen:
            sys.exit(f"--only {args.only}: names are {', '.join(names)}")
    scenarios = list(LARGE_SCENARIOS if args.large else SCENARIOS)
    if args.quick:
        scenarios = [_shorter(one) for one in scenarios]
    model = "large" if args.large else "even" if args.ranks else "smollm2"

    end_cleanly_on_sigterm()
    warn_if_busy()
    limits = measure_limits()
    print(limits.describe(), file=sys.stderr, flush=True)
    failures: dict[str, str] = {}
    with ExitStack() as stack:
        standings = start_all(chosen, args.peers, stack, failures, model)
        for number in range(rounds):
            compare(standings if number % 2 == 0 else standings[::-1], scenarios, number, failures)
        for standing in standings:
            standing.memory = standing.server.memory()
    bounds = bounds_of(standings, scenarios, limits, args.peers, model)
    print(report(limits, standings, scenarios, failures, rounds, bounds))
    document = as_json(limits, standings, scenarios, failures, rounds) | {"bounds": bounds}
    if args.json:
        Path(args.json).write_text(json.dumps(document, indent=2) + "\n")
    picture.draw_if_possible(args.plot, document)
    return 0 if standings else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers.run",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument(
        "--quick", action="store_true", help="one round of few requests: does it run?"
    )
    parser.add_argument(
        "--full", action="store_true", help="5 rounds; vLLM's defaults and int8 too"
    )
    parser.add_argument(
        "--ranks", action="store_true",
        help="two processes for one model, each with a core: ranks, and llama.cpp's RPC servers",
    )  # fmt: skip
    parser.add_argument(
        "--large", action="store_true",
        help="a model of 1.4 billion weights: setup.sh large makes it"
    )  # fmt: skip
    parser.add_argument(
        "--plot", type=Path, default=LOGS / "peers.png", metavar="FILE",
        help=f"the picture (default: {LOGS}/peers.png)",
    )  # fmt: skip
    add_common_arguments(parser, rounds=2)
    return parser.parse_args()


def add_common_arguments(parser: argparse.ArgumentParser, *, rounds: int) -> None:
    """Of all comparisons with the peers."""
    parser.add_argument("--rounds", type=int, metavar="N", help=f"default: {rounds}")
    parser.add_argument("--only", metavar="NAMES", help="parts of names, separated by commas")
    parser.add_argument(
        "--peers", type=Path, default=FOLDER, metavar="DIR", help=f"default: {FOLDER}"
    )
    parser.add_argument("--json", metavar="FILE", help="write all figures there as well")


def start_all(
    chosen: Sequence[Contender],
    peers: Path,
    stack: ExitStack,
    failures: dict[str, str],
    model: str = "smollm2",
) -> list[Standing]:
    """One after the other; each stands still once it is ready. Who does not get so far is named."""
    standings = []
    for contender in chosen:
        reason = contender.missing(peers, model)
        if reason:
            _give_up(contender, reason, failures)
            continue
        port = free_port()
        try:
            server = Server.start(
                contender.start_command(port, peers, model),
                port=port,
                log=LOGS / f"{contender.name.replace(' ', '-')}.log",
                ready=contender.ready,
                env=contender.environment(port, peers),
                within_s=contender.within_s,
            )
        except NotReady as error:
            _give_up(contender, str(error), failures)
            continue
        stack.enter_context(server)
        _say(f"{contender.name}: ready after {server.ready_s:.1f} s")
        server.pause()
        standings.append(Standing(contender, server))
    return standings


def compare(
    standings: Sequence[Standing],
    scenarios: Sequence[Scenario],
    number: int,
    failures: dict[str, str],
) -> None:
    """One round: every scenario, on one server after the other."""
    for scenario in scenarios:
        for standing in standings:
            name = standing.contender.name
            standing.server.resume()
            try:
                if number == 0:  # what a server compiles or touches first is not its speed
                    measure(standing, _shorter(scenario), "warm-up")
                figures, error = measure(standing, scenario, f"{scenario.name}/{number}")
            finally:
                standing.server.pause()
            if error:
                failures[name] = f"{scenario.name}: {error}"
            else:
                standing.runs.setdefault(scenario.name, []).append(figures)
            shown = ", ".join(
                f"{figures[f]:.4g} {UNITS[f]}" for f in scenario.figures if f in figures
            )
            _say(f"round {number + 1}, {scenario.name}, {name}: {error or shown}")


def measure(standing: Standing, scenario: Scenario, seed: str) -> tuple[dict[str, float], str]:
    """What clients see of a scenario; and what went wrong, if anything."""
    prompts = random_prompts(_number(seed), scenario.num_requests, scenario.input_len, VOCAB_SIZE)
    plan = load.LoadPlan(
        address=ServerAddress.parse(standing.server.url),
        model="smollm2",
        prompts=prompts,
        output_len=scenario.output_len,
        max_concurrency=scenario.concurrency,
        extra=dict(standing.contender.extra),
    )
    cpu_before, stolen = standing.server.cpu_s(), StealTime()
    results, elapsed_s = asyncio.run(load.run(plan))
    cpu_s = standing.server.cpu_s() - cpu_before
    seen = load.figures(plan, results, elapsed_s)
    if seen["failed"] or seen["wrong_length"]:
        reasons = ", ".join(f"{count} x {kind}" for kind, count in seen["errors"].items())
        return {}, reasons or f"{seen['wrong_length']} answers of another length than requested"
    figures = {
        "out_tok_s": seen["output_throughput"],
        "ttft_ms": seen["p50_ttft_ms"],
        "prompt_tok_s": scenario.input_len / seen["p50_ttft_ms"] * 1e3,
        "cores": cpu_s / elapsed_s,
        "cpu_s_1000": cpu_s / (seen["total_input_tokens"] + seen["total_output_tokens"]) * 1e3,
        "stolen": stolen.share() or 0.0,
    }
    if seen.get("p50_tpot_ms"):
        figures |= {"tpot_ms": seen["p50_tpot_ms"], "tok_s": 1e3 / seen["p50_tpot_ms"]}
    return figures, ""


def report(
    limits: MachineLimits,
    standings: Sequence[Standing],
    scenarios: Sequence[Scenario],
    failures: dict[str, str],
    rounds: int,
    bounds: Bounds | None = None,
) -> str:
    """Markdown: a row for each server, and how many times better Octavo is in the same form."""
    lines = [f"{limits.describe()}; medians of {rounds} rounds", ""]
    lines += ["| start | seconds to ready | memory, MB |", "|---|---|---|"]
    for standing in standings:
        memory = "" if standing.memory is None else f"{standing.memory.total_bytes / 1e6:,.0f}"
        lines.append(f"| {standing.contender.name} | {standing.server.ready_s:.1f} | {memory} |")
    for scenario in scenarios:
        heads = [f"{UNITS[figure]} | Octavo is" for figure in scenario.figures]
        lines += ["", f"| {scenario.name} | {' | '.join(heads)} |"]
        lines.append("|---" * (1 + 2 * len(heads)) + "|")
        for standing in standings:
            cells = [_cell(standing, standings, scenario.name, f) for f in scenario.figures]
            lines.append(f"| {standing.contender.name} | {' | '.join(cells)} |")
        for form, of_form in (bounds or {}).items():
            if (best := of_form.get(scenario.name)) is not None:
                cells = [
                    f"{best:,.4g} | " if f == scenario.shown else "- | " for f in scenario.figures
                ]
                lines.append(f"| *the machine's limit, {form}* | {' | '.join(cells)} |")
    shares = [run["stolen"] for s in standings for runs in s.runs.values() for run in runs]
    if shares:
        usual, most = (f"{100 * share:.0f} %" for share in (statistics.median(shares), max(shares)))
        lines += [
            "",
            f"Taken by the machine's host: {usual} of the processor time, at most {most}.",
        ]
    if failures:
        lines += ["", "Not compared:", *(f"- {name}: {why}" for name, why in failures.items())]
    return "\n".join(lines)


def _cell(standing: Standing, standings: Sequence[Standing], scenario: str, figure: str) -> str:
    value = standing.median(scenario, figure)
    if value is None:
        return "- | "
    ratio = advantage(standing, standings, scenario, figure)
    return f"{value:,.4g} | {'' if ratio is None else f'{ratio:.2f} x'}"


def advantage(
    standing: Standing, standings: Sequence[Standing], scenario: str, figure: str
) -> float | None:
    """How many times better Octavo is with weights of the same form; None of Octavo itself."""
    ours = next(
        (s for s in standings
         if s.contender.is_ours and s.contender.form == standing.contender.form), None,
    )  # fmt: skip
    if ours is None or standing.contender.is_ours:
        return None
    theirs, own = standing.median(scenario, figure), ours.median(scenario, figure)
    if not theirs or not own:
        return None
    return theirs / own if figure in LESS_IS_BETTER else own / theirs


def as_json(
    limits: MachineLimits,
    standings: Sequence[Standing],
    scenarios: Sequence[Scenario],
    failures: dict[str, str],
    rounds: int,
) -> dict[str, Any]:
    return {
        "limits": asdict(limits),
        "rounds": rounds,
        "scenarios": [asdict(scenario) for scenario in scenarios],
        "servers": [
            {
                "name": s.contender.name,
                "form": s.contender.form,
                "ready_s": s.server.ready_s,
                "memory_bytes": None if s.memory is None else s.memory.total_bytes,
                "runs": s.runs,
                "octavo_is": {
                    scenario.name: {f: advantage(s, standings, scenario.name, f)
                                    for f in scenario.figures}
                    for scenario in scenarios
                },
            }
            for s in standings
        ],
        "failures": failures,
    }  # fmt: skip


def _shorter(scenario: Scenario) -> Scenario:
    """To see that it runs."""
    return Scenario(
        scenario.name, scenario.concurrency, min(scenario.num_requests, scenario.concurrency),
        scenario.input_len, min(scenario.output_len, 8), scenario.figures,
    )  # fmt: skip


def _number(seed: str) -> int:
    return int.from_bytes(seed.encode()[-8:], "little")


def _give_up(contender: Contender, reason: str, failures: dict[str, str]) -> None:
    failures[contender.name] = reason
    _say(f"{contender.name}: left out: {reason}")


def _say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
