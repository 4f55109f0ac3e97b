"""kubectl for tests: says what failed, and what the cluster knows about it."""

from __future__ import annotations

import json
import secrets
import subprocess
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from e2e import written

if TYPE_CHECKING:
    from collections.abc import Iterator

    from e2e.cluster.choose import Cluster

RESTRICTED = {"pod-security.kubernetes.io/enforce": "restricted"}


class Kubectl:
    """Calls kubectl in one namespace; without one, in those that its objects and words name."""

    def __init__(self, cluster: Cluster, namespace: str = "") -> None:
        self._cluster = cluster
        self.namespace = namespace

    def __call__(self, *words: str, text: str | None = None) -> str:
        """Its output. Raises AssertionError with its message."""
        done = self.attempt(*words, text=text)
        assert done.returncode == 0, f"kubectl {' '.join(words)}: {done.stderr}"
        return done.stdout

    def attempt(self, *words: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
        where = [f"--namespace={self.namespace}"] if self.namespace else []
        command = ["kubectl", *where, *words]
        return subprocess.run(
            self._cluster.command(command), input=text, capture_output=True, text=True, check=False
        )

    def apply(self, *objects: dict[str, Any]) -> None:
        written.keep_secrets(objects)
        items = {"apiVersion": "v1", "kind": "List", "items": list(objects)}
        self("apply", "--server-side", "--filename=-", text=json.dumps(items))

    def get(self, kind: str, name: str, *words: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self("get", kind, name, "--output=json", *words))
        return found

    def wait(self, what: str, condition: str, *, timeout_s: int = 60) -> None:
        """Raises AssertionError with what the namespace's events say."""
        done = self.attempt("wait", what, f"--for={condition}", f"--timeout={timeout_s}s")
        if done.returncode:
            state = self.attempt("get", "pods,events", "--output=wide").stdout
            raise AssertionError(f"{what} is not {condition}: {done.stderr}\n{state}")

    @contextmanager
    def own_namespace(self, prefix: str) -> Iterator[Kubectl]:
        """With restricted Pod Security; it goes with all that is in it, once that was searched for
        secrets."""
        name = f"{prefix}-{secrets.token_hex(3)}"
        labels: dict[str, Any] = {"name": name, "labels": RESTRICTED}
        self.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": labels})
        inside = Kubectl(self._cluster, name)
        try:
            # Pods are refused before it is there.
            self("wait", f"--namespace={name}", "serviceaccount/default", "--for=create")
            yield inside
        finally:
            written.FOUND.extend(written.search(inside))
            self("delete", "namespace", name, "--wait=false", "--grace-period=1")
