"""Makes images for any processor out of packages, without running one of their programs.

Debian's packages are unpacked and given the few files that their scripts would write; Python's are
installed for the processor by pip. The Dockerfile says what belongs to each image. It needs
mmdebstrap, and no rights.
"""

from __future__ import annotations

import configparser
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from images import debian, files
from images.recipe import recipe
from release import wheels

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from images.recipe import Recipe

ROOT: Final = Path(__file__).resolve().parents[1]
NAMES: Final = ("engine-cpu", "engine-cuda", "router", "operator")
_HOOK: Final = """#!/bin/sh
# What each package says of itself, as images without dpkg's own list keep it.
set -eu
mkdir -p "$1/var/lib/dpkg/status.d"
for package in "$1"/var/cache/apt/archives/*.deb; do
  dpkg-deb --field "$package" > "$1/var/lib/dpkg/status.d/$(dpkg-deb --field "$package" Package)"
done
"""
# What the packages' scripts copy.
_COPIED: Final = {
    "etc/passwd": "usr/share/base-passwd/passwd.master",
    "etc/group": "usr/share/base-passwd/group.master",
    "etc/nsswitch.conf": "usr/share/libc-bin/nsswitch.conf",
}
_AUTHORITIES: Final = "usr/share/ca-certificates/"
# What mmdebstrap writes for its own use, also of the machine that it runs on.
_DROPPED: Final = re.compile(
    r"etc/(apt/sources\.list|hostname|resolv\.conf)|var/(cache/apt|lib/apt/lists)/.*"
    r"|var/lib/dpkg/(?!status\.d/).*"
)
_PROGRAM: Final = """#!/opt/octavo/bin/python
import sys
from {module} import {function}
sys.exit({function}())
"""


@dataclass(slots=True)
class _Base:
    """A base layer, of which the files that become others are read on the way."""

    read: dict[str, bytes] = field(default_factory=dict)

    def wants(self, name: str) -> bool:
        return name in _COPIED.values() or (name.startswith(_AUTHORITIES) and name.endswith(".crt"))

    def made(self) -> Iterator[tuple[str, bytes]]:
        for target, source in _COPIED.items():
            yield target, self.read[source]
        authorities = sorted(name for name in self.read if name.startswith(_AUTHORITIES))
        yield "etc/ssl/certs/ca-certificates.crt", b"".join(self.read[a] for a in authorities)
        names = "".join(f"{name.removeprefix(_AUTHORITIES)}\n" for name in authorities)
        yield "etc/ca-certificates.conf", names.encode()


def why_not() -> str:
    """Why images cannot be made here, or ''."""
    if sys.version_info[:2] != debian.PYTHON:
        number = ".".join(map(str, debian.PYTHON))
        return f"images have Python {number}, whose bytecode only Python {number} writes"
    if shutil.which("mmdebstrap") is None:
        return "mmdebstrap is missing; install the Debian package mmdebstrap"
    return ""


def assemble(name: str, machine: str, wheel: Path, version: str, work: Path) -> Path:
    """The image's archive, as `docker save` writes it. `wheel`: for that processor."""
    arguments = {"DEMO_MODEL": "1", "VERSION": version}
    read = recipe((ROOT / "Dockerfile").read_text(), name, arguments)
    base = base_layer(read.base, machine, work)
    root = work / f"{name}-{machine}"
    shutil.rmtree(root, ignore_errors=True)
    install(read, machine, wheel, root)
    check_processor(root, machine)
    own = work / f"{name}-{machine}.layer.tar"
    _write_folder(root, own)
    shutil.rmtree(root)
    archive = work / f"{name}-{machine}.tar"
    write_archive(read, machine, [base, own], f"docker.io/octavo/{name}:{version}", archive)
    own.unlink()
    return archive


def base_layer(base: str, machine: str, work: Path) -> Path:
    """Made once for all images on it."""
    layer = work / f"{base.lower()}-{machine}.layer.tar"
    if layer.exists():
        return layer
    work.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=work) as scratch:
        hook = Path(scratch) / "describe"
        hook.write_text(_HOOK)
        hook.chmod(0o755)
        unpacked, made = Path(scratch) / "unpacked.tar", Path(scratch) / "made.tar"
        subprocess.run(
            ["mmdebstrap", "--quiet", "--variant=extract",
             f"--architectures={debian.ARCHITECTURES[machine]}", "--include=?essential",
             f"--include={','.join(debian.PACKAGES[base])}",
             f"--hook-dir={debian.MERGED_USR}", f"--extract-hook={hook}",
             debian.SUITE, str(unpacked)],
            check=True, env={**os.environ, "SOURCE_DATE_EPOCH": "0"},
        )  # fmt: skip
        with tarfile.open(unpacked) as old, tarfile.open(made, "w") as new:
            configure(old, new)
        made.rename(layer)
    return layer


