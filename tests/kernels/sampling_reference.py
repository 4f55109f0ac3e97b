"""The sampler in slow numpy: the definition that the kernel is compared with, bit by bit.

It takes the same float32 steps as csrc/cpu/sampling.cpp, in the order that csrc/cpu/sampling.h
writes down, but sorts whole rows. Since masses are integers, sums have no order, and so the tokens
must be equal, not merely alike.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from octavo_engine.sampling.batch import (
    SAMPLED_NOT_FINITE,
    SAMPLED_NOTHING_ALLOWED,
    SAMPLED_OK,
    Ragged,
    Sampled,
    SamplingBatch,
)

Floats = NDArray[np.float32]
Ints = NDArray[np.int32]
F = np.float32
LARGEST = np.finfo(np.float32).max
MASS_BITS = 42


class Row(NamedTuple):
    token: int
    status: int


def philox(key: int, counter: int) -> tuple[int, int, int, int]:
    """Philox-4x32-10 (Salmon et al. 2011): four words from a 64-bit key and a 64-bit counter."""
    words = [counter & 0xFFFFFFFF, counter >> 32 & 0xFFFFFFFF, 0, 0]
    k0, k1 = key & 0xFFFFFFFF, key >> 32 & 0xFFFFFFFF
    for _ in range(10):
        a, b = words[0] * 0xD2511F53, words[2] * 0xCD9E8D57
        words = [
            b >> 32 ^ words[1] ^ k0,
            b & 0xFFFFFFFF,
            a >> 32 ^ words[3] ^ k1,
            a & 0xFFFFFFFF,
        ]
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return words[0], words[1], words[2], words[3]


def exp(t: Floats) -> Floats:
    """e^t for t <= 0 by a polynomial in float32 without fused operations."""
    t = np.maximum(t, F(-64))
    magic = F(12582912.0)
    n = (t * F(1.44269504088896341) + magic) - magic
    r = (t - n * F(0.693359375)) - n * F(-2.12194440e-4)
    y = np.full_like(r, F(1.9875691500e-4))
    for c in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        y = y * r + F(c)
    y = (y * (r * r) + r) + F(1)
    result: Floats = y * np.ldexp(F(1), n.astype(np.int32)).astype(np.float32)
    return result


def masses(x: Floats, temperature: float) -> NDArray[np.uint64]:
    """exp((x - max) / temperature) in units of 2^-42, rounded to the nearest, ties to even."""
    t = _scaled(x, temperature)
    return np.rint(exp(t).astype(np.float64) * 2.0**MASS_BITS).astype(np.uint64)


def adjust(x: Floats, batch: SamplingBatch, s: int) -> Floats:
    """The logits once allowed ids, bias and penalties are applied."""
    x = x.copy()
    entry = batch.table[batch.rows[s]]
    position = int(batch.positions[s])
    if batch.allowed is not None and len(ids := _ids(batch.allowed, s)):
        banned = np.ones(len(x), dtype=bool)
        banned[ids[(ids >= 0) & (ids < len(x))]] = False
        x[banned] = -np.inf
    if batch.masks is not None:
        rows, bits = batch.masks.take()
        if rows[s] >= 0:
            known = np.unpackbits(bits[rows[s]].view(np.uint8), bitorder="little")[: len(x)]
            x[: len(known)][known == 0] = -np.inf
            x[len(known) :] = -np.inf
    if batch.bias is not None:
        values = batch.bias.values
        assert values is not None
        start = batch.bias.starts[s]
        for k, token in enumerate(_ids(batch.bias, s)):
            if not 0 <= token < len(x):
                continue
            with np.errstate(over="ignore", invalid="ignore"):
                x[token] = _bounded(x[token], x[token] + values[start + k])
    if (
        entry["repetition_penalty"] == 1
        and entry["frequency_penalty"] == 0
        and entry["presence_penalty"] == 0
    ):
        return x
    history = batch.history[batch.rows[s], :position]
    for token in {int(t) for t in history if 0 <= t < len(x)}:
        p = entry["repetition_penalty"]
        with np.errstate(over="ignore"):
            y = x[token]
            if p != 1:
                y = y / p if y > 0 else y * p
            count = int((history[int(entry["num_prompt_tokens"]) :] == token).sum())
            if count:
                y = y - entry["frequency_penalty"] * F(count)
                y = y - entry["presence_penalty"]
            x[token] = _bounded(x[token], y)
    return x


def survivors(x: Floats, entry: np.void) -> NDArray[np.int64]:
    """Tokens that min-p, top-k and top-p leave, most likely first."""
    temperature = entry["temperature"]
    order = np.lexsort((np.arange(len(x)), -x))
    order = order[x[order] > -np.inf]
    if entry["min_p"] > 0:
        order = order[_scaled(x, temperature)[order] >= F(np.log(float(entry["min_p"])))]
    if entry["top_k"] > 0:
        order = order[: int(entry["top_k"])]
    if entry["top_p"] < 1:
        reached = np.cumsum(masses(x, temperature)[order])
        need = max(1, int(np.ceil(float(entry["top_p"]) * float(reached[-1]))))
        order = order[: int(np.searchsorted(reached, np.uint64(need))) + 1]
    return order


def choose(x: Floats, entry: np.void, position: int) -> Row:
    """One token of the adjusted logits."""
    if x.max() == -np.inf:
        return Row(-1, SAMPLED_NOTHING_ALLOWED)
    if entry["temperature"] < F(1e-5):
        return Row(int(np.argmax(x)), SAMPLED_OK)
    kept = np.sort(survivors(x, entry))
    reached = np.cumsum(masses(x, entry["temperature"])[kept])
    low, high, *_ = philox(int(entry["seed"]), position)
    point = (high << 32 | low) * int(reached[-1]) >> 64
    first_beyond = np.searchsorted(reached, np.uint64(point), side="right")
    return Row(int(kept[first_beyond]), SAMPLED_OK)


def sample(logits: Floats, batch: SamplingBatch) -> Sampled:
    """What `_native.sample` must give, row by row. Leaves the logits alone."""
    num_rows, k = len(logits), batch.num_logprobs
    out = Sampled(tokens=np.full(num_rows, -1, np.int32), status=np.zeros(num_rows, np.uint8))
    if k >= 0:
        out.logprobs = np.full(num_rows, np.nan, np.float32)
        out.ranks = np.zeros(num_rows, np.int32)
        out.top_ids = np.full((num_rows, k), -1, np.int32)
        out.top_logprobs = np.full((num_rows, k), -np.inf, np.float32)
    for s, x in enumerate(logits):
        target = int(batch.targets[s])
        if not (x <= LARGEST).all():
            out.status[s] = SAMPLED_NOT_FINITE
            continue
        if target >= 0 and x.max() > -np.inf:
            row = Row(target, SAMPLED_OK)
        elif target >= 0:
            row = Row(-1, SAMPLED_NOTHING_ALLOWED)
        else:
            entry = batch.table[batch.rows[s]]
            row = choose(adjust(x, batch, s), entry, int(batch.positions[s]))
        out.tokens[s], out.status[s] = row
        if k >= 0 and row.status == SAMPLED_OK:
            requested = None if batch.logprob_ids is None else _ids(batch.logprob_ids, s)
            _score(
                out, s, x, row.token, k if requested is None or len(requested) == 0 else requested
            )
    return out


def _score(out: Sampled, s: int, x: Floats, token: int, wanted: int | Ints) -> None:
    """`wanted` tokens are told of beside the chosen one: so many of the likeliest, or these."""
    assert out.logprobs is not None and out.ranks is not None
    assert out.top_ids is not None and out.top_logprobs is not None
    total = float(int(masses(x, 1.0).sum())) * 2.0**-MASS_BITS
    logprobs = (_scaled(x, 1.0).astype(np.float64) - np.log(total)).astype(np.float32)
    out.logprobs[s] = logprobs[token]
    out.ranks[s] = 1 + int((x > x[token]).sum())
    likely = np.lexsort((np.arange(len(x)), -x))
    top: NDArray[Any] = likely[:wanted] if isinstance(wanted, int) else wanted
    out.top_ids[s, : len(top)] = top
    out.top_logprobs[s, : len(top)] = logprobs[top]


def _scaled(x: Floats, temperature: float) -> Floats:
    with np.errstate(over="ignore"):
        result: Floats = (x - x.max()) * (F(1) / F(temperature))
    return result


def _ids(lists: Ragged, s: int) -> NDArray[np.int32]:
    return lists.ids[lists.starts[s] : lists.starts[s + 1]]


def _bounded(before: np.float32, after: np.float32) -> np.float32:
    """What is banned stays banned, and nothing grows beyond the largest finite number."""
    return before if before == -np.inf else np.minimum(after, LARGEST)
