"""The user's cache: what is built once for many runs, under a key of what it is built from."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

ROOT = Path(__file__).resolve().parents[2]  # of the sources
HERE = Path(__file__).resolve().parent


def folder() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    path = Path(home) / "octavo" / "e2e"
    path.mkdir(parents=True, exist_ok=True)
    return path


def key_of(paths: Iterable[Path], *words: str) -> str:
    """Of the files' names and bytes, whatever their times."""
    digest = hashlib.sha256("\0".join(words).encode())
    for path in sorted(paths):
        digest.update(f"\0{path.relative_to(ROOT)}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


@contextmanager
def locked(name: str) -> Iterator[None]:
    """Two runs at once build once: the second waits, and then finds it built."""
    with (folder() / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def forget_others(kept: Path, pattern: str) -> None:
    """Keys of earlier sources are never used again."""
    for path in folder().glob(pattern):
        if path != kept:
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink()
