"""`octavo show`: what is known of a model, from the catalogue and from its files."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

from octavo.options.parser import CommandParser

if TYPE_CHECKING:
    from collections.abc import Sequence

    from octavo.models.library import ModelName, StoredModel


def main(prog: str, argv: Sequence[str]) -> int:
    parser = CommandParser(prog, "Show what is known of a model.")
    parser.add_argument(
        "model", metavar="MODEL", help="a name of octavo list --all, ORG/NAME, or a URI"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(argv)
    from octavo.local.home import Home
    from octavo.models.library import ModelLibrary, parse_model_name

    name = parse_model_name(args.model)
    stored = ModelLibrary(Home.find(os.environ)).find(name)
    facts = {"name": name.name, "address": name.uri, **_listed(name), **_of_files(stored)}
    if args.json:
        print(json.dumps(facts, indent=2))
        return 0
    width = max(map(len, facts))
    for title, value in facts.items():
        print(f"{title:<{width}}  {value}")
    if stored is None:
        print(f"\nIts files are not on this machine: octavo pull {name.name}")
    return 0


def _listed(name: ModelName) -> dict[str, Any]:
    from octavo.models.table import size_text

    entry = name.entry
    if entry is None:
        return {}
    gate = " (accept it on the hub, and set HF_TOKEN)" if entry.is_gated else ""
    return {
        "aliases": ", ".join(entry.aliases) or "none",
        "kind": entry.kind,
        "parameters": entry.parameters,
        "download": size_text(entry.download * 1e6),
        "memory": size_text(entry.memory * 1e6),
        "context": f"{entry.context:,} tokens",
        "licence": f"{entry.license}{gate}",
    }


def _of_files(stored: StoredModel | None) -> dict[str, Any]:
    """Raises ModelError where the files cannot be read."""
    if stored is None:
        return {}
    from octavo.models.table import size_text
    from octavo_engine.config import EngineConfig
    from octavo_engine.core.identity import architecture_of, default_params, format_of
    from octavo_engine.weights.source import resolve_model

    files = resolve_model(str(stored.path))
    sampling = default_params(files.generation_config)
    return {
        "path": str(files.path),
        "size": size_text(stored.num_bytes),
        "architecture": architecture_of(files),
        "weights": format_of(EngineConfig(model=str(stored.path)), files),
        "layers": files.config.get("num_hidden_layers", "unknown"),
        "vocabulary": _number(files.config.get("vocab_size")),
        "sampling": ", ".join(f"{key} {value:g}" for key, value in sampling.items()) or "neutral",
    }


def _number(value: object) -> str:
    return f"{value:,} tokens" if isinstance(value, int) else "unknown"
