"""Finds helm and kustomize, or builds them from Go modules into the user's cache, once.

A helm or kustomize on the PATH is not used: tests would differ from machine to machine. The third
program, chart-render, is Helm's own rendering in a process that stays (render/main.go). `python
tests/tools/build.py` builds all and prints their folder.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).parent
HELM = "v3.20.2"
KUBERNETES = "34"  # minor version that charts are rendered for where no cluster says
PACKAGES = (
    "helm.sh/helm/v3/cmd/helm",
    "sigs.k8s.io/kustomize/kustomize/v5",
    "octavo.dev/tests/tools/render",
)
MISSING = "no helm: install Go 1.25 or newer"


def why_not() -> str:
    """Why there can be no tools here, or ''."""
    return "" if (_folder() / "done").exists() or _go() else MISSING


def tool(name: str) -> str:
    """The path of helm, kustomize or render. Builds them where they are missing."""
    folder = _folder()
    if not (folder / "done").exists():
        _build_once(folder)
    return str(folder / name)


def _build_once(folder: Path) -> None:
    go = _go()
    if go is None:
        raise RuntimeError(MISSING)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:  # two test runs at once build once
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "done").exists():
            _build(go, folder)
            (folder / "done").touch()


def _build(go: str, folder: Path) -> None:
    stamps = {
        "helm.sh/helm/v3/internal/version.version": HELM,
        "helm.sh/helm/v3/pkg/chartutil.k8sVersionMajor": "1",
        "helm.sh/helm/v3/pkg/chartutil.k8sVersionMinor": KUBERNETES,
        "helm.sh/helm/v3/pkg/lint/rules.k8sVersionMajor": "1",
        "helm.sh/helm/v3/pkg/lint/rules.k8sVersionMinor": KUBERNETES,
    }
    flags = " ".join(["-s", "-w", *(f"-X {name}={value}" for name, value in stamps.items())])
    command = [go, "build", "-p", "2", "-trimpath", "-ldflags", flags, "-o", f"{folder}/"]
    print(f"Building helm {HELM} and kustomize: minutes, once", file=sys.stderr)  # noqa: T201
    environment = {**os.environ, "CGO_ENABLED": "0", "GOFLAGS": "-buildvcs=false -mod=readonly"}
    done = subprocess.run(
        ["nice", *command, *PACKAGES],
        cwd=SOURCE, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")


def _folder() -> Path:
    digest = hashlib.sha256(f"{HELM} {KUBERNETES}".encode())
    for name in ("render/main.go", "go.mod", "go.sum"):
        digest.update((SOURCE / name).read_bytes())
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "octavo" / "tools" / digest.hexdigest()[:12]


def _go() -> str | None:
    usual = Path("/usr/local/go/bin/go")
    return shutil.which("go") or (str(usual) if usual.exists() else None)


if __name__ == "__main__":
    print(Path(tool("helm")).parent)  # noqa: T201
