"""Tries a wheel for another processor in qemu's user mode: Debian's Python for it generates text.

It needs qemu-user-static and mmdebstrap, and no rights: packages are unpacked, none is configured.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING, Final

from images import debian
from octavo.fetch.demo import ensure_demo
from release import wheels

if TYPE_CHECKING:
    from pathlib import Path

SUITE: Final = debian.SUITE
PYTHON: Final = debian.PYTHON
_PROGRAM: Final = """
import platform, sys
from octavo import LLM, SamplingParams
assert platform.machine() == sys.argv[2], platform.machine()
llm = LLM(sys.argv[1], kv_cache_memory_bytes=32 * 2**20, max_model_len=256)
outputs = llm.generate(["The capital of France is"], SamplingParams(temperature=0, max_tokens=6))
print(outputs[0].outputs[0].text)
"""


def why_not(machine: str) -> str:
    """Why wheels for this processor cannot be tried here, or ''."""
    if sys.version_info[:2] != PYTHON:
        return f"{SUITE} has another Python than {sys.version_info.major}.{sys.version_info.minor}"
    programs = (f"qemu-{machine}-static", "mmdebstrap")
    if missing := [name for name in programs if shutil.which(name) is None]:
        return f"{' and '.join(missing)} missing; install qemu-user-static and mmdebstrap"
    return ""


def try_emulated(wheel: Path, machine: str, folder: Path) -> str:
    """The text that the demo model generates. Raises CalledProcessError."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    root, packages = folder / "root", folder / "packages"
    include = "--include=python3,libstdc++6"
    architecture = f"--architectures={debian.ARCHITECTURES[machine]}"
    _run("mmdebstrap", "--quiet", architecture, "--variant=extract", include, SUITE, root)
    platforms = [f"--platform={name}" for name in wheels.platforms(machine, wheels.GLIBC)]
    version = f"--python-version={PYTHON[0]}.{PYTHON[1]}"
    _run(sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check",
         f"--target={packages}", "--only-binary=:all:", "--implementation=cp", version,
         *platforms, wheel)  # fmt: skip
    model = ensure_demo("smollm2")
    environ = [f"PYTHONPATH={packages}", f"PYTHONHOME={root / 'usr'}", f"OCTAVO_HOME={folder}/home"]
    return _run(
        f"qemu-{machine}-static", "-L", root, *(part for pair in environ for part in ("-E", pair)),
        root / "usr" / "bin" / f"python{PYTHON[0]}.{PYTHON[1]}", "-c", _PROGRAM, model, machine,
    ).strip()  # fmt: skip


def _run(*command: object) -> str:
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        list(map(str, command)), stdout=subprocess.PIPE, text=True, check=True, env=environ
    )
    return done.stdout
