"""From an empty cluster to the first token and back to empty, by the words of README and docs."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import TYPE_CHECKING

from e2e.cluster import cache
from e2e.first_token import as_typed, first_token
from e2e.helm import fenced, inventory

if TYPE_CHECKING:
    from e2e.cluster.choose import Cluster
    from e2e.kubectl import Kubectl

MOST_COMMANDS = 4
MOST_SECONDS = 180


def test_readme_leads_from_an_empty_cluster_to_a_token_and_the_chart_s_page_back(
    node: Cluster, kubectl: Kubectl
) -> None:
    before = inventory(kubectl)
    assert 1 <= len(first_token()) <= MOST_COMMANDS
    try:
        began_at = time.monotonic()
        # The second half of `make cluster-up`; the first has made this cluster.
        answer = subprocess.run(
            [sys.executable, "-m", "e2e.cluster", "ask"],
            cwd=cache.ROOT, capture_output=True, text=True, check=False,
        )  # fmt: skip
        seconds = time.monotonic() - began_at
        assert answer.returncode == 0, answer.stdout + answer.stderr
        print(f"From an empty cluster to the answer: {seconds:.0f} s")
        assert "Paris" in answer.stdout.splitlines()[-2]
        assert seconds < MOST_SECONDS
    finally:
        removal = fenced(cache.ROOT / "docs" / "chart.md", "To remove everything:")
        done = as_typed(node, removal)
        assert done.returncode == 0, f"{removal}\n{done.stdout}\n{done.stderr}"
    wait_for_same(kubectl, before)


def wait_for_same(kubectl: Kubectl, before: set[str], timeout_s: float = 60.0) -> None:
    """Objects of deleted ones go a moment after them."""
    deadline = time.monotonic() + timeout_s
    while left := inventory(kubectl) - before:
        assert time.monotonic() < deadline, f"left behind: {sorted(left)}"
        time.sleep(0.5)
