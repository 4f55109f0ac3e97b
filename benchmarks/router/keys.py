"""What reading, naming and matching a prompt costs, compiled and in Python; and memory by key.

python -m benchmarks.router.keys
"""

from __future__ import annotations

import json
import os
import resource
import time
from functools import partial
from typing import TYPE_CHECKING

from octavo_router.residency import native
from octavo_router.residency.api import CHAT

if TYPE_CHECKING:
    from collections.abc import Callable

    from octavo_router.residency.native import HotPath

SIZES = (1_300, 16_000, 100_000)  # bytes of a body
NUM_SLOTS = 4
KEYS_PER_SLOT = 1_000_000
CHUNK = b'data: {"id":"chatcmpl-0","choices":[{"index":0,"delta":{"content":" the"}}]}\n\n'
TEXT = "Tell me, please: why is the sky blue, and why is it red in the evening?\n"


def main() -> None:
    compiled = native.load()
    if not compiled.is_native:
        raise SystemExit(compiled.problem)
    slow = native.in_python("for comparison")
    print(f"{'':32}{'compiled':>12}{'Python':>12}   us")
    for size in SIZES:
        body = make_body(size)
        num_keys = len(compiled.scan(body, CHAT).keys) // 8
        name = f"scan {len(body)} bytes, {num_keys} keys"
        show(name, *(microseconds(partial(path.scan, body, CHAT)) for path in (compiled, slow)))
    for size in SIZES:
        keys = compiled.scan(make_body(size), CHAT).keys
        name = f"match {len(keys) // 8} keys, {NUM_SLOTS} slots"
        show(name, *(match_time(path, keys, 20_000) for path in (compiled, slow)))
    line = b": octavo 0 1234\n" + CHUNK
    for name, data in (("split a clean chunk", CHUNK), ("split a chunk with a line", line)):
        paths = (compiled, slow)
        show(name, *(microseconds(partial(p.split_token_lines, data)) for p in paths))
    memory(compiled)


def make_body(size: int) -> bytes:
    system = TEXT * (size // 2 // len(TEXT))
    messages = [{"role": "system", "content": system}, {"role": "user", "content": ""}]
    body = {"model": "smollm2", "messages": messages, "stream": True, "max_tokens": 64}
    while len(json.dumps(body)) < size:
        messages[1]["content"] += TEXT[: max(1, size - len(json.dumps(body)) - 1)]
    return json.dumps(body).encode()


def match_time(path: HotPath, keys: bytes, keys_per_slot: int) -> float:
    """Each slot holds another share of the prompt, among many other keys."""
    index = path.ResidencyIndex()
    slots = [index.add_slot() for _ in range(NUM_SLOTS)]
    for slot in slots:
        index.apply(slot, os.urandom(12 * keys_per_slot), b"")
        index.assume(slot, keys[: len(keys) // 8 * slot // NUM_SLOTS * 8], 16.0)
    return microseconds(lambda: index.match(keys, slots))


def memory(path: HotPath) -> None:
    index = path.ResidencyIndex()
    before = resident_bytes()
    for _ in range(NUM_SLOTS):
        slot = index.add_slot()
        for _ in range(KEYS_PER_SLOT // 10_000):
            index.apply(slot, os.urandom(12 * 10_000), b"")
    num_keys = NUM_SLOTS * KEYS_PER_SLOT
    counted, resident = index.memory_bytes / num_keys, (resident_bytes() - before) / num_keys
    print(
        f"{NUM_SLOTS} slots x {KEYS_PER_SLOT} keys: {counted:.1f} bytes a key counted, "
        f"{resident:.1f} resident; 64 slots: {64 * KEYS_PER_SLOT * resident / 1e9:.2f} GB"
    )


def resident_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def microseconds(work: Callable[[], object]) -> float:
    """Of the fastest of several rounds: whatever else ran made the others slower."""
    best = float("inf")
    count = 1
    for _ in range(12):
        started = time.perf_counter()
        for _ in range(count):
            work()
        elapsed = time.perf_counter() - started
        best = min(best, elapsed / count)
        count = max(count, min(20_000, int(0.02 / best)))
    return best * 1e6


def show(name: str, compiled: float, slow: float) -> None:
    print(f"{name:32}{compiled:12.2f}{slow:12.2f}")


if __name__ == "__main__":
    main()
