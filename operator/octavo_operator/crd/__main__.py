"""`python -m octavo_operator.crd` in a checkout: brings the derived files up to date."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from octavo_operator.crd.json_schema import json_schema
from octavo_operator.crd.reference_page import reference_page

CRD = Path("crds/llmdeployments.octavo.dev.yaml")
SCHEMA = Path("crds/llmdeployment.schema.json")
PAGE = Path("docs/llmdeployment.md")


def derived(crd: dict[str, Any]) -> dict[Path, str]:
    """File → text."""
    return {
        SCHEMA: json.dumps(json_schema(crd), indent=1, ensure_ascii=False) + "\n",
        PAGE: reference_page(crd),
    }


def main() -> None:
    crd = yaml.safe_load(CRD.read_text(encoding="utf-8"))
    for path, text in derived(crd).items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
