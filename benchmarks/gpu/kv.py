"""KV blocks beside the link to the host: what a prompt of 4,000 tokens takes to come back from
pinned memory, and to be computed again; and attention over a cache in eight bits."""

from __future__ import annotations

import statistics
import threading
import time
from typing import TYPE_CHECKING, Any

import torch

from octavo.measure.device_limits import replayed_ms

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from benchmarks.gpu.attention import Layers
    from benchmarks.gpu.measure import Ceilings
    from benchmarks.gpu.random_model import Bench
    from octavo_engine.backends.backend import BlockCopies
    from octavo_engine.config import KVCacheDType
    from octavo_engine.tiers.page import Page

NUM_TOKENS = 4000
LINK_BYTES = 512 << 20
REPEATS = 3
WALKS = {"64 x 300": [300] * 64, "1 x 16000": [16000]}


class Copied:
    """Waits for what threads copy."""

    def __init__(self, bench: Bench, num_blocks: int) -> None:
        self._done = threading.Event()
        backend = bench.backend
        self.copies: BlockCopies = backend.open_copies(
            host_bytes=num_blocks * backend.kv_bytes_per_block,
            is_stored=False,
            woken=self._done.set,
        )
        self._device = backend.device

    def save(self, blocks: list[int]) -> list[Page]:
        pages: list[Page] = []
        while len(pages) < len(blocks):
            some = blocks[len(pages) : len(pages) + self.copies.num_saves_free]
            copy = self.copies.begin_save(some)
            self._wait(copy)
            pages += copy.pages
        return pages

    def load(self, pages: list[Page], blocks: list[int]) -> None:
        done = 0
        while done < len(pages):
            end = done + self.copies.num_loads_free
            copy = self.copies.begin_load(pages[done:end])
            self._wait(copy)
            self.copies.place(copy, blocks[done:end])
            done += len(copy.pages)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _wait(self, copy: Any) -> None:
        while not copy.is_done:
            self._done.wait(1.0)
            self._done.clear()
        if copy.is_failed:
            raise RuntimeError("a copy failed")


def tiers(bench: Bench, *, num_tokens: int = NUM_TOKENS, num_decodes: int = 32) -> dict[str, Any]:
    """Whole blocks of one sequence, in the host's memory and back; the same by computing them; and
    what decode steps take while copies run in both directions."""
    backend = bench.backend
    num_blocks = num_tokens // 16
    blocks = bench.tables[0, :num_blocks].tolist()
    num_bytes = num_blocks * backend.kv_bytes_per_block
    bench.fill(1, num_tokens)
    computed_s = _seconds(lambda: bench.fill(1, num_tokens))
    copied = Copied(bench, num_blocks)
    pages = copied.save(blocks)
    saved_s = _seconds(lambda: copied.save(blocks) and None)
    loaded_s = _seconds(lambda: copied.load(pages, blocks))
    quiet_ms = _step_ms(bench, num_decodes)
    beside_ms = _step_ms_beside(bench, num_decodes, copied, pages, blocks)
    link = link_bytes_per_s(backend.device)
    copied.copies.close()
    return {
        "gigabytes": num_bytes / 1e9,
        "load_ms": loaded_s * 1e3,
        "load_link_share": num_bytes / loaded_s / link,
        "save_ms": saved_s * 1e3,
        "save_link_share": num_bytes / saved_s / link,
        "link_gb_per_s": link / 1e9,
        "compute_ms": computed_s * 1e3,
        "faster_than_computing": computed_s / loaded_s,
        "decode_ms": quiet_ms,
        "decode_beside_copies_ms": beside_ms,
    }


def link_bytes_per_s(device: torch.device, num_bytes: int = LINK_BYTES) -> float:
    """One large copy from pinned memory."""
    is_cuda = device.type == "cuda"
    here = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=is_cuda)
    there = torch.empty(num_bytes, dtype=torch.uint8, device=device)

    def copy() -> None:
        there.copy_(here, non_blocking=True)
        if is_cuda:
            torch.cuda.synchronize(device)

    copy()
    return num_bytes / _seconds(copy)


def fp8(
    make: Callable[[KVCacheDType], Layers],
    ceilings: Ceilings,
    *,
    walks: dict[str, list[int]] | None = None,
    timer: Callable[[Sequence[Callable[[], object]]], float] = replayed_ms,
) -> dict[str, Any]:
    """Attention of single tokens over a cache in eight bits beside bfloat16."""
    found: dict[str, Any] = {}
    chosen = WALKS if walks is None else walks
    kinds: tuple[KVCacheDType, ...] = ("auto", "fp8")
    for kind in kinds:
        layers = make(kind)
        name = "bf16" if kind == "auto" else kind
        page_bytes = layers.bench.backend.kv_bytes_per_block / len(layers.specs)
        for label, lengths in chosen.items():
            ms = timer(layers.walks(lengths, layers.walk_tile, 2))
            num_bytes = sum(lengths) * page_bytes / 16
            found[f"{label} {name} us"] = ms * 1e3
            found[f"{label} {name} bandwidth_share"] = (
                num_bytes / (ms * 1e-3) / ceilings.bytes_per_s
            )
    for label in chosen:
        found[f"{label} speedup"] = found[f"{label} bf16 us"] / found[f"{label} fp8 us"]
    return found


def _seconds(work: Callable[[], object]) -> float:
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _step_ms(bench: Bench, num_seqs: int, *, repeats: int = 12) -> float:
    step = bench.step([100] * num_seqs, [1] * num_seqs)
    sampling = bench.sampling(step)
    times = []
    for index in range(repeats):
        start = time.perf_counter()
        bench.backend.execute(step, sampling)
        if index >= 4:  # launched, captured, and warm by then
            times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3


def _step_ms_beside(
    bench: Bench, num_seqs: int, copied: Copied, pages: list[Page], blocks: list[int]
) -> float:
    """As `_step_ms`; before each step a load and a save begin, and run while it computes."""
    step = bench.step([100] * num_seqs, [1] * num_seqs)
    sampling = bench.sampling(step)
    times, copies = [], copied.copies
    for _ in range(8):
        count = min(len(blocks) // 2, copies.num_saves_free // 2)
        load = copies.begin_load(pages[:count])
        save = copies.begin_save(blocks[:count])
        start = time.perf_counter()
        bench.backend.execute(step, sampling)
        times.append(time.perf_counter() - start)
        copied._wait(save)
        copied._wait(load)
        copies.drop(load)
    return statistics.median(times) * 1e3
