"""Attention of long prompts, whose keys and values are first laid side by side.

Pages of 16 tokens are read by computed addresses; rows that lie side by side by the copy engine,
whole blocks at a time, which leaves registers and issue slots to the products. For a thousand
tokens and more that is worth gathering the pages of the whole context.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from octavo_engine.backends.torch.triton.attention import LOG2_E
from octavo_engine.config import BLOCK_SIZE

if TYPE_CHECKING:
    from torch import Tensor

    from octavo_engine.backends.torch.device_step import DeviceStep
    from octavo_engine.backends.torch.operands import LayerKV
    from octavo_engine.ops import AttentionSpec

MIN_TOKENS = 1024  # of a prompt; fewer are not worth gathering their context
GATHERED_BYTES = 256 << 20  # that a context's keys and values may take; longer ones stay in pages
# Blocks of rows and of tokens looked at, and a launch that lets two programs share a
# multiprocessor: while one weighs, another multiplies.
BLOCK_M, BLOCK_N, NUM_WARPS, NUM_STAGES = 64, 64, 4, 3
NEVER = -1.0e30  # a score that weighs nothing; not infinite, so that no row subtracts two of them


class Long(NamedTuple):
    """A sequence whose prompt is attended to here."""

    place: int  # in the step
    first: int  # of its tokens in the step
    end: int
    seq_len: int

    @property
    def num_tokens(self) -> int:
        return self.end - self.first


def find_long(step: DeviceStep, spec: AttentionSpec, itemsize: int) -> list[Long]:
    """The step's sequences that this is for, in their order."""
    host = step.host
    unusual = (spec.window, spec.soft_cap, spec.sinks, spec.alibi)
    if host is None or any(part is not None for part in unusual):
        return []
    if spec.head_dim not in (64, 128) or spec.num_heads // spec.num_kv_heads > BLOCK_M:
        return []
    token_bytes = 2 * spec.num_kv_heads * spec.head_dim * itemsize
    starts, lengths = host.seq_starts.tolist(), host.seq_lens.tolist()
    return [
        Long(index, starts[index], starts[index + 1], length)
        for index, length in enumerate(lengths)
        if starts[index + 1] - starts[index] >= MIN_TOKENS
        and length * token_bytes <= GATHERED_BYTES
    ]


