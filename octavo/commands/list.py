"""`octavo list`: the models whose files are on this machine, or the catalogue."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from typing import TYPE_CHECKING

from octavo.options.parser import CommandParser

if TYPE_CHECKING:
    from collections.abc import Sequence

    from octavo.models.catalogue import CatalogueModel
    from octavo.models.library import StoredModel


def main(prog: str, argv: Sequence[str]) -> int:
    parser = CommandParser(prog, "List the models on this machine.")
    parser.add_argument("--all", action="store_true", help="list the whole catalogue")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(argv)
    from octavo.local.home import Home
    from octavo.models.catalogue import catalogue
    from octavo.models.library import ModelLibrary

    stored = ModelLibrary(Home.find(os.environ)).stored()
    if args.all:
        _show_catalogue(catalogue(), {model.name for model in stored}, is_json=args.json)
    elif args.json:
        print(json.dumps([asdict(model) | {"path": str(model.path)} for model in stored], indent=2))
    elif stored:
        _show_stored(stored)
    else:
        print("No models are on this machine. octavo pull smollm2 brings one (93 MB).")
    return 0


def _show_stored(stored: Sequence[StoredModel]) -> None:
    from octavo.models.table import age_text, columns, size_text

    rows = [
        (model.name, size_text(model.num_bytes), f"{age_text(model.fetched_at)} ago", model.uri)
        for model in stored
    ]
    print(columns(("NAME", "SIZE", "FETCHED", "ADDRESS"), rows))


def _show_catalogue(models: Sequence[CatalogueModel], here: set[str], *, is_json: bool) -> None:
    from octavo.models.table import columns, size_text

    if is_json:
        fields = [asdict(model) | {"is_here": model.name in here} for model in models]
        print(json.dumps(fields, indent=2))
        return
    rows = [
        (
            model.name, model.kind, model.parameters, size_text(model.download * 1e6),
            size_text(model.memory * 1e6), model.license, "yes" if model.name in here else "",
        )
        for model in models
    ]  # fmt: skip
    titles = ("NAME", "KIND", "PARAMETERS", "DOWNLOAD", "MEMORY", "LICENCE", "HERE")
    print(columns(titles, rows))
