"""From an empty cluster to the first token and back to empty, by the words of README and docs."""

from __future__ import annotations

import json
import subprocess
import time
from typing import TYPE_CHECKING

from e2e.cluster import cache
from e2e.helm import OUR_IMAGES, fenced, inventory
from tests.tools.build import tool

if TYPE_CHECKING:
    from pathlib import Path

    from e2e.cluster.choose import Cluster
    from e2e.kubectl import Kubectl

MOST_COMMANDS = 4
MOST_SECONDS = 180
README = cache.ROOT / "README.md"
# Their own values would name the registry that they have pushed the images to.
EXAMPLE = "images.registry=registry.example.com"


def test_readme_leads_from_an_empty_cluster_to_a_token_and_the_chart_s_page_back(
    node: Cluster, kubectl: Kubectl, tmp_path: Path
) -> None:
    before = inventory(kubectl)
    commands = fenced(README, "<!-- cluster: first token -->")
    assert 1 <= len(commands) <= MOST_COMMANDS
    try:
        began_at = time.monotonic()
        said = run(node, commands, tmp_path)
        seconds = time.monotonic() - began_at
        print(f"From an empty cluster to the answer: {seconds:.0f} s")
        assert "Paris" in json.loads(said.splitlines()[-1])["choices"][0]["message"]["content"]
        assert seconds < MOST_SECONDS
    finally:
        removal = fenced(cache.ROOT / "docs" / "chart.md", "To remove everything:")
        run(node, removal, tmp_path)
    wait_for_same(kubectl, before)


def run(node: Cluster, commands: list[str], folder: Path) -> str:
    """In one shell, as typed by a user. What a command left in the background ends after."""
    (folder / "helm").unlink(missing_ok=True)
    (folder / "helm").symlink_to(tool("helm"))
    text = "\n".join(commands)
    if EXAMPLE in text:
        text = text.replace(EXAMPLE, ",".join(OUR_IMAGES))
    script = f"set -e\nPATH={folder}:$PATH\ntrap 'kill $(jobs -p) 2>/dev/null || true' EXIT\n{text}"
    done = subprocess.run(
        node.command(["bash", "-c", script]),
        cwd=cache.ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=MOST_SECONDS * 2,
    )
    assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def wait_for_same(kubectl: Kubectl, before: set[str], timeout_s: float = 60.0) -> None:
    """Objects of deleted ones go a moment after them."""
    deadline = time.monotonic() + timeout_s
    while left := inventory(kubectl) - before:
        assert time.monotonic() < deadline, f"left behind: {sorted(left)}"
        time.sleep(0.5)
