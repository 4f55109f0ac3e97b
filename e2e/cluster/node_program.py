"""Kubernetes as one program, built from Go modules and kept; and the pause image's program."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from e2e.cluster import cache
from e2e.cluster.errors import ClusterError

SOURCE = cache.HERE / "node"
VERSION = "v1.34.4"
_NO_GO = "install Go 1.24 or newer (or kind and Docker): it builds the cluster"
PROGRAMS = {"octavo-node": ".", "pause": "./pause"}


def why_not() -> str:
    return "" if _folder().exists() or _go() else _NO_GO


def built() -> Path:
    """The folder with both programs. The first time takes minutes."""
    folder = _folder()
    with cache.locked("node"):
        if not folder.exists():
            _build(folder)
            cache.forget_others(folder, "node-v*")
    return folder


def _folder() -> Path:
    sources = [*SOURCE.rglob("*.go"), SOURCE / "go.mod", SOURCE / "go.sum"]
    return cache.folder() / f"node-{VERSION}-{cache.key_of(sources)}"


def _build(folder: Path) -> None:
    go = _go()
    if go is None:
        raise ClusterError(_NO_GO)
    print(f"Building Kubernetes {VERSION}: minutes, once", file=sys.stderr)
    unfinished = folder.with_name(f"{folder.name}.new")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir()
    stamp = f"-s -w -X k8s.io/component-base/version.gitVersion={VERSION}"
    environment = {**os.environ, "CGO_ENABLED": "0", "GOFLAGS": "-buildvcs=false -mod=readonly"}
    for name, package in PROGRAMS.items():
        command = [go, "build", "-trimpath", "-ldflags", stamp, "-o", str(unfinished / name)]
        done = subprocess.run(
            ["nice", "-n2", *command, package],
            cwd=SOURCE,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise ClusterError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    unfinished.rename(folder)


def _go() -> str | None:
    usual = Path("/usr/local/go/bin/go")
    return shutil.which("go") or (str(usual) if usual.exists() else None)
