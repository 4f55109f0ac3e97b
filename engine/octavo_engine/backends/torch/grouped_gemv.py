"""The CUDA kernel for products of a few rows with 4- and 8-bit groups, where it was built and
agrees with Triton's on this device and is faster: that is measured when a model is loaded, not
assumed."""

from __future__ import annotations

import functools
import logging
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import torch

from octavo_engine.backends.torch.packed import GroupedWeight

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

LIBRARY = Path(__file__).parents[2] / "_grouped_gemv.so"  # csrc/cuda/build.py puts it there
MAX_ROWS = 4
# As a layer of an 8B model: what is timed.
TRIED_SHAPE, TRIED_GROUP = (28672, 4096), 128  # more than a cache holds
ROUNDS, WARM_UP = 15, 3
MAX_ERROR = 0.02  # of the largest result: both are rounded to 8 bits in the end

Product: TypeAlias = "Callable[[Tensor, GroupedWeight, Tensor | None, torch.dtype], Tensor]"
Timer: TypeAlias = "Callable[[Callable[[], object]], float]"

logger = logging.getLogger(__name__)


def load(library: Path) -> Product:
    """The product that the library computes. Raises OSError if torch cannot load it."""
    torch.ops.load_library(str(library))  # type: ignore[no-untyped-call]  # torch's
    operator = torch.ops.octavo_cuda.grouped_gemv

    def product(
        x: Tensor, weight: GroupedWeight, bias: Tensor | None, out_dtype: torch.dtype
    ) -> Tensor:
        if len(x) > MAX_ROWS or x.shape[1] != weight.shape[1]:
            raise RuntimeError(f"no kernel takes a product of {tuple(x.shape)} and {weight.shape}")
        if bias is not None and (len(bias) != weight.shape[0] or bias.dtype != x.dtype):
            raise RuntimeError(f"bias must be {weight.shape[0]} numbers as x has")
        x = weight.arranged(x).contiguous()
        out = x.new_empty((len(x), weight.shape[0]), dtype=out_dtype)
        operator(
            out, x, weight.packed, weight.scales, weight.minima, bias, weight.bits, weight.half
        )
        return out

    return product


def choose(
    device: torch.device,
    dtype: torch.dtype,
    rival: Product,
    *,
    library: Path = LIBRARY,
    timer: Timer | None = None,
) -> dict[int, Product]:
    """By number of rows, what to compute with instead of `rival`; logged with the reason."""
    if not library.exists():
        return {}
    timer = timer or _replayed_us
    counts = range(1, MAX_ROWS + 1)
    try:
        product = load(library)
        times = {rows: _compare(device, dtype, product, rival, rows, timer) for rows in counts}
    # Not of this torch or this device, or wrong on it: there is always Triton.
    except (OSError, RuntimeError) as error:
        logger.warning("Did not take %s, Triton multiplies: %s", library, error)
        return {}
    won = {rows: product for rows, (own, other) in times.items() if own < other}
    figures = (f"{rows}: {own:.0f} us, Triton {other:.0f}" for rows, (own, other) in times.items())
    logger.info(
        "Chose the CUDA kernel for products in groups of %s rows: %s",
        ", ".join(map(str, won)) or "no", "; ".join(figures),
    )  # fmt: skip
    return won


def _compare(
    device: torch.device,
    dtype: torch.dtype,
    product: Product,
    rival: Product,
    rows: int,
    timer: Timer,
) -> tuple[float, float]:
    """How long both take. Raises RuntimeError if they do not agree."""
    (outputs, inputs), groups = TRIED_SHAPE, TRIED_SHAPE[1] // TRIED_GROUP
    packed = torch.randint(-128, 128, (outputs, inputs // 2), dtype=torch.int8, device=device)
    scales = torch.rand((outputs, groups), device=device).half()
    weight = GroupedWeight(packed, scales, None, bits=4, half=64)
    x = torch.randn((rows, inputs), device=device).to(dtype)
    candidates = (product, rival)
    found, expected = (each(x, weight, None, dtype).float() for each in candidates)
    if not float((found - expected).abs().max() / expected.abs().max()) < MAX_ERROR:
        raise RuntimeError(f"its products of {rows} rows are not Triton's")
    own, other = (timer(functools.partial(each, x, weight, None, dtype)) for each in candidates)
    return own, other


def _replayed_us(work: Callable[[], object]) -> float:
    """Of one in a graph of several, so that nothing of the host's is timed."""
    for _ in range(WARM_UP):
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(ROUNDS):
            work()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]  # torch's
    graph.replay()
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e3 / ROUNDS
