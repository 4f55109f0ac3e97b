"""The state of the cluster when a test failed, in a folder: E2E_ARTIFACTS, or build/e2e."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from e2e.cluster import cache

if TYPE_CHECKING:
    from e2e.kubectl import Kubectl

_PAGES = {
    "pods.txt": ("get", "pods", "--all-namespaces", "--output=wide"),
    "events.txt": ("get", "events", "--all-namespaces", "--sort-by=.lastTimestamp"),
    "llmdeployments.yaml": ("get", "llmdeployments", "--all-namespaces", "--output=yaml"),
    "llmadapters.yaml": ("get", "llmadapters", "--all-namespaces", "--output=yaml"),
    "descriptions.txt": ("describe", "pods", "--all-namespaces"),
    "objects.txt": ("get", "all,networkpolicies,poddisruptionbudgets", "--all-namespaces"),
}
_POD = "{.metadata.namespace} {.metadata.name}"


def folder() -> Path:
    return Path(os.environ.get("E2E_ARTIFACTS") or cache.ROOT / "build" / "e2e")


def dump(kubectl: Kubectl, test: str) -> Path:
    """Events, descriptions, statuses, and the logs of all pods, of their previous runs as well."""
    place = folder() / re.sub(r"[^\w.-]+", "-", test)
    place.mkdir(parents=True, exist_ok=True)
    for name, words in _PAGES.items():
        done = kubectl.attempt(*words)
        (place / name).write_text(done.stdout + done.stderr)
    path = f"jsonpath={{range .items[*]}}{_POD}{{'\\n'}}{{end}}"
    for line in kubectl.attempt("get", "pods", "-A", "--output", path).stdout.splitlines():
        namespace, name = line.split()
        words = ("logs", f"--namespace={namespace}", name, "--all-containers", "--prefix")
        for suffix, more in (("", ()), (".previous", ("--previous",))):
            done = kubectl.attempt(*words, *more)
            if done.stdout:
                (place / f"{namespace}.{name}{suffix}.log").write_text(done.stdout)
    return place
