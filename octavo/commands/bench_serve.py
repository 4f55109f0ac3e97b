"""`octavo bench serve`: load on a running server, as its clients see it."""

from __future__ import annotations

import argparse
import asyncio
import os
from typing import TYPE_CHECKING

from octavo.bench.report import random_prompts, show, write_json
from octavo.commands.bench import add_size_options
from octavo.options.parser import CommandParser, not_negative, positive, whole_number
from octavo_engine.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from octavo.bench.load import LoadPlan

DEFAULT_VOCAB_SIZE = 256  # of servers that do not say; every model has a token for each byte


def main(prog: str, argv: Sequence[str]) -> int:
    parser = CommandParser(prog, "Measure a running server.")
    parser.add_argument("--base-url", "--url", help="http://HOST:PORT; or --host and --port")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=whole_number, default=8000)
    parser.add_argument("--model", help="default: the first that the server lists")
    add_size_options(parser, input_len=256, output_len=128)
    parser.add_argument("--num-prompts", type=positive, default=64, metavar="N")
    parser.add_argument(
        "--max-concurrency", type=positive, metavar="N", help="requests at once; default: all"
    )
    parser.add_argument(
        "--request-rate", type=rate, default=float("inf"), metavar="N",
        help="requests per second, Poisson; default: as fast as responses come",
    )  # fmt: skip
    parser.add_argument("--num-warmups", type=not_negative, default=0, metavar="N")
    parser.add_argument("--seed", type=whole_number, default=0, metavar="N")
    parser.add_argument("--vocab-size", type=positive, metavar="N", help="default: as listed")
    parser.add_argument("--timeout", type=float, default=600.0, metavar="S")
    parser.add_argument("--api-key", default=os.environ.get("OCTAVO_API_KEY", "").partition(",")[0])
    parser.add_argument(
        "--allow-remote",
        action="store_true",
        help="allow load on a server that is not on this machine",
    )
    args = parser.parse_args(argv)
    return asyncio.run(_main(args))


def rate(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not value > 0:
        raise argparse.ArgumentTypeError(f"must be a number above 0; got {text}")
    return value


async def _main(args: argparse.Namespace) -> int:
    from dataclasses import replace

    from octavo.bench import counters, load

    plan = await _plan(args)
    if args.num_warmups:
        size = plan.max_concurrency
        warm = random_prompts(args.seed - 1, args.num_warmups, args.input_len, 300)
        await load.run(replace(plan, prompts=warm, output_len=2, max_concurrency=size))
    before = await counters.read_counters(plan.address, plan.headers)
    results, elapsed_s = await load.run(plan)
    after = await counters.read_counters(plan.address, plan.headers)
    figures = load.figures(plan, results, elapsed_s)
    num_tokens = figures["total_input_tokens"] + figures["total_output_tokens"]
    figures |= counters.figures(before, after, num_tokens)
    figures |= {"input_len": args.input_len, "output_len": args.output_len}
    if args.json != "-":
        show("Serving", figures)
    write_json(args.json, figures)
    return 0 if figures["failed"] == 0 else 1


async def _plan(args: argparse.Namespace) -> LoadPlan:
    from octavo.bench.load import LoadPlan
    from octavo.http_client import ServerAddress, ServerError, get_json

    address = ServerAddress.parse(args.base_url or f"http://{args.host}:{args.port}")
    if not address.is_loopback and not args.allow_remote:
        raise ConfigError(
            f"{address.host} is not this machine; --allow-remote sends load elsewhere"
        )
    headers = {"authorization": f"Bearer {args.api_key}"} if args.api_key else {}
    models = (await get_json(address, "/v1/models", headers)).get("data") or []
    card = next((card for card in models if args.model in (None, card["id"])), None)
    if card is None:
        known = ", ".join(card["id"] for card in models) or "none"
        raise ServerError(f"the server does not serve {args.model}; it lists {known}")
    vocab_size = args.vocab_size or card.get("vocab_size") or DEFAULT_VOCAB_SIZE
    return LoadPlan(
        address=address,
        model=card["id"],
        prompts=random_prompts(args.seed, args.num_prompts, args.input_len, vocab_size),
        output_len=args.output_len,
        max_concurrency=args.max_concurrency or args.num_prompts,
        request_rate=args.request_rate,
        seed=args.seed,
        timeout_s=args.timeout,
        headers=headers,
    )
