"""Runs what was assembled as an image: on this processor, or on one that qemu emulates.

It needs what makes a container at all: to be root, or user namespaces.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path
from typing import Final

# The layers' own /proc and /dev are empty.
_ENTER: Final = 'mount --rbind /proc "$0/proc"; mount --rbind /dev "$0/dev"; exec chroot "$0" "$@"'
_GENERATE: Final = """
import platform, sys
from octavo import LLM, SamplingParams
assert platform.machine() == sys.argv[1], platform.machine()
llm = LLM("demo://smollm2", kv_cache_memory_bytes=32 * 2**20, max_model_len=256, num_threads=1)
outputs = llm.generate(["The capital of France is"], SamplingParams(temperature=0, max_tokens=4))
print("The capital of France is" + outputs[0].outputs[0].text)
"""
_CHECKS: Final = {
    "engine-cpu": ["python3", "-c", _GENERATE],
    "engine-cuda": ["python3", "-c", "import torch; print('torch', torch.__version__)"],
    "router": ["octavo", "router", "--print-config"],
    "operator": ["octavo", "operator", "--help"],
}
_EXPECTED: Final = {
    "engine-cpu": "Paris", "engine-cuda": "torch 2", "router": "prefix-load", "operator": "usage",
}  # fmt: skip


def why_not(machine: str) -> str:
    """Why an image for this processor cannot be run here, or ''."""
    qemu = f"qemu-{machine}-static"
    if machine != os.uname().machine and shutil.which(qemu) is None:
        return f"{qemu} is missing; install qemu-user-static"
    done = subprocess.run([*_namespaces(), "true"], capture_output=True, text=True, check=False)
    return f"it takes root, or user namespaces: {done.stderr.strip()}" if done.returncode else ""


def run_image(name: str, archive: Path, machine: str, work: Path) -> str:
    """The last line of what it said. Raises SystemExit where it is not what it should be."""
    with tempfile.TemporaryDirectory(dir=work) as folder:
        root = Path(folder)
        unpack(archive, root)
        command = ["/opt/octavo/bin/" + _CHECKS[name][0], *_CHECKS[name][1:], machine]
        if name != "engine-cpu":
            command.pop()
        if machine != os.uname().machine:
            qemu = shutil.which(f"qemu-{machine}-static")
            assert qemu is not None
            shutil.copy(qemu, root / "qemu")
            # A script's first line would start its interpreter without the emulator.
            python = "/opt/octavo/bin/python3"
            command = ["/qemu", *([python] if command[0] != python else []), *command]
        environ = {
            "PATH": "/opt/octavo/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": "/tmp",
            "LOGNAME": "octavo",
        }
        done = subprocess.run(
            [*_namespaces(), "sh", "-euc", _ENTER, str(root), *command],
            capture_output=True, text=True, check=False, env=environ,
        )  # fmt: skip
    if done.returncode or _EXPECTED[name] not in done.stdout:
        raise SystemExit(f"the image of {name} for {machine} does not run:\n{done.stderr[-2000:]}")
    return (done.stdout.strip().splitlines() or [""])[-1]


def unpack(archive: Path, root: Path) -> None:
    """The layers of assembled images delete nothing, so they go over each other."""
    with tarfile.open(archive) as tar:
        for layer in sorted(name for name in tar.getnames() if name.endswith(".tar")):
            with tarfile.open(fileobj=tar.extractfile(layer)) as files:
                files.extractall(root, filter="fully_trusted")


def _namespaces() -> list[str]:
    mapped = [] if os.geteuid() == 0 else ["--map-root-user"]
    return ["unshare", *mapped, "--mount"]
