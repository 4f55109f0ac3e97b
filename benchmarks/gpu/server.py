"""`octavo serve` on a GPU as its clients see it: random weights, a burst, then steady loads.

    python -m benchmarks.gpu.server [--shape 1.5b] [--out server.json] [-- flags of `octavo serve`]

The burst comes first, so that what is not compiled or captured when the server says it is ready
shows in its times. The second start finds the kernels that the first one compiled.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel
from tokenizers.models import WordLevel

from benchmarks.servers import NotReady, Server
from octavo.measure.shapes import write_shape

PORT = 8233
OCTAVO = (sys.executable, "-m", "octavo.cli")
# Requests at once, how many, tokens of a prompt, tokens of an answer.
LOADS = ((128, 128, 256, 32), (1, 4, 256, 128), (32, 64, 256, 128), (128, 256, 256, 128))
SHOWN = ("ready_s", "failed", "output_throughput", "p50_ttft_ms", "p99_ttft_ms",
         "p50_itl_ms", "p99_itl_ms")  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", default="1.5b")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/out/gpu-server.json"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("flags", nargs="*", help="of octavo serve, behind --")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="octavo-gpu-") as folder:
        found = measure(options.shape, options.device, options.flags, Path(folder))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(found, indent=2) + "\n")
    for name, figures in found.items():
        shown = (f"{key} {figures[key]:.4g}" for key in SHOWN if key in figures)
        print(f"{name:22}", ", ".join(shown) or figures)
    return 1 if any("error" in figures for figures in found.values()) else 0


def measure(shape: str, device: str, flags: list[str], folder: Path) -> dict[str, Any]:
    """Figures of the start and of each load. Prints the server's log if it does not start."""
    write_shape(shape, folder)
    write_words(folder)
    log = folder / "server.log"
    command = [*OCTAVO, "serve", str(folder), "--load-format", "dummy", "--device", device,
               "--port", str(PORT), *flags]  # fmt: skip
    found: dict[str, Any] = {}
    try:
        with Server.start(
            command, port=PORT, log=log, ready="/ready", env=VISIBLE, within_s=180
        ) as server:
            found["first start"] = {"ready_s": server.ready_s}
            for number, load in enumerate(LOADS):
                name = "burst" if number == 0 else f"{load[0]} at once"
                found[name] = run_load(server.url, load, folder / "load.json")
        with Server.start(
            command, port=PORT, log=folder / "again.log", ready="/ready", env=VISIBLE, within_s=180
        ) as server:
            found["second start"] = {"ready_s": server.ready_s}
    except NotReady as error:
        found["start"] = {"error": str(error)}
    print(log.read_text(errors="replace")[-6000:], file=sys.stderr)
    return found


VISIBLE = {"CUDA_VISIBLE_DEVICES": "0"}


def run_load(url: str, load: tuple[int, int, int, int], out: Path) -> dict[str, Any]:
    at_once, count, input_len, output_len = load
    done = subprocess.run(
        [*OCTAVO, "bench", "serve", "--url", url, "--max-concurrency", str(at_once),
         "--num-prompts", str(count), "--input-len", str(input_len),
         "--output-len", str(output_len), "--seed", str(at_once), "--json", str(out)],
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    if not out.exists():
        return {"error": done.stderr[-500:]}
    figures: dict[str, Any] = json.loads(out.read_text())
    out.unlink()
    return figures


def write_words(folder: Path) -> None:
    """A tokenizer in which each token of the model is a word."""
    config = json.loads((folder / "config.json").read_text())
    words = {f"w{number}": number for number in range(config["vocab_size"])}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w0"))
    tokenizer.decoder = ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))


if __name__ == "__main__":
    sys.exit(main())
