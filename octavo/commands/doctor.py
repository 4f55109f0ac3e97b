"""`octavo doctor`: what this machine offers, what is missing, and what to do about it."""

from __future__ import annotations

import json
import platform
import re
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.options.parser import CommandParser

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_SHOWN = 3  # models that are recommended
MARKS = {"ok": "✓", "missing": "✗", "optional": "·"}


@dataclass(frozen=True, slots=True)
class MachineFinding:
    """One fact. `missing` hinders, `optional` does not; `advice` says what to do."""

    name: str
    state: str  # ok, missing, optional
    value: str
    advice: str = ""


def main(prog: str, argv: Sequence[str]) -> int:
    """0 if a model can be served here, 1 otherwise."""
    parser = CommandParser(prog, "Check what this machine supports.")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(argv)
    findings = list(examine())
    if args.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        for finding in findings:
            print(f"{MARKS[finding.state]} {finding.name:<12} {finding.value}")
            if finding.advice:
                print(f"  {'':<12} → {finding.advice}")
    return int(any(finding.state == "missing" for finding in findings))


def examine() -> Iterator[MachineFinding]:
    from octavo_engine import __version__

    yield MachineFinding("octavo", "ok", __version__)
    yield MachineFinding("python", "ok", f"{platform.python_version()} on {platform.platform()}")
    yield from _extension()
    yield _memory()
    yield from _packages()
    yield _accelerator()
    yield _device()
    yield from _models()


def _extension() -> Iterator[MachineFinding]:
    try:
        from octavo_engine import _native
    except ImportError as error:
        yield MachineFinding(
            "extension",
            "missing",
            f"octavo_engine._native cannot be imported ({error})",
            "pip install . in the source tree builds it; it needs a C++20 compiler and CMake",
        )
        return
    isas = _native.available_isas()
    offered = sorted(name for name, there in _native.cpu_features().items() if there)
    value = f"instruction sets {', '.join(isas)}; {isas[0]} is used"
    best = _native.runnable_isas()[0]
    if best in isas:
        yield MachineFinding("extension", "ok", value)
    else:
        advice = (
            f"this machine also runs {best}, which is faster: build again with OCTAVO_ISAS=host"
        )
        yield MachineFinding("extension", "optional", value, advice)
    yield MachineFinding("cores", "ok", f"{_native.available_cores()} for this process")
    yield MachineFinding("cpu", "ok", ", ".join(offered) or "no vector instructions known to us")


def _memory() -> MachineFinding:
    from octavo_engine.core.memory import free_memory
    from octavo_engine.errors import OctavoError

    try:
        free = free_memory()
    except (OSError, OctavoError) as error:
        return MachineFinding(
            "memory", "optional", f"unknown ({error})", "set --kv-cache-memory-bytes"
        )
    if free < 2**30:
        advice = "a small model needs about 1 GiB; free some, or raise the container's limit"
        return MachineFinding("memory", "optional", f"{free / 2**30:.1f} GiB free", advice)
    return MachineFinding("memory", "ok", f"{free / 2**30:.1f} GiB free")


def _packages() -> Iterator[MachineFinding]:
    from octavo_engine.errors import ModelError
    from octavo_engine.weights.demo import locate_demo

    try:
        locate_demo("smollm2")
    except ModelError:
        advice = "`octavo fetch demo://smollm2` brings a small model (93 MB)"
        yield MachineFinding("demo model", "optional", "not on this machine", advice)
    else:
        yield MachineFinding("demo model", "ok", "demo://smollm2")


def _accelerator() -> MachineFinding:
    """Torch is looked up, not imported: that takes seconds."""
    gpus = _gpus()
    if not find_spec("torch"):
        advice = "only GPUs and --device torch need it"
        if gpus:
            advice = "install it with CUDA to use the GPU"
        return MachineFinding("torch", "optional", f"not installed; {_listed(gpus)}", advice)
    try:
        installed = version("torch")
    except PackageNotFoundError:
        return MachineFinding("torch", "optional", "has no version", "reinstall torch")
    return MachineFinding("torch", "ok", f"{installed}, {_listed(gpus)}")


def _device() -> MachineFinding:
    """What --device auto chooses here for a model that needs nothing unusual. Torch is imported
    only where a GPU's driver is."""
    from octavo_engine.core.device_choice import NoNeeds, ThisMachine, choose_device

    choice = choose_device(ThisMachine(), NoNeeds())
    value = f"--device auto chooses {choice.device}: {choice.reason}"
    return MachineFinding("device", "ok", value)


def _listed(gpus: list[str]) -> str:
    return ", ".join(gpus) or "no GPU"


def _gpus() -> list[str]:
    """As the kernel's drivers list them."""
    names = []
    for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        with suppress(OSError):
            found = re.search(r"^Model:\s*(.+)$", path.read_text(errors="replace"), re.MULTILINE)
            names.append(found[1] if found else "NVIDIA GPU")
    if not names and Path("/dev/kfd").exists():
        names.append("AMD GPU")
    return names


def _models() -> Iterator[MachineFinding]:
    """The largest of the catalogue that fit."""
    from octavo.models.catalogue import fitting_models
    from octavo_engine.core.memory import free_memory
    from octavo_engine.errors import OctavoError

    try:
        fitting = fitting_models(free_memory())
    except (OSError, OctavoError):
        return
    if fitting:
        shown = [f"{model.name} ({model.memory / 1000:.1f} GB)" for model in fitting[:_SHOWN]]
        advice = f"octavo run {fitting[0].name}; octavo list --all shows every model"
        yield MachineFinding("models", "ok", f"the largest that fit: {', '.join(shown)}", advice)
