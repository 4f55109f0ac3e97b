"""`python -m octavo_operator.crd` in a checkout: brings the derived files up to date."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from octavo_operator.crd.json_schema import json_schema
from octavo_operator.crd.reference_page import reference_page

CRDS = (Path("crds/llmdeployments.octavo.dev.yaml"), Path("crds/llmadapters.octavo.dev.yaml"))


def derived(crd: dict[str, Any]) -> dict[Path, str]:
    """File → text."""
    name = crd["spec"]["names"]["singular"]
    schema = json.dumps(json_schema(crd), indent=1, ensure_ascii=False) + "\n"
    return {
        Path(f"crds/{name}.schema.json"): schema,
        Path(f"docs/{name}.md"): reference_page(crd),
    }


def main() -> None:
    for crd in CRDS:
        files = derived(yaml.safe_load(crd.read_text(encoding="utf-8")))
        for path, text in files.items():
            path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