def configure(unpacked: tarfile.TarFile, layer: tarfile.TarFile) -> None:
    """What is wanted of unpacked packages, and what their scripts would have written."""
    base = _Base()
    for info in unpacked:
        name = info.name.removeprefix("./")
        is_dropped = _DROPPED.fullmatch(name) is not None and not info.isdir()
        if is_dropped or not debian.is_wanted(f"/{name}"):
            continue
        content = unpacked.extractfile(info) if info.isreg() else None
        if content is not None and base.wants(name):
            base.read[name] = content.read()
            content.seek(0)
        info.name, info.mtime, info.pax_headers = name, 0, {}
        info.uname = info.gname = ""
        layer.addfile(info, content)
    for name, data in base.made():
        info = tarfile.TarInfo(name)
        info.size, info.mode = len(data), 0o644
        layer.addfile(info, io.BytesIO(data))


def install(read: Recipe, machine: str, wheel: Path, root: Path) -> None:
    """/opt/octavo below `root`, by the steps of the Dockerfile."""
    target = root / files.TARGET.relative_to("/")
    packages = target / "lib" / f"python{_python()}" / "site-packages"
    packages.mkdir(parents=True)
    steps = [files.parser().parse_args(words) for words in read.steps]
    for step in steps:
        if step.step == "install":
            lock = ROOT / step.lock.relative_to("/")
            _pip(packages, machine, "--require-hashes", "--requirement", str(lock))
        else:
            _pip(packages, machine, str(wheel))
            files.prune(packages, step.without, () if step.whole else files.UNUSED)
    shutil.rmtree(packages / "bin", ignore_errors=True)
    files.add_bytecode(packages, root)
    _add_programs(target, packages)
    files.set_times(target)


def check_processor(root: Path, machine: str) -> None:
    """Raises SystemExit for a program or library that is for another processor."""
    for path in root.rglob("*"):
        if path.is_symlink() or not path.is_file():
            continue
        with path.open("rb") as file:
            found = wheels.elf_machine(file.read(20))
        is_other = found in wheels.ELF_MACHINES.values() and found != wheels.ELF_MACHINES[machine]
        if is_other:
            raise SystemExit(f"{path} is not for {machine}: its ELF header names machine {found}")


def write_archive(
    read: Recipe, machine: str, layers: Sequence[Path], tag: str, archive: Path
) -> None:
    """As `docker save` writes it."""
    config = {
        "architecture": debian.ARCHITECTURES[machine],
        "os": "linux",
        "created": "1970-01-01T00:00:00Z",
        "config": read.config,
        "rootfs": {"type": "layers", "diff_ids": [_digest(layer) for layer in layers]},
    }
    names = [f"{number}.tar" for number in range(len(layers))]
    manifest = [{"Config": "config.json", "RepoTags": [tag], "Layers": names}]
    with tarfile.open(archive, "w") as tar:
        _add_json(tar, "manifest.json", manifest)
        _add_json(tar, "config.json", config)
        for name, layer in zip(names, layers, strict=True):
            info = tarfile.TarInfo(name)
            info.size = layer.stat().st_size
            with layer.open("rb") as file:
                tar.addfile(info, file)


def _pip(packages: Path, machine: str, *what: str) -> None:
    """The lock files name all dependencies, and ours are among them."""
    platforms = [f"--platform={name}" for name in wheels.platforms(machine, debian.GLIBC)]
    subprocess.run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet",
         f"--target={packages}", "--upgrade", "--no-deps", "--no-compile", "--only-binary=:all:",
         "--implementation=cp", f"--python-version={_python()}", *platforms, *what],
        check=True,
    )  # fmt: skip


def _add_programs(target: Path, packages: Path) -> None:
    """A virtual environment's own files: the interpreter is the base's."""
    (target / "lib64").symlink_to("lib")
    (target / "pyvenv.cfg").write_text("home = /usr/bin\ninclude-system-site-packages = false\n")
    programs = target / "bin"
    programs.mkdir()
    (programs / "python3").symlink_to("/usr/bin/python3")
    for name in ("python", f"python{_python()}"):
        (programs / name).symlink_to("python3")
    (described,) = packages.glob("octavo-*.dist-info/entry_points.txt")
    found = configparser.ConfigParser()
    found.read_string(described.read_text())
    module, _, function = found["console_scripts"]["octavo"].partition(":")
    program = programs / "octavo"
    program.write_text(_PROGRAM.format(module=module.strip(), function=function.strip()))
    program.chmod(0o755)


def _write_folder(root: Path, layer: Path) -> None:
    """The same bytes for the same files: sorted, of root, and written by nobody else."""
    with tarfile.open(layer, "w") as tar:
        for path in sorted(root.rglob("*")):
            info = tar.gettarinfo(path, str(path.relative_to(root)))
            info.uid = info.gid = info.mtime = 0
            info.uname = info.gname = ""
            if not info.issym():
                info.mode = 0o755 if info.isdir() or info.mode & 0o100 else 0o644
            if info.islnk():  # pip and caches may link equal files; each is one here
                info.type, info.linkname, info.size = tarfile.REGTYPE, "", path.stat().st_size
            if info.isreg():
                with path.open("rb") as file:
                    tar.addfile(info, file)
            else:
                tar.addfile(info)


def _add_json(tar: tarfile.TarFile, name: str, document: object) -> None:
    data = json.dumps(document, sort_keys=True).encode()
    info = tarfile.TarInfo(name)
    info.size = len(data)
    tar.addfile(info, io.BytesIO(data))


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"


def _python() -> str:
    return ".".join(map(str, debian.PYTHON))
