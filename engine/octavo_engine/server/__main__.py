"""`python -m octavo_engine.server` in a checkout: writes what tables make: pages of docs/, and the
description of the engine that the router shows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from octavo_engine.server.docs.openapi import document
from octavo_engine.server.docs.pages import api_page, errors_page
from octavo_engine.server.routes import ROUTES


def derived() -> dict[Path, str]:
    """File → text."""
    engine = document([row for row in ROUTES if row.access == "key"])
    return {
        Path("docs/errors.md"): errors_page(),
        Path("docs/api.md"): api_page(ROUTES),
        Path("router/octavo_router/docs/engine_openapi.json"): _by_lines(engine),
    }


def _by_lines(engine: dict[str, Any]) -> str:
    """One line for each path and each schema, so that two changes merge."""
    parts = {"paths": engine["paths"], **engine["components"]}
    text = json.dumps(
        engine | {"paths": "@paths@", "components": dict.fromkeys(engine["components"])}
    )
    for kind in engine["components"]:
        text = text.replace(f'"{kind}": null', f'"{kind}": "@{kind}@"')
    for kind, members in parts.items():
        lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in members.items()]
        text = text.replace(f'"@{kind}@"', "{\n" + ",\n".join(lines) + "\n}")
    return text + "\n"


def main() -> None:
    for path, text in derived().items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
