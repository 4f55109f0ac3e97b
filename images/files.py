"""Fills the virtual environment that an image is made of: locked packages, our wheel, and bytecode.

Everything in it is the same for the same inputs: no times, no caches, no order of a file system.
Runs in the stages of the Dockerfile; release/assembled.py calls the same steps for any processor.
"""

from __future__ import annotations

import argparse
import compileall
import os
import py_compile
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

TARGET = Path("/opt/octavo")
# Of no use to a server, and a tenth of the whole.
UNUSED = ("tests", "include", "*.pyi", "*.pxd", "*.h", "numpy/distutils", "numpy/f2py")
PROGRAMS = ("python*", "octavo")
# Packages that are published with the debugging information of their extensions: 13 MB.
TO_STRIP = ("uvloop", "httptools")


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    steps = parser.add_subparsers(dest="step", required=True)
    step = steps.add_parser("install", help="what a lock file names")
    step.add_argument("lock", type=Path)
    step.add_argument("--no-deps", action="store_true")
    step = steps.add_parser("finish", help="our wheel, and what depends on all files being there")
    step.add_argument("wheels", type=Path)
    step.add_argument("--without", nargs="*", default=[], metavar="PATH", help="parts of it")
    step.add_argument("--whole", action="store_true", help="also what only compilers read")
    return parser


def main(argv: list[str]) -> int:
    args = parser().parse_args(argv)
    if args.step == "install":
        install("--require-hashes", "--requirement", str(args.lock), no_deps=args.no_deps)
    else:
        finish(args.wheels, args.without, unused=() if args.whole else UNUSED)
    return 0


def install(*what: str, no_deps: bool) -> None:
    if not TARGET.exists():
        # Its interpreter is a link to the base's own, which the final image has at the same path.
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(TARGET)], check=True)
    command = ["pip", "--python", f"{TARGET}/bin/python", "install", "--quiet", "--no-compile"]
    subprocess.run([*command, *(["--no-deps"] if no_deps else []), *what], check=True)


def finish(wheels: Path, without: list[str], unused: Sequence[str]) -> None:
    (wheel,) = wheels.glob("*.whl")
    install(str(wheel), no_deps=True)
    packages = next((TARGET / "lib").glob("python3*/site-packages"))
    prune(packages, without, unused)
    for package in TO_STRIP:
        for path in sorted((packages / package).rglob("*.so")):
            subprocess.run(["strip", "--strip-debug", str(path)], check=True)
    shutil.rmtree(TARGET / "include")  # of the environment, and empty
    for path in (TARGET / "bin").iterdir():
        if not any(path.match(pattern) for pattern in PROGRAMS):
            path.unlink()
    add_bytecode(packages)
    set_times(TARGET)


def prune(packages: Path, without: Sequence[str], unused: Sequence[str]) -> None:
    for part in without:
        _remove(packages, part)
    for pattern in unused:
        for path in sorted(packages.rglob(pattern), reverse=True):  # what is inside goes first
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def add_bytecode(packages: Path, root: Path | None = None) -> None:
    """A read-only image cannot keep bytecode later; checked by nothing, it needs no times.

    `root`: what the image will have as /.
    """
    done = compileall.compile_dir(
        packages,
        force=True,  # pip imports some packages on its way, and leaves bytecode that needs times
        quiet=2,
        workers=0,
        invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
        stripdir=root,
        prependdir=root and "/",
    )
    if not done:  # packages ship templates that are no Python of this version
        print("Some files are not Python; they were left without bytecode.")


def set_times(folder: Path) -> None:
    epoch = int(os.environ.get("SOURCE_DATE_EPOCH") or 0)
    for path in [folder, *folder.rglob("*")]:
        os.utime(path, (epoch, epoch), follow_symlinks=False)


def _remove(packages: Path, part: str) -> None:
    found = [packages / part] if (packages / part).is_dir() else list(packages.glob(f"{part}*"))
    if not found:
        sys.exit(f"there is no {part} to leave out")
    for path in found:
        shutil.rmtree(path) if path.is_dir() else path.unlink()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
