"""From logits to tokens on the device: the same tokens as csrc/cpu draws, bit for bit.

The rules are those of csrc/cpu/sampling.h. Masses are whole numbers (exp in units of 2^-42), so the
sums of many programs do not depend on their order. A step is a few launches:

  scan   each chunk's greatest logit, its id, and whether all are finite
  …      per row, where top-k and top-p end (`cut.py`)
  weigh  each chunk's mass of what survives
  pick   per row, the chunk and then the token where the masses pass the random point; the token is
         kept where a step that is launched before it has arrived will look for it

A float operation must not be fused with its neighbour, or the masses would differ from the CPU's:
every launch says `enable_fp_fusion=False`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from octavo_engine.backends.torch.triton.cut import Cuts, find_cuts, row_maximum
from octavo_engine.backends.torch.triton.masses import mass_of, survives

if TYPE_CHECKING:
    from torch import Tensor

    from octavo_engine.backends.torch.device_step import DrawParams


CHUNK = 2048


@triton.jit
def scan_kernel(
    maxima,  # [S, chunks] f32
    places,  # [S, chunks] i32
    flaws,  # [S, chunks] i32: 1 if some logit is NaN or +inf
    bins,  # [S, BINS] i64: each chunk clears its own
    counts,  # [S] i32: cleared
    logits,  # [S, vocab]
    vocab,
    CHUNK: tl.constexpr,
    BINS: tl.constexpr,
    OWN_BINS: tl.constexpr,
):
    row, chunk = tl.program_id(0), tl.program_id(1)
    own_bins = chunk * OWN_BINS + tl.arange(0, OWN_BINS)
    nothing = tl.zeros([OWN_BINS], tl.int64)
    tl.store(bins + row * BINS + own_bins, nothing, mask=own_bins < BINS)
    if chunk == 0:
        tl.store(counts + row, 0)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + row.to(tl.int64) * vocab + ids, mask=ids < vocab, other=-float("inf"))
    is_flawed = (x != x) | (x == float("inf"))
    x = tl.where(is_flawed, -float("inf"), x)
    maximum = tl.max(x, 0)
    place = row * tl.num_programs(1) + chunk
    tl.store(maxima + place, maximum)
    tl.store(places + place, tl.min(tl.where(x == maximum, ids, vocab), 0))
    tl.store(flaws + place, tl.max(is_flawed.to(tl.int32), 0))


@triton.jit
def weigh_kernel(
    masses,  # [S, chunks] i64
    logits,
    maxima,
    cuts,
    lasts,
    inverse_temperatures,
    leasts,
    vocab,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    row, chunk = tl.program_id(0), tl.program_id(1)
    num_chunks = tl.num_programs(1)
    scale = tl.load(inverse_temperatures + row)
    maximum = row_maximum(maxima, row, num_chunks, CHUNKS)
    if (scale > 0) & (maximum > -float("inf")):
        ids = chunk * CHUNK + tl.arange(0, CHUNK)
        x = tl.load(logits + row.to(tl.int64) * vocab + ids, mask=ids < vocab, other=-float("inf"))
        t = (x - maximum) * scale
        least, cut, last = tl.load(leasts + row), tl.load(cuts + row), tl.load(lasts + row)
        is_in = survives(x, ids, t, least, cut, last) & (ids < vocab)
        mass = tl.where(is_in, mass_of(x, maximum, scale), 0)
        tl.store(masses + row * num_chunks + chunk, tl.sum(mass, 0))


@triton.jit
def pick_kernel(
    results,  # [2, S] i32: tokens, then statuses
    kept,  # i32: a word for each that may await its token
    kept_at,  # [S] i32: which word
    logits,
    maxima,
    places,
    flaws,
    masses,
    cuts,
    lasts,
    seeds,  # [2, S] i32: low words, then high words
    positions,
    targets,
    inverse_temperatures,
    leasts,
    vocab,
    num_chunks,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    row, num_rows = tl.program_id(0), tl.num_programs(0)
    chunks = tl.arange(0, CHUNKS)
    chunk_ok = chunks < num_chunks
    of_row = row * num_chunks + chunks
    row_maxima = tl.load(maxima + of_row, mask=chunk_ok, other=-float("inf"))
    maximum = tl.max(row_maxima, 0)
    is_flawed = tl.max(tl.load(flaws + of_row, mask=chunk_ok, other=0), 0) > 0
    row_places = tl.load(places + of_row, mask=chunk_ok, other=0x7FFFFFFF)
    token = tl.min(tl.where(row_maxima == maximum, row_places, 0x7FFFFFFF), 0)
    scale = tl.load(inverse_temperatures + row)
    target = tl.load(targets + row)
    is_banned = maximum == -float("inf")
    if (scale > 0) & (target < 0) & (not is_flawed) & (not is_banned):
        row_masses = tl.load(masses + of_row, mask=chunk_ok, other=0)
        ends = tl.cumsum(row_masses, 0)
        total = tl.sum(row_masses, 0)
        seed_low = tl.load(seeds + row).to(tl.uint32, bitcast=True).to(tl.uint64)
        seed_high = tl.load(seeds + num_rows + row).to(tl.uint32, bitcast=True).to(tl.uint64)
        counter = tl.load(positions + row).to(tl.uint32, bitcast=True)
        zero = counter ^ counter
        low, high, _, _ = tl.philox(seed_high << 32 | seed_low, counter, zero, zero, zero)
        random = high.to(tl.uint64) << 32 | low.to(tl.uint64)
        point = tl.umulhi(random, total.to(tl.uint64)).to(tl.int64)
        chunk = tl.sum((ends <= point).to(tl.int32), 0)
        point -= tl.sum(tl.where(chunks < chunk, row_masses, 0), 0)
        ids = chunk * CHUNK + tl.arange(0, CHUNK)
        x = tl.load(logits + row.to(tl.int64) * vocab + ids, mask=ids < vocab, other=-float("inf"))
        t = (x - maximum) * scale
        least, cut, last = tl.load(leasts + row), tl.load(cuts + row), tl.load(lasts + row)
        is_in = survives(x, ids, t, least, cut, last) & (ids < vocab)
        mass = tl.where(is_in, mass_of(x, maximum, scale), 0)
        token = chunk * CHUNK + tl.sum((tl.cumsum(mass, 0) <= point).to(tl.int32), 0)
    token = tl.where(target >= 0, target, token)
    token = tl.where(is_flawed | is_banned, -1, token)
    tl.store(results + row, token)
    # What has no token failed; whatever awaits it is dropped, but reads the embedding first.
    tl.store(kept + tl.load(kept_at + row), tl.maximum(token, 0))
    tl.store(results + num_rows + row, tl.where(is_flawed, 1, tl.where(is_banned, 2, 0)))


def draw(logits: Tensor, params: DrawParams) -> Tensor:
    """Tokens and statuses, [2, S] int32. Leaves the logits [S, vocabulary] alone."""
    num_rows, vocab = logits.shape
    results = logits.new_empty((2, num_rows), dtype=torch.int32)
    if num_rows == 0:
        return results
    num_chunks = triton.cdiv(vocab, CHUNK)
    per_chunk = (num_rows, num_chunks)
    maxima = logits.new_empty(per_chunk)
    places = logits.new_empty(per_chunk, dtype=torch.int32)
    flaws = logits.new_empty(per_chunk, dtype=torch.int32)
    masses = logits.new_empty(per_chunk, dtype=torch.int64)
    cuts = Cuts.empty(logits)
    chunks = triton.next_power_of_2(num_chunks)
    common = {"CHUNK": CHUNK, "CHUNKS": chunks, "num_warps": 8, "enable_fp_fusion": False}
    num_bins = cuts.bins.shape[1]
    scan_kernel[per_chunk](
        maxima, places, flaws, cuts.bins, cuts.counts, logits, vocab, CHUNK=CHUNK, BINS=num_bins,
        OWN_BINS=triton.next_power_of_2(triton.cdiv(num_bins, num_chunks)),
        num_warps=8, enable_fp_fusion=False,
    )  # fmt: skip
    find_cuts(cuts, logits, maxima, params, CHUNK, chunks)
    weigh_kernel[per_chunk](
        masses, logits, maxima, cuts.keys, cuts.lasts, params.inverse_temperatures, params.leasts,
        vocab, **common,
    )  # fmt: skip
    pick_kernel[(num_rows,)](
        results, params.kept, params.kept_at, logits, maxima, places, flaws, masses, cuts.keys,
        cuts.lasts, params.seeds, params.positions, params.targets, params.inverse_temperatures,
        params.leasts, vocab, num_chunks, **common,
    )  # fmt: skip
    return results
