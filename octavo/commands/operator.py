"""`octavo operator`: runs the operator that reconciles LLMDeployments."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from octavo.options.parser import CommandParser

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(prog: str, argv: Sequence[str]) -> int:
    from octavo_operator.cli import EXIT_SETTINGS, add_options, run

    parser = CommandParser(prog, "Run the operator that reconciles LLMDeployments.")
    add_options(parser)
    args = parser.parse_args(argv)
    try:
        import kopf  # noqa: F401  # only to say so in one sentence
    except ImportError as error:
        print(f"{prog}: {error}: pip install kopf aiohttp", file=sys.stderr)
        return EXIT_SETTINGS
    return run(args)
