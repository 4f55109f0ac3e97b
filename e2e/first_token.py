"""README's commands from an empty cluster to the first token, with the images that are in it."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from e2e.cluster import cache
from e2e.helm import OUR_IMAGES, fenced
from tests.tools.build import tool, why_not

if TYPE_CHECKING:
    from e2e.cluster.choose import Cluster

README = cache.ROOT / "README.md"
MOST_SECONDS = 360
# Users' own values name the registry that they have pushed the images to.
EXAMPLE = "images.registry=registry.example.com"


def first_token() -> list[str]:
    """What README says: it installs the chart, applies a model, and asks it a question."""
    return fenced(README, "<!-- cluster: first token -->")


def as_typed(node: Cluster, commands: list[str]) -> subprocess.CompletedProcess[str]:
    """In one shell, as by a user. What a command left in the background ends after."""
    text = "\n".join(commands).replace(EXAMPLE, ",".join(OUR_IMAGES))
    with tempfile.TemporaryDirectory() as folder:
        if not why_not():  # else the user's own
            Path(folder, "helm").symlink_to(tool("helm"))
        end = "trap 'kill $(jobs -p) 2>/dev/null || true' EXIT"
        return subprocess.run(
            node.command(["bash", "-c", f"set -e\nPATH={folder}:$PATH\n{end}\n{text}"]),
            cwd=cache.ROOT,
            capture_output=True,
            text=True,
            check=False,
            timeout=MOST_SECONDS,
        )
