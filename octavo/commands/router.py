"""`octavo router`: one URL in front of many engines."""

from __future__ import annotations

import argparse
import os
import sys
import time
from typing import TYPE_CHECKING, Any

from octavo.options.parser import CommandParser

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from octavo_router.config.load import ConfigFlag

_EPILOG = """Each flag is also a variable: --queue-timeout is OCTAVO_ROUTER_QUEUE_TIMEOUT.
Precedence: flag > environment > file > default. The file has far more settings than flags.
"""


def main(prog: str, argv: Sequence[str]) -> int:
    began_at = time.monotonic()
    from octavo_router import cli
    from octavo_router.config.load import all_flags
    from octavo_router.errors import ConfigInvalid

    parser = _make_parser(prog, all_flags())
    args = vars(parser.parse_args(argv))
    file = args.pop("config", None) or os.environ.get("OCTAVO_ROUTER_CONFIG", "")
    api_keys = args.pop("api_key") or _listed(os.environ.get("OCTAVO_ROUTER_API_KEY", ""))
    wants_print = args.pop("print_config", False)
    flags = {name.replace("_", "-"): value for name, value in args.items()}
    load = cli.ConfigLoader(file, flags, api_keys)
    try:
        if wants_print:
            print(_render(load()))
            return 0
        return cli.run(load, on_ready=lambda url: _say_ready(url, began_at))
    except ConfigInvalid as error:
        print(f"octavo: {error}", file=sys.stderr)
        return 2


def _make_parser(prog: str, flags: Sequence[ConfigFlag]) -> CommandParser:
    parser = CommandParser(prog, "Route requests to the engines that hold their prefixes.")
    parser.epilog = _EPILOG
    parser.add_argument(
        "--config",
        metavar="FILE",
        default=argparse.SUPPRESS,
        help="YAML file; SIGHUP reloads it",
    )
    parser.add_argument(
        "--api-key",
        metavar="KEY",
        action="append",
        default=[],
        help="API key that clients must send; may be repeated; for many keys: --keys-file",
    )
    for flag in flags:
        name = f"--{flag.name}"
        note = flag.doc if flag.default in ("", ()) else f"{flag.doc} (default: {flag.default})"
        options: dict[str, Any] = {"default": argparse.SUPPRESS, "help": note.replace("%", "%%")}
        if flag.type is bool:
            parser.add_argument(name, action=argparse.BooleanOptionalAction, **options)
        else:
            metavar = {int: "N", float: "N"}.get(flag.type, flag.name.rpartition("-")[2].upper())
            parser.add_argument(name, metavar=metavar, **options)
    parser.add_argument(
        "--print-config",
        action="store_true",
        default=argparse.SUPPRESS,
        help="print the resulting settings, then exit",
    )
    return parser


def _listed(text: str) -> list[str]:
    return [item for item in text.split(",") if item]


def _render(config: Any) -> str:
    import yaml

    from octavo_router.config.show import dump

    tree: Mapping[str, Any] = dump(config)
    text: str = yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)
    return text.rstrip()


def _say_ready(url: str, began_at: float) -> None:
    took_s = time.monotonic() - began_at
    print(f"Octavo routes at {url}/v1 (after {took_s:.2f} s) · stop with Ctrl-C", file=sys.stderr)
