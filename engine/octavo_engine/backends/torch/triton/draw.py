"""From logits to tokens on the device: the same tokens as csrc/cpu draws, bit for bit.

The rules are those of csrc/cpu/sampling.h. Masses are whole numbers (exp in units of 2^-42), so the
sums of many programs do not depend on their order. Four launches for a step:

  scan   each chunk's greatest logit, its id, and whether all are finite
  cut    per row, where top-k and top-p end: a logit and, among its equals, the last id
  weigh  each chunk's mass of what survives
  pick   per row, the chunk and then the token where the masses pass the random point

A float operation must not be fused with its neighbour, or the masses would differ from the CPU's:
every launch says `enable_fp_fusion=False`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor

    from octavo_engine.backends.torch.device_step import DrawParams


CHUNK = 2048


@triton.jit
def _mass(x, maximum, scale):
    """exp((x - maximum) * scale) in units of 2^-42, rounded to nearest, ties to even: int64."""
    t = (x - maximum) * scale
    t = tl.minimum(tl.where(t > -64.0, t, -64.0), 0.0)  # NaN and +inf, in rows that fail, too
    shifted = t * 1.44269504088896341 + 12582912.0  # 1.5 * 2^23: adding it rounds
    n = shifted - 12582912.0
    r = (t - n * 0.693359375) - n * -2.12194440e-4
    y = r * 1.9875691500e-4 + 1.3981999507e-3
    y = y * r + 8.3334519073e-3
    y = y * r + 4.1665795894e-2
    y = y * r + 1.6666665459e-1
    y = y * r + 5.0000001201e-1
    y = (y * (r * r) + r) + 1.0
    exponent = shifted.to(tl.int32, bitcast=True) - 0x4B400000
    units = y * ((exponent + (127 + 42)) << 23).to(tl.float32, bitcast=True)
    # From 2^23 on a float is whole anyway; below, adding 2^23 rounds.
    return tl.where(units < 8388608.0, (units + 8388608.0) - 8388608.0, units).to(tl.int64)


@triton.jit
def _ordered(x):
    """x as an integer whose order is that of x; both zeros are one."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _survives(x, ids, t, least, cut, last):
    key = _ordered(x)
    return (t >= least) & ((key > cut) | ((key == cut) & (ids <= last)))


