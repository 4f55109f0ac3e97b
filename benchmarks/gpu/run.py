"""One command on a GPU: ceilings, correctness, then an 8B-shaped model; a table and a JSON.

    python -m benchmarks.gpu.run [--out gpu.json] [--layers 32] [--only decode1 prefill …]

From the repository's root, with torch and triton installed (or PYTHONPATH=.:common:engine).
Takes about three minutes and 40 GB of device memory; --layers 8 needs a quarter of it, but then
shares of ceilings are those of a smaller model.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import platform
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from octavo_engine.backends.backend import BackendLimits

if TYPE_CHECKING:
    from collections.abc import Callable

LIMITS = BackendLimits(max_tokens=8192, max_seqs=256, max_logit_rows=320, max_model_len=16384)
# What is to be reached on an H200-class device.
GOALS = {
    ("decode1", "bandwidth_share"): (">=", 0.85),
    ("decode64", "bandwidth_share"): (">=", 0.80),
    ("decode256", "gemm_peak_share"): (">=", 0.60),
    ("prefill", "gemm_peak_share"): (">=", 0.60),
    ("prefill_8k", "peak_share"): (">=", 0.65),
    ("steps1", "ahead_gap_share"): ("<=", 0.03),
    ("steps256", "ahead_gap_share"): ("<=", 0.03),
    ("kv_tiers", "faster_than_computing"): (">=", 5.0),
    ("kv_tiers", "load_link_share"): (">=", 0.8),
    ("upload", "estimated_s_for_16_gb"): ("<=", 10.0),
}
PARTS = (
    "decode1", "decode64", "decode256", "decode_long", "prefill", "prefill_8k", "steps1",
    "steps256", "mixed", "verify", "draw", "upload", "quantized", "experts", "decode1_int4",
    "decode64_int4", "adapters", "latent", "encoders", "states", "kv_tiers", "kv_fp8",
)  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/out/gpu.json"))
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("torch sees no GPU here; nothing was measured", file=sys.stderr)
        return 2
    options.out.parent.mkdir(parents=True, exist_ok=True)

    def done(report: dict[str, Any]) -> None:
        options.out.write_text(json.dumps(report, indent=2) + "\n")

    report = measure(options.layers, options.only, done)
    print_table(report)
    print(f"\nwritten to {options.out}")
    return 1 if any("failed" in part for part in report.values() if isinstance(part, dict)) else 0


def measure(
    num_layers: int, only: list[str], done: Callable[[dict[str, Any]], object]
) -> dict[str, Any]:
    """`done` gets the report after each part: who runs out of time has what was measured."""
    from benchmarks.gpu import (
        adapters,
        correctness,
        encoders,
        gap,
        kv,
        latent,
        products,
        states,
        verify,
    )
    from benchmarks.gpu import measure as parts
    from benchmarks.gpu.attention import Layers
    from benchmarks.gpu.random_model import LLAMA_8B, Bench
    from octavo.measure import device_limits

    report: dict[str, Any] = {"device": describe(), "layers": num_layers}
    report["correctness"] = correctness.check()
    device = torch.device("cuda", 0)
    limits = device_limits.measure_device_limits(device)
    report["ceilings"] = {"copy_gb_per_s": limits.read_gb_s} | {
        f"{kind}_tflops": rate / 1e3 for kind, rate in limits.gemm_gflop_s.items()
    }
    best = parts.Ceilings(limits.read_gb_s * 1e9, limits.gemm_gflop_s["bf16"] * 1e9)
    bench = Bench.make(
        LLAMA_8B | {"num_hidden_layers": num_layers}, LIMITS, num_drafts=verify.NUM_DRAFTS
    )
    packed = functools.cache(
        lambda: Bench.make(
            LLAMA_8B | {"num_hidden_layers": num_layers}, LIMITS, kind="int4_symmetric"
        )
    )
    work: dict[str, Callable[[], dict[str, Any]]] = {
        "decode1": lambda: parts.decode(bench, 1, 512, best),
        "decode64": lambda: parts.decode(bench, 64, 256, best),
        "decode256": lambda: parts.decode(bench, 256, 256, best),
        "decode_long": lambda: parts.decode(bench, 1, 16000, best),
        "prefill": lambda: parts.prefill(bench, 2048, best),
        "prefill_8k": lambda: parts.prefill(bench, 8192, best),
        "steps1": lambda: gap.steps(
            bench, 1, 512, device_ms=functools.partial(parts.graph_ms, bench, 1)
        ),
        "steps256": lambda: gap.steps(
            bench, 256, 128, device_ms=functools.partial(parts.graph_ms, bench, 256)
        ),
        "mixed": lambda: gap.mixed(bench, 31, 200),
        "verify": lambda: verify.verify(bench, best),
        "draw": lambda: parts.draw(bench, 256),
        "quantized": lambda: products.quantized(best, device=device),
        "experts": lambda: products.mixtures(best, device=device),
        "latent": lambda: latent.measure(best, device=device),
        "encoders": lambda: encoders.encoders(best, device=device),
        "states": lambda: states.measure(best, device=device),
        "upload": parts.upload,
        "decode1_int4": lambda: parts.decode(packed(), 1, 512, best),
        "decode64_int4": lambda: parts.decode(packed(), 64, 256, best),
        "adapters": lambda: adapters.decode(bench, best),
        "kv_tiers": lambda: kv.tiers(bench),
        "kv_fp8": lambda: kv.fp8(lambda kind: Layers(kv_cache_dtype=kind), best),
    }
    for name in only:
        started_at = time.monotonic()
        try:
            report[name] = work[name]()
        except Exception as error:  # the other parts are worth their time all the same
            traceback.print_exc()
            report[name] = {"failed": f"{type(error).__name__}: {error}"}
        print(f"measured {name} in {time.monotonic() - started_at:.1f} s", file=sys.stderr)
        done(report)
    return report


def describe() -> dict[str, str]:
    import triton

    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
        capture_output=True, text=True, check=False,
    ).stdout.strip() if torch.version.hip is None else str(torch.version.hip)  # fmt: skip
    return {
        "name": torch.cuda.get_device_name(),
        "driver": driver,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def print_table(report: dict[str, Any]) -> None:
    for part, values in report.items():
        if not isinstance(values, dict):
            continue
        for name, value in values.items():
            shown = f"{value:12.4g}" if isinstance(value, float) else f"{value:>12}"
            print(f"{part:12} {name:24} {shown}  {verdict(part, name, value)}".rstrip())


def verdict(part: str, name: str, value: Any) -> str:
    """The goal beside a number that has one."""
    if (part, name) not in GOALS:
        return ""
    sign, goal = GOALS[part, name]
    is_met = value >= goal if sign == ">=" else value <= goal
    return f"goal {sign} {goal:g}: {'met' if is_met else 'missed'}"


if __name__ == "__main__":
    sys.exit(main())
