"""Which version the sources have: `python -m release.version [TAG]`.

Ends with status 1 where pyproject.toml, the chart and CHANGELOG.md disagree, or where a tag names
another version.
"""

from __future__ import annotations

import argparse
import re
import sys
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT: Final = Path(__file__).parents[1]
_CHART_FIELD: Final = re.compile(r"^(version|appVersion): *\"?([^\s\"]+)\"?", re.MULTILINE)
_SECTION: Final = re.compile(r"^## \[?v?(\d[^\s\]]*)", re.MULTILINE)


def versions(root: Path) -> dict[str, str]:
    """The version by the place that names it; of CHANGELOG.md the newest section's, if any."""
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    chart = dict(_CHART_FIELD.findall((root / "charts" / "octavo" / "Chart.yaml").read_text()))
    section = _SECTION.search((root / "CHANGELOG.md").read_text())
    return {
        "pyproject.toml": project["version"],
        "charts/octavo/Chart.yaml: version": chart.get("version", ""),
        "charts/octavo/Chart.yaml: appVersion": chart.get("appVersion", ""),
        "CHANGELOG.md": section[1] if section else "",
    }


def problems(named: dict[str, str], tag: str | None = None) -> list[str]:
    """Sentences about places that differ from pyproject.toml.

    Without a tag CHANGELOG.md needs no section yet: its newest changes are unreleased.
    """
    wanted = named["pyproject.toml"]
    found = [
        f"{place} has version {version or 'none'}, pyproject.toml has {wanted}"
        for place, version in named.items()
        if version != wanted and (tag is not None or place != "CHANGELOG.md")
    ]
    if tag is not None and tag != f"v{wanted}":
        found.append(f"The tag {tag} is not v{wanted}, the version in pyproject.toml")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m release.version", description=__doc__.split("\n")[0]
    )
    parser.add_argument("tag", nargs="?", help="of the release: v and the version")
    args = parser.parse_args(arguments)
    named = versions(ROOT)
    found = problems(named, args.tag)
    for problem in found:
        print(problem, file=sys.stderr)
    if not found:
        print(named["pyproject.toml"])
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
