"""From zero replicas to the first token over HTTP: `octavo up`, with a warm engine and without.

    python -m benchmarks.wake [--wakes 5] [--model demo://smollm2] [--warm 1]

A deployment scales to zero after ten seconds without requests. Once it is asleep, and its warm
engine loaded, one request is sent and the time to its first byte taken; then a second one, which
finds the engine there. Reads times of the wall: run it on an idle machine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
import urllib.request
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

WITHIN_S = 120.0
DEPLOYMENT = """
apiVersion: octavo.dev/v1alpha1
kind: LLMDeployment
metadata: {{name: woken}}
spec:
  model: {{uri: "{model}"}}
  autoscaling:
    maxReplicas: 1
    scaleToZero: {{after: 10s}}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--wakes", type=int, default=5)
    parser.add_argument("--model", default="demo://smollm2")
    parser.add_argument("--warm", type=int, default=1, help="--warm-pool of octavo up")
    args = parser.parse_args()
    with TemporaryDirectory(prefix="octavo-wake-") as folder:
        home = Path(folder)
        (home / "woken.yaml").write_text(DEPLOYMENT.format(model=args.model))
        command = [
            sys.executable, "-m", "octavo.cli", "up", "-f", str(home / "woken.yaml"), "--port", "0",
            "--plain", "--warm-pool", str(args.warm),
        ]  # fmt: skip
        environ = {**os.environ, "OCTAVO_HOME": folder}
        with subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL) as up:
            try:
                measure(home / "state.json", args.wakes, is_warm=args.warm > 0)
            finally:
                up.terminate()


def measure(state_file: Path, wakes: int, *, is_warm: bool) -> None:
    def is_asleep(state: dict[str, Any]) -> bool:
        (pool,) = state["pools"]
        states = [replica["state"] for replica in pool["replicas"]]
        return pool["phase"] == "asleep" and states == (["warm"] if is_warm else [])

    firsts, seconds = [], []
    for _ in range(wakes):
        url = until(state_file, is_asleep)["url"]
        time.sleep(0.5)  # as if somebody came by chance
        firsts.append(first_token_s(url))
        seconds.append(first_token_s(url))
        print(f"first token {firsts[-1] * 1e3:6.0f} ms, the next request {seconds[-1] * 1e3:.0f}")
    print(
        f"medians {statistics.median(firsts) * 1e3:.0f} and {statistics.median(seconds) * 1e3:.0f}"
    )


def until(state_file: Path, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    end = time.monotonic() + WITHIN_S
    while time.monotonic() < end:
        with suppress(OSError, ValueError, KeyError):
            state: dict[str, Any] = json.loads(state_file.read_text())
            if holds(state):
                return state
        time.sleep(0.1)
    raise SystemExit(f"the deployment did not become what was waited for within {WITHIN_S:g} s")


def first_token_s(url: str) -> float:
    body = {"model": "woken", "prompt": "Once upon a time", "max_tokens": 1, "stream": True}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    began_at = time.perf_counter()
    with urllib.request.urlopen(request, timeout=WITHIN_S) as response:
        response.readline()
        return time.perf_counter() - began_at


if __name__ == "__main__":
    main()
