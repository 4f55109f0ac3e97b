"""`octavo rm`: delete a model's files from this machine."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from octavo.options.parser import CommandParser

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(prog: str, argv: Sequence[str]) -> int:
    parser = CommandParser(prog, "Delete models that octavo pull has brought.")
    parser.add_argument("models", metavar="MODEL", nargs="+", help="a name of octavo list")
    args = parser.parse_args(argv)
    from octavo.local.home import Home
    from octavo.models.library import ModelLibrary, parse_model_name
    from octavo.models.table import size_text

    library = ModelLibrary(Home.find(os.environ))
    for name in map(parse_model_name, args.models):
        size = library.remove(name, on_wait=_show_wait)
        print(f"{name.name} is deleted ({size_text(size)})")
    return 0


def _show_wait(holder: str) -> None:
    print(f"Waiting for the fetch by {holder}", file=sys.stderr, flush=True)
