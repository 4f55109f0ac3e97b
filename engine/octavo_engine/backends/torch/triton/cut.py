"""Where top-k and top-p end a row: a logit and, among its equals, the last id that survives.

A row is looked at twice, by as many programs as it has chunks, and then only its edge:

  bins    candidates by their distance from the greatest logit, in bins of equal width: how many
          where top-k is requested, how much mass where top-p alone is
  edge    per row, the bin in which the end lies
  gather  the candidates that may be the end: those of that bin, and for top-k all above it
  cut     per row, the end among them, by bisection

Bins are whole numbers, so sums do not depend on the order of programs. A row whose edge holds more
than there is room for, such as one of equal logits, is searched whole: slower, and the same end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl

from octavo_engine.backends.torch.triton.masses import mass_of, ordered, survives

if TYPE_CHECKING:
    from torch import Tensor

    from octavo_engine.backends.torch.device_step import DrawParams

BINS = 4096  # over 32 of scaled logits, beyond which nothing is a candidate
ROOM = 2048  # candidates of a row's edge
PIECE = 2048  # that are looked at together
ALIGNMENT = 16  # words


class Cuts(NamedTuple):
    """Of each row; and what finding them takes."""

    keys: Tensor  # [S] int32: the least ordered logit that survives
    lasts: Tensor  # [S] int32: the last id that does, of those equal to it
    bins: Tensor  # [S, BINS] int64, zeros at first
    counts: Tensor  # [S] int32: candidates of the edge, zeros at first

    @classmethod
    def empty(cls, logits: Tensor) -> Cuts:
        keys, lasts, counts = _columns(logits, 3, torch.int32)
        return cls(keys, lasts, logits.new_empty((len(logits), BINS), dtype=torch.int64), counts)


def _columns(like: Tensor, count: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Of `like`'s length each. All of them begin at multiples of 64 bytes, however many rows there
    are: Triton compiles a kernel anew for each pattern of aligned and unaligned arguments."""
    num_rows = len(like)
    room = -(-num_rows // ALIGNMENT) * ALIGNMENT
    return like.new_empty((count, room), dtype=dtype)[:, :num_rows].unbind()


@triton.jit
def row_maximum(maxima, row, num_chunks, CHUNKS: tl.constexpr):
    chunks = tl.arange(0, CHUNKS)
    found = tl.load(
        maxima + row * num_chunks + chunks, mask=chunks < num_chunks, other=-float("inf")
    )
    return tl.max(found, 0)


@triton.jit
def _is_cut(scale, target, maximum, top_p, top_k):
    is_drawn = (scale > 0) & (target < 0) & (maximum > -float("inf"))
    return is_drawn & ((top_k > 0) | (top_p < 1))


@triton.jit
def _bin_of(t, BINS: tl.constexpr):
    """Never decreases from a logit to a smaller one."""
    return tl.minimum(tl.maximum(t * (-BINS / 32.0), 0.0), BINS - 1.0).to(tl.int32)


@triton.jit
def _share(top_p, total):
    share = tl.ceil(top_p.to(tl.float64) * total.to(tl.float64)).to(tl.int64)
    return tl.minimum(tl.maximum(share, 1), total)


@triton.jit
def bins_kernel(
    bins,
    logits,
    maxima,
    targets,
    inverse_temperatures,
    leasts,
    top_ps,
    top_ks,
    vocab,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    BINS: tl.constexpr,
):
    row, chunk = tl.program_id(0), tl.program_id(1)
    scale = tl.load(inverse_temperatures + row)
    top_p, top_k = tl.load(top_ps + row), tl.load(top_ks + row)
    maximum = row_maximum(maxima, row, tl.num_programs(1), CHUNKS)
    if _is_cut(scale, tl.load(targets + row), maximum, top_p, top_k):
        ids = chunk * CHUNK + tl.arange(0, CHUNK)
        x = tl.load(logits + row.to(tl.int64) * vocab + ids, mask=ids < vocab, other=-float("inf"))
        t = (x - maximum) * scale
        is_in = (t >= tl.load(leasts + row)) & (ids < vocab)
        weight = mass_of(x, maximum, scale)
        if top_k > 0:
            weight = weight * 0 + 1
        tl.atomic_add(bins + row * BINS + _bin_of(t, BINS), weight, mask=is_in, sem="relaxed")


@triton.jit
def edge_kernel(
    edges,  # [S] i32: the bin
    befores,  # [S] i64: what lies in bins before it
    totals,  # [S] i64: what lies in all
    bins,
    maxima,
    targets,
    inverse_temperatures,
    top_ps,
    top_ks,
    num_chunks,
    CHUNKS: tl.constexpr,
    BINS: tl.constexpr,
):
    row = tl.program_id(0)
    top_p, top_k = tl.load(top_ps + row), tl.load(top_ks + row)
    scale = tl.load(inverse_temperatures + row)
    maximum = row_maximum(maxima, row, num_chunks, CHUNKS)
    if _is_cut(scale, tl.load(targets + row), maximum, top_p, top_k):
        places = tl.arange(0, BINS)
        values = tl.load(bins + row * BINS + places)
        total = tl.sum(values, 0)
        wanted = top_k.to(tl.int64)
        if top_k <= 0:
            wanted = _share(top_p, total)
        edge = tl.sum((tl.cumsum(values, 0) < wanted).to(tl.int32), 0)
        tl.store(edges + row, edge)
        tl.store(befores + row, tl.sum(tl.where(places < edge, values, 0), 0))
        tl.store(totals + row, total)


@triton.jit
def gather_kernel(
    found,  # [S, ROOM] f32: logits
    found_ids,  # [S, ROOM] i32
    counts,
    logits,
    maxima,
    edges,
    targets,
    inverse_temperatures,
    leasts,
    top_ps,
    top_ks,
    vocab,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    BINS: tl.constexpr,
    ROOM: tl.constexpr,
):
    row, chunk = tl.program_id(0), tl.program_id(1)
    scale, least = tl.load(inverse_temperatures + row), tl.load(leasts + row)
    top_p, top_k = tl.load(top_ps + row), tl.load(top_ks + row)
    maximum = row_maximum(maxima, row, tl.num_programs(1), CHUNKS)
    if _is_cut(scale, tl.load(targets + row), maximum, top_p, top_k):
        edge = tl.load(edges + row)
        own = tl.load(maxima + row * tl.num_programs(1) + chunk)
        if _bin_of((own - maximum) * scale, BINS) <= edge:
            ids = chunk * CHUNK + tl.arange(0, CHUNK)
            x = tl.load(
                logits + row.to(tl.int64) * vocab + ids, mask=ids < vocab, other=-float("inf")
            )
            t = (x - maximum) * scale
            place = _bin_of(t, BINS)
            is_in = (t >= least) & (ids < vocab) & (place <= edge)
            if top_k <= 0:
                is_in = is_in & (place == edge)
            ranks = tl.cumsum(is_in.to(tl.int32), 0)
            first = tl.atomic_add(counts + row, tl.max(ranks, 0), sem="relaxed")
            at = first + ranks - 1
            is_in = is_in & (at < ROOM)
            tl.store(found + row * ROOM + at, x, mask=is_in)
            tl.store(found_ids + row * ROOM + at, ids, mask=is_in)


@triton.jit
def cut_kernel(
    cuts,
    lasts,
    logits,
    maxima,
    found,
    found_ids,
    counts,
    befores,
    totals,
    targets,
    inverse_temperatures,
    leasts,
    top_ps,
    top_ks,
    vocab,
    num_chunks,
    CHUNKS: tl.constexpr,
    ROOM: tl.constexpr,
    PIECE: tl.constexpr,
):
    row = tl.program_id(0)
    scale, least = tl.load(inverse_temperatures + row), tl.load(leasts + row)
    top_p, top_k = tl.load(top_ps + row), tl.load(top_ks + row)
    cut = tl.full([], -0x80000000, tl.int32)
    last = tl.full([], 0x7FFFFFFF, tl.int32)
    maximum = row_maximum(maxima, row, num_chunks, CHUNKS)
    if _is_cut(scale, tl.load(targets + row), maximum, top_p, top_k):
        count = tl.load(counts + row)
        is_whole = count > ROOM
        values, ids = found + row * ROOM, found_ids + row * ROOM
        before = tl.load(befores + row)
        if is_whole:
            values, count = logits + row.to(tl.int64) * vocab, count * 0 + vocab
        if is_whole | (top_k > 0):
            before = before * 0
        lowest, highest = _span(values, ids, count, is_whole, maximum, scale, least, PIECE)
        if top_k > 0:
            reached = _count_from(values, ids, count, is_whole, maximum, scale, least, lowest,
                                  PIECE)  # fmt: skip
            if reached >= top_k:  # otherwise all of them survive
                key = _descend_by_count(values, ids, count, is_whole, maximum, scale, least, top_k,
                                        lowest, highest, PIECE)  # fmt: skip
                above = _count_from(values, ids, count, is_whole, maximum, scale, least, key + 1,
                                    PIECE)  # fmt: skip
                last = _nth_equal(values, ids, count, is_whole, key, top_k - above, vocab, PIECE)
                cut = key
        if top_p < 1:
            total = tl.load(totals + row)
            if top_k > 0:
                total = _mass_from(values, ids, count, is_whole, maximum, scale, least, cut, cut,
                                   last, PIECE)  # fmt: skip
            share = _share(top_p, total) - before
            key = _descend_by_mass(values, ids, count, is_whole, maximum, scale, least, share,
                                   tl.maximum(lowest, cut), highest, cut, last, PIECE)  # fmt: skip
            above = tl.zeros([], tl.int64)
            if key < highest:
                above = _mass_from(values, ids, count, is_whole, maximum, scale, least, key + 1,
                                   cut, last, PIECE)  # fmt: skip
            bits = tl.where(key < 0, key ^ 0x7FFFFFFF, key)
            each = tl.maximum(mass_of(bits.to(tl.float32, bitcast=True), maximum, scale), 1)
            num_equal = (share - above + each - 1) // each
            nth = _nth_equal(values, ids, count, is_whole, key, num_equal.to(tl.int32), vocab,
                             PIECE)  # fmt: skip
            last = tl.where(key == cut, tl.minimum(last, nth), nth)
            cut = key
    tl.store(cuts + row, cut)
    tl.store(lasts + row, last)


@triton.jit
def _load_piece(values, ids, first, count, is_whole, PIECE: tl.constexpr):
    """Logits and ids of a list, or of a whole row."""
    places = first + tl.arange(0, PIECE)
    x = tl.load(values + places, mask=places < count, other=-float("inf"))
    listed = tl.load(ids + places, mask=(places < count) & (not is_whole), other=0)
    return x, tl.where(is_whole, places, listed), places < count


@triton.jit
def _span(values, ids, count, is_whole, maximum, scale, least, PIECE: tl.constexpr):
    """The least and the greatest ordered logit of a candidate."""
    lowest = tl.full([PIECE], 0x7FFFFFFF, tl.int32)
    highest = tl.full([PIECE], -0x80000000, tl.int32)
    for first in range(0, count, PIECE):
        x, _, is_there = _load_piece(values, ids, first, count, is_whole, PIECE)
        is_in = ((x - maximum) * scale >= least) & is_there
        lowest = tl.where(is_in, tl.minimum(lowest, ordered(x)), lowest)
        highest = tl.where(is_in, tl.maximum(highest, ordered(x)), highest)
    return tl.min(lowest, 0), tl.max(highest, 0)


@triton.jit
def _count_from(
    values,
    ids,
    count,
    is_whole,
    maximum,
    scale,
    least,
    low,
    PIECE: tl.constexpr,
):
    """How many candidates have an ordered logit of at least `low`."""
    counts = tl.zeros([PIECE], tl.int32)
    for first in range(0, count, PIECE):
        x, _, is_there = _load_piece(values, ids, first, count, is_whole, PIECE)
        is_in = ((x - maximum) * scale >= least) & (ordered(x) >= low)
        counts += (is_in & is_there).to(tl.int32)
    return tl.sum(counts, 0)


@triton.jit
def _descend_by_count(
    values,
    ids,
    count,
    is_whole,
    maximum,
    scale,
    least,
    wanted,
    lowest,
    highest,
    PIECE: tl.constexpr,
):
    """The greatest ordered logit that `wanted` candidates reach; `lowest` they do."""
    low, high = lowest.to(tl.int64), highest.to(tl.int64)
    while low < high:
        middle = low + (high - low + 1) // 2
        reached = _count_from(values, ids, count, is_whole, maximum, scale, least,
                              middle.to(tl.int32), PIECE)  # fmt: skip
        if reached >= wanted:
            low = middle
        else:
            high = middle - 1
    return low.to(tl.int32)


@triton.jit
def _mass_from(
    values,
    ids,
    count,
    is_whole,
    maximum,
    scale,
    least,
    low,
    cut,
    last,
    PIECE: tl.constexpr,
):
    """The mass of those survivors of `cut` whose ordered logit is at least `low`."""
    sums = tl.zeros([PIECE], tl.int64)
    for first in range(0, count, PIECE):
        x, own, is_there = _load_piece(values, ids, first, count, is_whole, PIECE)
        t = (x - maximum) * scale
        is_in = survives(x, own, t, least, cut, last) & (ordered(x) >= low)
        sums += tl.where(is_in & is_there, mass_of(x, maximum, scale), 0)
    return tl.sum(sums, 0)


@triton.jit
def _descend_by_mass(
    values,
    ids,
    count,
    is_whole,
    maximum,
    scale,
    least,
    wanted,
    lowest,
    highest,
    cut,
    last,
    PIECE: tl.constexpr,
):
    """The greatest ordered logit down to which survivors of `cut` weigh `wanted`; down to `lowest`
    they do."""
    low, high = lowest.to(tl.int64), highest.to(tl.int64)
    while low < high:
        middle = low + (high - low + 1) // 2
        reached = _mass_from(values, ids, count, is_whole, maximum, scale, least,
                             middle.to(tl.int32), cut, last, PIECE)  # fmt: skip
        if reached >= wanted:
            low = middle
        else:
            high = middle - 1
    return low.to(tl.int32)


@triton.jit
def _nth_equal(
    values,
    ids,
    count,
    is_whole,
    key,
    n,
    vocab,
    PIECE: tl.constexpr,
):
    """The id of the n-th logit, by ascending id, whose order is `key`."""
    low, high = tl.zeros([], tl.int32), vocab - 1
    while low < high:
        middle = low + (high - low) // 2
        counts = tl.zeros([PIECE], tl.int32)
        for first in range(0, count, PIECE):
            x, own, is_there = _load_piece(values, ids, first, count, is_whole, PIECE)
            counts += ((ordered(x) == key) & (own <= middle) & is_there).to(tl.int32)
        if tl.sum(counts, 0) >= n:
            high = middle
        else:
            low = middle + 1
    return low


def find_cuts(
    cuts: Cuts, logits: Tensor, maxima: Tensor, params: DrawParams, chunk: int, chunks: int
) -> None:
    """Fill `keys` and `lasts`. `maxima` [S, chunks] are those of chunks of `chunk` logits."""
    num_rows, num_chunks = maxima.shape
    vocab = logits.shape[1]
    edges = torch.empty_like(cuts.keys)
    befores, totals = _columns(logits, 2, torch.int64)
    found = logits.new_empty((num_rows, ROOM))
    found_ids = torch.empty_like(found, dtype=torch.int32)
    cutoffs = {
        "targets": params.targets,
        "inverse_temperatures": params.inverse_temperatures,
        "top_ps": params.top_ps,
        "top_ks": params.top_ks,
    }
    options = {"num_warps": 8, "enable_fp_fusion": False}
    bins_kernel[(num_rows, num_chunks)](
        cuts.bins, logits, maxima, leasts=params.leasts, vocab=vocab,
        CHUNK=chunk, CHUNKS=chunks, BINS=BINS, **cutoffs, **options,
    )  # fmt: skip
    edge_kernel[(num_rows,)](
        edges, befores, totals, cuts.bins, maxima, num_chunks=num_chunks,
        CHUNKS=chunks, BINS=BINS, **cutoffs, **options,
    )  # fmt: skip
    gather_kernel[(num_rows, num_chunks)](
        found, found_ids, cuts.counts, logits, maxima, edges, leasts=params.leasts, vocab=vocab,
        CHUNK=chunk, CHUNKS=chunks, BINS=BINS, ROOM=ROOM, **cutoffs, **options,
    )  # fmt: skip
    cut_kernel[(num_rows,)](
        cuts.keys, cuts.lasts, logits, maxima, found, found_ids, cuts.counts, befores, totals,
        leasts=params.leasts, vocab=vocab, num_chunks=num_chunks,
        CHUNKS=chunks, ROOM=ROOM, PIECE=PIECE, **cutoffs, **options,
    )  # fmt: skip
