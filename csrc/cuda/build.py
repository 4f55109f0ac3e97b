"""Builds the CUDA kernels beside the engine: `python csrc/cuda/build.py`, where nvcc and torch are.

    --host   for the processor instead, by the C++ compiler: what the tests run
    --check  only compile, for sm_80 and sm_90a, and link nothing

nvcc is that of --nvcc, of the PATH, or of the packages nvidia-cuda-nvcc, nvidia-cuda-runtime,
nvidia-cuda-crt, nvidia-nvvm (13.0.*) and nvidia-cuda-cccl.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
OUT = HERE.parents[1] / "engine" / "octavo_engine" / "_grouped_gemv.so"
ARCHITECTURES = ("sm_80", "sm_90a")
FLAGS = ("-std=c++20", "-O2")
WARNINGS = ("-Wall", "-Wextra", "-Werror")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--nvcc", type=Path, default=find_nvcc())
    parser.add_argument("--host", action="store_true")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args(arguments)
    if options.nvcc is None and not options.host:
        sys.stderr.write("there is no nvcc: the kernels are not built, Triton's are used\n")
        return 2
    with tempfile.TemporaryDirectory() as folder:
        kernels = Path(folder) / "kernels.o"
        if options.host:
            compiler = [_cxx(), "-x", "c++", *WARNINGS, "-fPIC"]
        else:
            targets = [f"-gencode=arch=compute_{a[3:]},code={a}" for a in ARCHITECTURES]
            compiler = [str(options.nvcc), *targets, "-Xcompiler=-fPIC,-Wall,-Wextra"]
        flags = ("-std=c++20", "-O1") if options.host else FLAGS  # nobody waits for a host's
        _run([*compiler, *flags, "-c", str(HERE / "grouped_gemv.cu"), "-o", str(kernels)])
        if not options.check:
            link(kernels, options.out, None if options.host else options.nvcc)
            sys.stdout.write(f"built {options.out}\n")
    return 0


def link(kernels: Path, out: Path, nvcc: Path | None) -> None:
    """With the binding; `nvcc` None: for the host."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        raise SystemExit("torch is not installed: pip install torch triton")
    torch = Path(found.origin).parent
    device = [] if nvcc is None else [
        "-DOCTAVO_ON_DEVICE", "-DUSE_CUDA", f"-I{nvcc.parents[1] / 'include'}",
    ]  # fmt: skip
    libraries = ["-ltorch", "-ltorch_cpu", "-lc10"]
    if nvcc is not None:
        places = [nvcc.parents[1] / name for name in ("lib", "lib64")]
        libraries += [*(f"-L{place}" for place in places), "-ltorch_cuda", "-lcudart_static"]
        libraries += ["-lrt", "-ldl", "-lpthread"]
    _run([
        _cxx(), "-std=c++20", "-O1", *WARNINGS, *device, "-fPIC", "-shared",
        f"-isystem{torch / 'include'}",
        f"-isystem{torch / 'include/torch/csrc/api/include'}", str(HERE / "binding.cpp"),
        str(kernels), f"-L{torch / 'lib'}", *libraries, "-o", str(out),
    ])  # fmt: skip


def find_nvcc() -> Path | None:
    """That of $NVCC, of the PATH, or of this Python's packages."""
    if named := os.environ.get("NVCC"):
        return Path(named)
    if found := shutil.which("nvcc"):
        return Path(found)
    spec = importlib.util.find_spec("nvidia")
    places = [] if spec is None else list(spec.submodule_search_locations or ())
    for place in places:
        nvcc = Path(place) / "cu13" / "bin" / "nvcc"
        if nvcc.exists():
            return nvcc
    return None


def _cxx() -> str:
    return os.environ.get("CXX", "c++")


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")


if __name__ == "__main__":
    sys.exit(main())
