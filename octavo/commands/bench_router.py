"""`octavo bench router`: a workload under each routing policy, in virtual time, side by side."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.bench.report import write_json
from octavo.options.parser import CommandParser, positive, whole_number
from octavo_engine.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from octavo.study.adapters import AdapterSetup
    from octavo.study.engine_models import EngineModel
    from octavo.study.figures import Figures
    from octavo.study.simulation import Setup
    from octavo.study.workload import Workload

DEFAULT_POLICIES = "prefix-load,least-load,round-robin,consistent-hash,power-of-two,random"
DEFAULT_REQUESTS = 2000  # of a synthetic workload

_EXAMPLE = """examples:
  octavo bench router --trace requests.jsonl.gz --load 0.9
  octavo bench router --workload multi-turn --workload random --engines 4 --plot study.png
  octavo bench router --workload random --adapters 1000 --adapter-slots 16

Schedulers, KV pools, prefix caches and the router are the real ones; only the time that steps take
is modelled. A load of 1 is what the engines could just serve if no prompt were ever found cached.
"""


def main(prog: str, argv: Sequence[str]) -> int:
    args = _make_parser(prog).parse_args(argv)
    from octavo import plotting
    from octavo.study import plot, report
    from octavo.study.adapters import with_adapters
    from octavo.study.simulation import Setup, compare

    policies = _policies(args.policies)
    setup = Setup(
        model=_engine_model(args),
        num_engines=args.engines,
        signal_delay_s=args.signal_delay_ms / 1e3,
        shape=args.shape,
        seed=args.seed,
        adapters=_adapters(args),
    )
    if args.plot is not None:
        plotting.require(args.plot)
    workloads = list(_workloads(args, setup))
    if setup.adapters is not None:
        workloads = [
            with_adapters(one, setup.adapters, zipf=args.adapter_zipf, seed=args.seed)
            for one in workloads
        ]
    is_quiet = args.json == "-"
    figures: list[dict[str, Any]] = []
    drawn: list[tuple[str, Sequence[Figures]]] = []
    for workload in workloads:
        results = list(compare(workload, setup, policies, num_jobs=args.jobs))
        figures.append(report.as_json(workload, setup, results))
        drawn.append((workload.name, results))
        if not is_quiet:
            print(f"{report.heading(workload, setup)}\n\n{report.table(results)}\n", flush=True)
    if not is_quiet:
        print(report.LEGEND)
    write_json(args.json, {"studies": figures})
    if args.plot is not None:
        plot.draw(args.plot, drawn)
    return 0


def _make_parser(prog: str) -> CommandParser:
    parser = CommandParser(prog, "Compare routing policies on simulated engines.")
    parser.epilog = _EXAMPLE
    parser.add_argument(
        "--trace", action="append", type=Path, default=[], metavar="FILE",
        help="recorded requests, one JSON object a line; may be gzipped; may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--workload", action="append", default=[], metavar="NAME",
        help="synthetic: multi-turn, shared-system, random, hot-prefix, bursts, agents; may "
        "be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--policies", default=DEFAULT_POLICIES, metavar="LIST", help=f"default: {DEFAULT_POLICIES}"
    )
    parser.add_argument("--engines", type=positive, default=8, metavar="N", help="default: 8")
    parser.add_argument(
        "--engine-model", default="gpu-8b", metavar="NAME", help="gpu-8b (default) or cpu-sim"
    )
    parser.add_argument(
        "--kv-blocks", type=positive, metavar="N", help="blocks of 16 tokens in each engine's pool"
    )
    parser.add_argument(
        "--num-requests", type=positive, metavar="N",
        help=f"default: the whole trace; {DEFAULT_REQUESTS} of a synthetic workload",
    )  # fmt: skip
    parser.add_argument(
        "--load", type=above_zero, metavar="X",
        help="scale arrivals to this load; default: as recorded; 0.9 for synthetic workloads",
    )  # fmt: skip
    parser.add_argument(
        "--speed", type=above_zero, metavar="X", help="speed up arrivals by this factor"
    )
    parser.add_argument(
        "--signal-delay-ms", type=not_below_zero, default=10.0, metavar="MS",
        help="delay in ms from an engine's step to the router's update (default: 10)",
    )  # fmt: skip
    parser.add_argument(
        "--shape", choices=("ids", "text"), default="ids",
        help="prompts of token ids (default), or chats of text, whose tokens the router must guess",
    )  # fmt: skip
    _add_adapters(parser)
    parser.add_argument("--seed", type=whole_number, default=0, metavar="N")
    parser.add_argument(
        "--block-tokens", type=positive, default=512, metavar="N",
        help="tokens that a trace's hash_ids stand for (default: 512)",
    )  # fmt: skip
    parser.add_argument(
        "--jobs",
        type=positive,
        default=1,
        metavar="N",
        help="policies to run at once, one core each",
    )
    parser.add_argument("--json", metavar="FILE", help="write the results to FILE; - is stdout")
    parser.add_argument(
        "--plot",
        type=Path,
        metavar="FILE",
        help="plot the results: .png, .svg or .pdf (needs matplotlib)",
    )
    return parser


def _add_adapters(parser: CommandParser) -> None:
    parser.add_argument(
        "--adapters", type=positive, metavar="N",
        help="give each request one of N LoRA adapters; default: the base model",
    )  # fmt: skip
    parser.add_argument(
        "--adapter-slots", type=positive, default=16, metavar="N",
        help="adapters that one engine holds (default: 16)",
    )  # fmt: skip
    parser.add_argument(
        "--adapter-load-ms", type=above_zero, default=50.0, metavar="MS",
        help="how long an engine loads an adapter (default: 50)",
    )  # fmt: skip
    parser.add_argument(
        "--adapter-zipf", type=not_below_zero, default=1.0, metavar="S",
        help="the n-th adapter gets 1/n^S as many requests as the first (default: 1)",
    )  # fmt: skip


def above_zero(text: str) -> float:
    value = _number(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number above 0; got {text}")
    return value


def not_below_zero(text: str) -> float:
    value = _number(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number that is not negative; got {text}")
    return value


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _policies(text: str) -> list[str]:
    from octavo_router.config.settings import POLICIES

    known = [policy for policy in POLICIES if policy != "prefill-decode"]  # which needs two roles
    chosen = [policy.strip() for policy in text.split(",")]
    for policy in chosen:
        if policy not in known:
            raise ConfigError(f"--policies: no policy {policy!r}; there are {', '.join(known)}")
    return list(dict.fromkeys(chosen))


def _engine_model(args: argparse.Namespace) -> EngineModel:
    from octavo.study.engine_models import engine_models

    models = engine_models()
    model = models.get(args.engine_model)
    if model is None:
        raise ConfigError(
            f"--engine-model: there is no {args.engine_model!r}; there are {', '.join(models)}"
        )
    return model if args.kv_blocks is None else model.with_blocks(args.kv_blocks)


def _adapters(args: argparse.Namespace) -> AdapterSetup | None:
    from octavo.study.adapters import AdapterSetup

    if args.adapters is None:
        return None
    return AdapterSetup(
        num_adapters=args.adapters, slots=args.adapter_slots, load_s=args.adapter_load_ms / 1e3
    )


def _workloads(args: argparse.Namespace, setup: Setup) -> Iterator[Workload]:
    from octavo.study.synthetic import SYNTHETIC, synthetic
    from octavo.study.trace import read_trace

    if not args.trace and not args.workload:
        raise ConfigError("give --trace FILE, or --workload NAME; --help shows examples")
    if args.load is not None and args.speed is not None:
        raise ConfigError("--load and --speed both set the pace; give one of them")
    for path in args.trace:
        workload = read_trace(path, block_tokens=args.block_tokens, max_requests=args.num_requests)
        yield _at_pace(workload, args.load, args.speed, setup)
    for name in args.workload:
        if name not in SYNTHETIC:
            raise ConfigError(f"--workload: no {name!r}; there are {', '.join(SYNTHETIC)}")
        workload = synthetic(name, args.num_requests or DEFAULT_REQUESTS, seed=args.seed)
        load = 0.9 if args.load is None and args.speed is None else args.load
        yield _at_pace(workload, load, args.speed, setup)


def _at_pace(workload: Workload, load: float | None, speed: float | None, setup: Setup) -> Workload:
    if load is not None:
        return workload.at_load(load, setup.model, setup.num_engines)
    return workload if speed is None else workload.faster(speed)
