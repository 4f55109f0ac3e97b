"""Finds prometheus and promtool: on the PATH, else Debian's package, unpacked into a cache.

Nothing is installed: `apt-get download` and `dpkg-deb --extract`, once.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

MISSING = "no Prometheus: install prometheus and promtool, or use Debian or Ubuntu with its mirrors"


def tool(name: str) -> str | None:
    """The path of prometheus or promtool; None where there can be none."""
    if found := shutil.which(name):
        return found
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(home) / "octavo" / "prometheus"
    program = folder / "usr" / "bin" / name
    if not program.exists() and not _fetch(folder):
        return None
    return str(program)


def _fetch(folder: Path) -> bool:
    if not shutil.which("apt-get") or not shutil.which("dpkg-deb"):
        return False
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("w") as lock:  # two test runs at once fetch once
        fcntl.flock(lock, fcntl.LOCK_EX)
        if folder.exists():
            return True
        with tempfile.TemporaryDirectory(dir=folder.parent) as unfinished:
            done = subprocess.run(
                ["apt-get", "download", "prometheus"],
                cwd=unfinished, capture_output=True, check=False, timeout=240,
            )  # fmt: skip
            packages = list(Path(unfinished).glob("*.deb"))
            if done.returncode or not packages:
                return False
            target = Path(unfinished) / "root"
            subprocess.run(["dpkg-deb", "--extract", packages[0], target], check=True)
            target.rename(folder)
        return True
