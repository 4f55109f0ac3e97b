"""Attention alone, as the engine launches it for an 8B-shaped layer, beside what torch brings.

    python -m benchmarks.gpu.attention [--out attention.json] [--tune]

Single tokens are given as a share of the copy bandwidth, prompts in TFLOP/s. `--tune` times other
cuts than the engine's as well.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu.random_model import LLAMA_8B, Bench
from octavo.measure import device_limits
from octavo.measure.device_limits import replayed_ms
from octavo_engine.backends.backend import BackendLimits
from octavo_engine.backends.torch.device_step import StepSizes, WalkCut, cut_tiles, cut_walks
from octavo_engine.backends.torch.triton import attention, decode
from octavo_engine.backends.torch.triton.attention import Tile
from octavo_engine.backends.torch.triton.decode import WalkTile
from octavo_engine.ops import AttentionSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from octavo_engine.backends.torch.device_step import DeviceStep
    from octavo_engine.config import KVCacheDType

LAYERS = 4  # in turn, so that what they read is not in the cache
LIMITS = BackendLimits(max_tokens=8192, max_seqs=256, max_logit_rows=256, max_model_len=16384)
HEADS, KV_HEADS, DIM = 32, 8, 128
# Sequences and the tokens that each has; of the last, one is long.
WALKS = {"1 x 512": [512], "1 x 16000": [16000], "64 x 300": [300] * 64, "256 x 300": [300] * 256,
         "63 x 300, 16000": [16000] + [300] * 63}  # fmt: skip
PROMPTS = (512, 2048, 8192)
PROMPT_TILES = [
    Tile(block_m, block_n, num_warps, stages)
    for block_m, block_n, num_warps, stages in (
        (128, 64, 8, 3), (128, 64, 8, 5), (128, 128, 8, 2), (128, 128, 8, 3), (128, 64, 4, 2),
        (128, 64, 4, 3), (64, 64, 4, 3), (128, 32, 8, 5), (256, 64, 8, 3),
    )
]  # fmt: skip
# Stages are shared between the numbers of pages and what lies in them: five are two of the latter.
WALK_TILES = [
    WalkTile(block_n, num_warps, stages)
    for block_n, num_warps, stages in (
        (32, 2, 5), (32, 4, 5), (32, 4, 7), (64, 2, 5), (64, 4, 5), (64, 4, 7), (64, 8, 5),
        (128, 4, 3), (128, 4, 5), (128, 8, 5),
    )
]  # fmt: skip
PART_SHARES = (1, 2, 4)  # programs for each processor that contexts are cut for


class Layers:
    """Steps over caches of random numbers."""

    def __init__(
        self,
        device: str = "cuda",
        *,
        kv_cache_dtype: KVCacheDType = "auto",
        limits: BackendLimits = LIMITS,
    ) -> None:
        config = LLAMA_8B | {
            "num_hidden_layers": LAYERS,
            "intermediate_size": 256,
            "vocab_size": 1024,
        }
        self.bench = Bench.make(
            config, limits, device=device, kernels="triton", kv_cache_dtype=kv_cache_dtype
        )
        backend = self.bench.backend
        assert backend._context is not None and backend._buffer is not None
        self.kv, self.buffer, self.device = backend._context.kv, backend._buffer, backend.device
        for data in self.kv._data.values():
            if data.dtype.itemsize > 1:
                data.normal_()
            else:  # any bytes but those of NaN
                data.view(torch.uint8).random_(0, 127)
        for scales in self.kv._scales.values():
            scales.fill_(0.01)
        self.limits, self.specs = limits, backend.cache_layout.specs
        self.processors = backend._kernels._num_processors  # type: ignore[attr-defined]  # Triton's
        self.tile, self.walk_tile = backend._kernels._tile, backend._kernels._walk_tile  # type: ignore[attr-defined]  # and these
        if kv_cache_dtype == "fp8":
            self.walk_tile = backend._kernels._scaled_walk_tile  # type: ignore[attr-defined]

    def spec(self, layer: int) -> AttentionSpec:
        return AttentionSpec(
            layer=layer, num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM, scale=DIM**-0.5
        )

    def q(self, num_tokens: int) -> Tensor:
        return torch.randn((num_tokens, HEADS * DIM), device=self.device).bfloat16()

    def walks(self, lengths: list[int], tile: WalkTile, share: int) -> list[Callable[[], Tensor]]:
        step = self.bench.step([length - 1 for length in lengths], [1] * len(lengths))
        spare = share * self.processors // KV_HEADS
        tiles = cut_walks(step.seq_lens, spare)
        view = self._send(step, tiles, StepSizes.of_decode(len(lengths), spare), is_decode=True)
        q = self.q(len(lengths))
        return [
            functools.partial(
                decode.attend,
                q,
                self.kv.layer(layer),
                view,
                self.spec(layer),
                tile=tile,
            )
            for layer in range(LAYERS)
        ]

    def prompts(self, num_tokens: int, tile: Tile) -> list[Callable[[], Tensor]]:
        step = self.bench.step([0], [num_tokens])
        tiles = cut_tiles(step.seq_starts, tile.block_m * KV_HEADS // HEADS)
        sizes = StepSizes(num_tokens, 1, 1, len(tiles.seqs))
        view = self._send(step, tiles, sizes, is_decode=False)
        q = self.q(num_tokens)
        return [
            functools.partial(
                attention.attend, q, self.kv.layer(layer), view, self.spec(layer),
                tile=tile, num_splits=1,
            )
            for layer in range(LAYERS)
        ]  # fmt: skip

    def _send(self, step: Any, tiles: Any, sizes: StepSizes, *, is_decode: bool) -> DeviceStep:
        # One for each: what is timed later must find its own.
        self.buffer = type(self.buffer)(self.limits, self.device, walks=WalkCut(1024, HEADS))
        self.buffer.send(self.buffer.fill(step, self.bench.sampling(step), tiles, sizes))
        return self.buffer.step(
            sizes, is_decode=is_decode, max_seq_len=self.limits.max_model_len, host=step
        )


def cases(layers: Layers, *, tune: bool) -> Iterator[tuple[str, list[Callable[[], Tensor]]]]:
    """Names and works. What a name ends with is no more than how it is cut."""
    for name, lengths in WALKS.items():
        yield f"walk {name}", layers.walks(lengths, layers.walk_tile, 2)
        if tune:
            for walk in WALK_TILES:
                yield f"walk {name} {tuple(walk)}", layers.walks(lengths, walk, 2)
            for share in PART_SHARES:
                yield (
                    f"walk {name} share {share}",
                    layers.walks(lengths, layers.walk_tile, share),
                )
    for count in PROMPTS:
        yield f"prompt {count}", layers.prompts(count, layers.tile)
        for tile in PROMPT_TILES if tune else ():
            yield f"prompt {count} {tuple(tile)}", layers.prompts(count, tile)


def others(count: int, device: torch.device) -> Iterator[tuple[str, list[Callable[[], Tensor]]]]:
    """The same prompt over keys and values that lie side by side."""
    q = torch.randn((1, HEADS, count, DIM), device=device, dtype=torch.bfloat16)
    k, v = (
        torch.randn((1, KV_HEADS, count, DIM), device=device, dtype=torch.bfloat16) for _ in "kv"
    )

    def work(backend: SDPBackend) -> Tensor:
        with sdpa_kernel(backend):
            return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):
        name = backend.name.removesuffix("_ATTENTION").lower()
        yield f"prompt {count} {name}", [functools.partial(work, backend)] * LAYERS


def figure(name: str, ms: float, bytes_per_s: float) -> dict[str, float]:
    if name.startswith("walk"):
        lengths = next(
            lengths for key, lengths in reversed(WALKS.items()) if name.startswith(f"walk {key}")
        )
        num_bytes = sum(lengths) * KV_HEADS * DIM * 2 * 2
        return {"us": ms * 1e3, "bandwidth_share": num_bytes / (ms * 1e-3) / bytes_per_s}
    count = int(name.split()[1])
    return {"us": ms * 1e3, "tflops": 2 * count**2 * HEADS * DIM / (ms * 1e-3) / 1e12}


def compile_all(works: list[list[Callable[[], Tensor]]]) -> None:
    """Side by side: a compilation is mostly LLVM's and ptxas'."""

    def once(work: Callable[[], Tensor]) -> None:
        try:
            work()
        except Exception as error:  # it will fail again where it is timed
            print(f"not compiled: {error}"[:300], file=sys.stderr)

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(once, [of_layers[0] for of_layers in works]))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/out/gpu-attention.json"))
    parser.add_argument("--tune", action="store_true")
    options = parser.parse_args(arguments)
    device = torch.device("cuda", 0)
    bytes_per_s = device_limits.copy_bandwidth(device)
    layers = Layers()
    found: dict[str, dict[str, float]] = {}
    all_cases = list(cases(layers, tune=options.tune))
    compile_all([works for _, works in all_cases])
    for count in PROMPTS:
        all_cases += others(count, device)
    for name, works in all_cases:
        try:
            found[name] = figure(name, replayed_ms(works), bytes_per_s)
        except Exception as error:  # a cut that does not fit, a backend that is not there
            print(f"{name}: {type(error).__name__}: {error}"[:300], file=sys.stderr)
            continue
        print(f"{name:32}", ", ".join(f"{key} {value:.4g}" for key, value in found[name].items()))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(found, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
