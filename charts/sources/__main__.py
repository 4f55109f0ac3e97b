"""`python -m charts.sources` in a checkout: renews everything that the chart takes from elsewhere.

`--check` changes nothing and names what is old.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from charts.sources import alerts, dashboards, runbook, values_docs, values_file, values_schema
from octavo_operator.cluster import rbac
from octavo_operator.process import LEASE_NAME

if TYPE_CHECKING:
    from collections.abc import Iterator

CHART = Path("charts/octavo")
CRDS = (Path("crds/llmdeployments.octavo.dev.yaml"), Path("crds/llmadapters.octavo.dev.yaml"))


def sources() -> Iterator[tuple[Path, str]]:
    """Each file that is made, and what it must be."""
    settings = values_file.read()
    yield CHART / "values.schema.json", values_schema.render(settings)
    page = Path("docs/chart.md")
    yield page, values_docs.put_into(page.read_text(encoding="utf-8"), settings)
    for crd in CRDS:
        yield CHART / "files" / crd.name, crd.read_text(encoding="utf-8")
    yield CHART / "files/operator-rules.yaml", _operator_rules()
    yield CHART / "files/rules.yaml", alerts.render()
    page = Path("docs/runbook.md")
    yield page, runbook.put_into(page.read_text(encoding="utf-8"))
    for name, text in dashboards.render():
        yield CHART / "dashboards" / f"{name}.json", text


def _operator_rules() -> str:
    rules: dict[str, Any] = {
        "served": rbac.render_rules(rbac.SERVED),
        "own": rbac.render_rules((*rbac.leading(LEASE_NAME), *rbac.ROUTERS)),
    }
    head = "# Made from octavo_operator/cluster/rbac.py; each right has its reason there.\n"
    return head + yaml.dump(rules, Dumper=_PlainDumper, sort_keys=False, width=100)


class _PlainDumper(yaml.SafeDumper):
    """Each value where it belongs, however often it occurs."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def main(argv: list[str]) -> int:
    old = [
        (path, text)
        for path, text in sources()
        if not path.exists() or path.read_text(encoding="utf-8") != text
    ]
    for path, text in old:
        if argv == ["--check"]:
            print(f"{path} is old: run python -m charts.sources")  # noqa: T201
        else:
            path.write_text(text, encoding="utf-8")
            print(f"Wrote {path}")  # noqa: T201
    return int(bool(old) and argv == ["--check"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
