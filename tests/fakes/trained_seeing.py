"""The model that sees of benchmarks/vision_model.py, trained once for all test runs of a user."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

from benchmarks import vision_model, vision_pictures
from tests.fakes.process import environment

STEPS, PICTURES = 1000, 2000  # about a minute on one core that is free
LIMIT_S = 1500.0  # on a machine that does much else


def trained_seeing_model() -> Path:
    """The checkpoint's folder. Trains it where it is missing."""
    folder = _folder()
    if not (folder / "done").exists():
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "lock").open("w") as lock:  # two test runs at once train once
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (folder / "done").exists():
                _train(folder / "model")
                (folder / "done").touch()
    return folder / "model"


def _train(folder: Path) -> None:
    """In a process of its own: torch and its threads leave with it."""
    shutil.rmtree(folder, ignore_errors=True)
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.vision_model", "train"]
    command += [str(folder), "--steps", str(STEPS), "--pictures", str(PICTURES), "--threads", "1"]
    done = subprocess.run(
        command, cwd=Path(__file__).parents[2], env=environment(), capture_output=True,
        text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")


def _folder() -> Path:
    digest = hashlib.sha256(f"{STEPS} {PICTURES}".encode())
    for module in (vision_model, vision_pictures):
        digest.update(Path(str(module.__file__)).read_bytes())
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "octavo" / "models" / f"seeing-{digest.hexdigest()[:12]}"
