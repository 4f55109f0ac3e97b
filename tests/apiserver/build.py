"""Finds etcd and kube-apiserver, or builds them: one program from Go modules, kept between runs.

KUBEBUILDER_ASSETS names a folder with both. Otherwise Go builds them once, which takes minutes,
into the user's cache, under a key of their sources. `python tests/apiserver/build.py` does that.
Modules have the versions of the cluster that e2e/ builds: what is compiled for one of the two is
compiled for both.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

MODULE = Path(__file__).parents[2] / "e2e" / "cluster" / "node"
SOURCE = MODULE / "apiserver"
VERSION = "v1.34.4"
MISSING = (
    "no Kubernetes API server: install Go 1.24 or newer, or set KUBEBUILDER_ASSETS to a folder "
    "with etcd and kube-apiserver"
)


def why_not() -> str:
    """Why there can be no API server here, or ''."""
    return "" if os.environ.get("KUBEBUILDER_ASSETS") or _go() else MISSING


def commands() -> tuple[list[str], list[str]]:
    """How to start etcd, and kube-apiserver. Builds them where they are missing."""
    if assets := os.environ.get("KUBEBUILDER_ASSETS"):
        return [f"{assets}/etcd"], [f"{assets}/kube-apiserver"]
    program = str(_built())
    return [program, "etcd"], [program, "kube-apiserver"]


def _built() -> Path:
    folder = _cache() / _key()
    program = folder / "octavo-apiserver"
    if program.exists():
        return program
    go = _go()
    if go is None:
        raise RuntimeError(MISSING)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:  # two test runs at once build once
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not program.exists():
            _build(go, program)
    return program


def _build(go: str, program: Path) -> None:
    unfinished = program.with_suffix(".new")
    stamp = f"-s -w -X k8s.io/component-base/version.gitVersion={VERSION}"
    command = [go, "build", "-p", "2", "-trimpath", "-ldflags", stamp, "-o", str(unfinished), "."]
    print(f"Building kube-apiserver {VERSION}: minutes, once", file=sys.stderr)  # noqa: T201
    environment = {**os.environ, "CGO_ENABLED": "0", "GOFLAGS": "-buildvcs=false -mod=readonly"}
    done = subprocess.run(
        ["nice", *command], cwd=SOURCE, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    unfinished.rename(program)


def _key() -> str:
    digest = hashlib.sha256()
    for path in (SOURCE / "main.go", MODULE / "go.mod", MODULE / "go.sum"):
        digest.update(path.read_bytes())
    return f"{VERSION}-{digest.hexdigest()[:12]}"


def _cache() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "octavo" / "apiserver"


def _go() -> str | None:
    usual = Path("/usr/local/go/bin/go")
    return shutil.which("go") or (str(usual) if usual.exists() else None)


if __name__ == "__main__":
    print(*commands()[1])  # noqa: T201