@triton.jit
def scan_kernel(
    maxima,  # [S, chunks] f32
    places,  # [S, chunks] i32
    flaws,  # [S, chunks] i32: 1 if some logit is NaN or +inf
    logits,  # [S, vocab]
    vocab,
    CHUNK: tl.constexpr,
):
    row, chunk = tl.program_id(0), tl.program_id(1)
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
def cut_kernel(
    cuts,  # [S] i32: the least ordered logit that survives
    lasts,  # [S] i32: the last id that does, of those equal to it
    logits,
    maxima,
    targets,
    inverse_temperatures,
    leasts,
    top_ps,
    top_ks,
    vocab,
    num_chunks,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    row = tl.program_id(0)
    scale = tl.load(inverse_temperatures + row)
    least = tl.load(leasts + row)
    top_p = tl.load(top_ps + row)
    top_k = tl.load(top_ks + row)
    cut = tl.full([], -0x80000000, tl.int32)
    last = tl.full([], 0x7FFFFFFF, tl.int32)
    x_row = logits + row.to(tl.int64) * vocab
    chunks = tl.arange(0, CHUNKS)
    chunk_maxima = maxima + row * num_chunks
    maximum = tl.max(
        tl.load(chunk_maxima + chunks, mask=chunks < num_chunks, other=-float("inf")), 0
    )
    is_drawn = (scale > 0) & (tl.load(targets + row) < 0) & (maximum > -float("inf"))
    if is_drawn & (top_k > 0):
        found = _descend_by_count(x_row, chunk_maxima, maximum, scale, least, top_k, vocab,
                                  num_chunks, CHUNK)  # fmt: skip
        if found > -0x80000000:  # otherwise there are no more than top_k
            above = _count_from(x_row, chunk_maxima, maximum, scale, least, found + 1, vocab,
                                num_chunks, CHUNK)  # fmt: skip
            last = _nth_equal(x_row, chunk_maxima, found, top_k - above, vocab, num_chunks, CHUNK)
            cut = found
    if is_drawn & (top_p < 1):
        total = _mass_from(x_row, chunk_maxima, maximum, scale, least, cut, cut, last, vocab,
                           num_chunks, CHUNK)  # fmt: skip
        share = tl.ceil(top_p.to(tl.float64) * total.to(tl.float64)).to(tl.int64)
        share = tl.minimum(tl.maximum(share, 1), total)
        low, high = cut.to(tl.int64), _ordered(maximum).to(tl.int64)
        while low < high:
            middle = low + (high - low + 1) // 2
            mass = _mass_from(x_row, chunk_maxima, maximum, scale, least, middle.to(tl.int32),
                              cut, last, vocab, num_chunks, CHUNK)  # fmt: skip
            if mass >= share:
                low = middle
            else:
                high = middle - 1
        found = low.to(tl.int32)
        above = tl.zeros([], tl.int64)
        if found < _ordered(maximum):
            above = _mass_from(x_row, chunk_maxima, maximum, scale, least, found + 1, cut, last,
                               vocab, num_chunks, CHUNK)  # fmt: skip
        bits = tl.where(found < 0, found ^ 0x7FFFFFFF, found)
        each = tl.maximum(_mass(bits.to(tl.float32, bitcast=True), maximum, scale), 1)
        num_equal = (share - above + each - 1) // each
        nth = _nth_equal(x_row, chunk_maxima, found, num_equal.to(tl.int32), vocab, num_chunks,
                         CHUNK)  # fmt: skip
        last = tl.where(found == cut, tl.minimum(last, nth), nth)
        cut = found
    tl.store(cuts + row, cut)
    tl.store(lasts + row, last)


@triton.jit
def _count_from(
    x_row,
    chunk_maxima,
    maximum,
    scale,
    least,
    low,
    vocab,
    num_chunks,
    CHUNK: tl.constexpr,
):
    """How many candidates have an ordered logit of at least `low`."""
    counts = tl.zeros([CHUNK], tl.int32)
    for chunk in range(num_chunks):
        if _ordered(tl.load(chunk_maxima + chunk)) >= low:
            ids = chunk * CHUNK + tl.arange(0, CHUNK)
            x = tl.load(x_row + ids, mask=ids < vocab, other=-float("inf"))
            is_in = ((x - maximum) * scale >= least) & (_ordered(x) >= low)
            counts += (is_in & (ids < vocab)).to(tl.int32)
    return tl.sum(counts, 0)


@triton.jit
def _descend_by_count(
    x_row,
    chunk_maxima,
    maximum,
    scale,
    least,
    wanted,
    vocab,
    num_chunks,
    CHUNK: tl.constexpr,
):
    """The greatest ordered logit that `wanted` candidates reach; the lowest int if none is."""
    low, high = tl.full([], -0x80000000, tl.int64), _ordered(maximum).to(tl.int64)
    while low < high:
        middle = low + (high - low + 1) // 2
        count = _count_from(x_row, chunk_maxima, maximum, scale, least, middle.to(tl.int32), vocab,
                            num_chunks, CHUNK)  # fmt: skip
        if count >= wanted:
            low = middle
        else:
            high = middle - 1
    return low.to(tl.int32)


@triton.jit
def _mass_from(
    x_row,
    chunk_maxima,
    maximum,
    scale,
    least,
    low,
    cut,
    last,
    vocab,
    num_chunks,
    CHUNK: tl.constexpr,
):
    """The mass of those survivors of `cut` whose ordered logit is at least `low`."""
    sums = tl.zeros([CHUNK], tl.int64)
    for chunk in range(num_chunks):
        if _ordered(tl.load(chunk_maxima + chunk)) >= low:
            ids = chunk * CHUNK + tl.arange(0, CHUNK)
            x = tl.load(x_row + ids, mask=ids < vocab, other=-float("inf"))
            t = (x - maximum) * scale
            is_in = _survives(x, ids, t, least, cut, last) & (_ordered(x) >= low)
            sums += tl.where(is_in & (ids < vocab), _mass(x, maximum, scale), 0)
    return tl.sum(sums, 0)


@triton.jit
def _nth_equal(
    x_row,
    chunk_maxima,
    key,
    n,
    vocab,
    num_chunks,
    CHUNK: tl.constexpr,
):
    """The id of the n-th logit, by ascending id, whose order is `key`."""
    found = tl.full([], 0x7FFFFFFF, tl.int32)
    seen = tl.zeros([], tl.int32)
    for chunk in range(num_chunks):
        if (seen < n) & (_ordered(tl.load(chunk_maxima + chunk)) >= key):
            ids = chunk * CHUNK + tl.arange(0, CHUNK)
            x = tl.load(x_row + ids, mask=ids < vocab, other=-float("inf"))
            is_equal = ((_ordered(x) == key) & (ids < vocab)).to(tl.int32)
            ranks = seen + tl.cumsum(is_equal, 0)
            at = tl.min(tl.where((is_equal > 0) & (ranks == n), ids, 0x7FFFFFFF), 0)
            found = tl.minimum(found, at)
            seen += tl.sum(is_equal, 0)
    return found


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
    chunks = tl.arange(0, CHUNKS)
    row_maxima = tl.load(
        maxima + row * num_chunks + chunks, mask=chunks < num_chunks, other=-float("inf")
    )
    maximum = tl.max(row_maxima, 0)
    if (scale > 0) & (maximum > -float("inf")):
        ids = chunk * CHUNK + tl.arange(0, CHUNK)
        x = tl.load(logits + row.to(tl.int64) * vocab + ids, mask=ids < vocab, other=-float("inf"))
        t = (x - maximum) * scale
        least, cut, last = tl.load(leasts + row), tl.load(cuts + row), tl.load(lasts + row)
        is_in = _survives(x, ids, t, least, cut, last) & (ids < vocab)
        mass = tl.where(is_in, _mass(x, maximum, scale), 0)
        tl.store(masses + row * num_chunks + chunk, tl.sum(mass, 0))


@triton.jit
def pick_kernel(
    results,  # [2, S] i32: tokens, then statuses
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
        is_in = _survives(x, ids, t, least, cut, last) & (ids < vocab)
        mass = tl.where(is_in, _mass(x, maximum, scale), 0)
        token = chunk * CHUNK + tl.sum((tl.cumsum(mass, 0) <= point).to(tl.int32), 0)
    token = tl.where(target >= 0, target, token)
    token = tl.where(is_flawed | is_banned, -1, token)
    tl.store(results + row, token)
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
    cuts, lasts = logits.new_empty((2, num_rows), dtype=torch.int32).unbind()
    common = {"CHUNK": CHUNK, "CHUNKS": triton.next_power_of_2(num_chunks)}
    options = {"num_warps": 8, "enable_fp_fusion": False}
    scan_kernel[per_chunk](maxima, places, flaws, logits, vocab, CHUNK=CHUNK, **options)
    cut_kernel[(num_rows,)](
        cuts, lasts, logits, maxima, params.targets, params.inverse_temperatures, params.leasts,
        params.top_ps, params.top_ks, vocab, num_chunks, **common, **options,
    )  # fmt: skip
    weigh_kernel[per_chunk](
        masses, logits, maxima, cuts, lasts, params.inverse_temperatures, params.leasts, vocab,
        **common, **options,
    )  # fmt: skip
    pick_kernel[(num_rows,)](
        results, logits, maxima, places, flaws, masses, cuts, lasts, params.seeds,
        params.positions, params.targets, params.inverse_temperatures, params.leasts,
        vocab, num_chunks, **common, **options,
    )  # fmt: skip
    return results