def tiles_of_others(step: DeviceStep, sequences: list[Long], tokens_per_tile: int) -> list[range]:
    """The step's tiles that belong to other sequences, in runs."""
    assert step.host is not None, "lengths are looked at on the host"
    ends = [0, *np.cumsum(-(-np.diff(step.host.seq_starts) // tokens_per_tile)).tolist()]
    indices = [-1, *(sequence.place for sequence in sequences), len(ends) - 1]
    runs = [range(ends[a + 1], ends[b]) for a, b in itertools.pairwise(indices)]
    return [run for run in runs if run]


def gathered_bytes(*, max_seq_len: int, num_kv_heads: int, head_dim: int, itemsize: int) -> int:
    """The most that the gathered context of a sequence takes."""
    return min(GATHERED_BYTES, 2 * (max_seq_len + BLOCK_SIZE) * num_kv_heads * head_dim * itemsize)


@triton.jit
def look_along(
    maxima,
    sums,
    acc,
    q_rows,  # [BLOCK_M, HEAD_DIM]
    k_rows,  # descriptors of [tokens, kv heads * HEAD_DIM]
    v_rows,
    start,
    stop,
    positions,  # [BLOCK_M]: the last token that each row sees
    kv_head,
    score_scale,
    HEAD_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    IS_MASKED: tl.constexpr,
    NEVER: tl.constexpr,
):
    """The running maximum, sum and average of values, after the tokens [start, stop)."""
    for n in range(start, stop, BLOCK_N):
        k = k_rows.load([n, kv_head * HEAD_DIM])
        scores = tl.dot(q_rows, k.T)
        if IS_MASKED:
            columns = n + tl.arange(0, BLOCK_N)
            scores = tl.where(columns[None, :] <= positions[:, None], scores, NEVER)
        new_maxima = tl.maximum(maxima, tl.max(scores, 1) * score_scale)
        weights = tl.exp2(scores * score_scale - new_maxima[:, None])
        fade = tl.exp2(maxima - new_maxima)
        sums = sums * fade + tl.sum(weights, 1)
        acc = acc * fade[:, None]
        v = v_rows.load([n, kv_head * HEAD_DIM])  # beyond the context: zeros
        acc = tl.dot(weights.to(v.dtype), v, acc)
        maxima = new_maxima
    return maxima, sums, acc


@triton.jit(do_not_specialize=["count", "seq_len"])
def prompt_kernel(
    out,  # [count, num_heads * HEAD_DIM]
    q,
    k_rows,
    v_rows,
    count,
    seq_len,
    score_scale,  # scale, times log2(e)
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NEVER: tl.constexpr,
):
    # The last tiles of a prompt look at the most tokens, so they begin first.
    place = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    num_heads = tl.num_programs(1) * GROUP
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    first = place * BLOCK_Q
    context = seq_len - count
    rows = tl.arange(0, BLOCK_M)
    tokens = first + rows // GROUP
    heads = kv_head * GROUP + rows % GROUP
    mask = ((rows < BLOCK_Q * GROUP) & (tokens < count))[:, None]
    offsets = (tokens.to(tl.int64) * num_heads + heads)[:, None] * HEAD_DIM
    offsets += tl.arange(0, HEAD_DIM)[None, :]
    q_rows = tl.load(q + offsets, mask=mask, other=0.0)
    maxima = tl.full([BLOCK_M], NEVER, tl.float32)
    sums = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    # Blocks that every row of the tile sees whole need no masks.
    whole = (context + first + 1) // BLOCK_N * BLOCK_N
    high = tl.minimum(context + first + BLOCK_Q, seq_len)
    maxima, sums, acc = look_along(
        maxima, sums, acc, q_rows, k_rows, v_rows, 0, whole, context + tokens, kv_head, score_scale,
        HEAD_DIM, BLOCK_N, False, NEVER,
    )  # fmt: skip
    maxima, sums, acc = look_along(
        maxima, sums, acc, q_rows, k_rows, v_rows, whole, high, context + tokens, kv_head,
        score_scale, HEAD_DIM, BLOCK_N, True, NEVER,
    )  # fmt: skip
    result = acc / sums[:, None]  # each row sees itself at least
    tl.store(out + offsets, result.to(out.dtype.element_ty), mask=mask)


def gather(cache: Tensor, pages: Tensor, seq_len: int) -> Tensor:
    """The pages of one of both caches as [seq_len, kv heads * head_dim]."""
    return cache.index_select(0, pages).flatten(0, 1).flatten(1)[:seq_len]


def attend(
    out: Tensor,
    q: Tensor,
    kv: LayerKV,
    step: DeviceStep,
    spec: AttentionSpec,
    sequences: list[Long],
) -> None:
    """Rows of `out` for the tokens of the sequences, of q [T, num_heads * head_dim]."""
    assert step.host is not None, "lengths are looked at on the host"
    rows = step.host.rows.tolist()
    for sequence in sequences:
        at = step.table_base + rows[sequence.place] * step.table_width
        pages = step.tables[at : at + -(-sequence.seq_len // BLOCK_SIZE)]
        k, v = (gather(cache, pages, sequence.seq_len) for cache in (kv.k, kv.v))
        block = [BLOCK_N, spec.head_dim]
        group = spec.num_heads // spec.num_kv_heads
        own = slice(sequence.first, sequence.end)
        count = sequence.num_tokens
        prompt_kernel[(triton.cdiv(count, BLOCK_M // group), spec.num_kv_heads)](
            out[own], q[own], TensorDescriptor.from_tensor(k, block),
            TensorDescriptor.from_tensor(v, block), count, sequence.seq_len, spec.scale * LOG2_E,
            GROUP=group, HEAD_DIM=spec.head_dim, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, NEVER=NEVER,
            num_warps=NUM_WARPS, num_stages=NUM_STAGES,
        )  # fmt: skip
