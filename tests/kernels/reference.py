"""What the kernels must compute, written slowly in float64; or exactly, where bits are promised."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tests.kernels.harness import AttentionCase

    Doubles: TypeAlias = Any  # NDArray[np.float64]; numpy types its operators as Any


def fma_chain(x: NDArray[np.float32], w: NDArray[np.float32]) -> NDArray[np.float32]:
    """x · wᵀ, each element one chain of fused multiply-adds over ascending columns.

    Exact for numbers so close in size that a product and sum fit a double.
    """
    total = np.zeros((len(x), len(w)), np.float32)
    for k in range(x.shape[1]):
        product = x[:, k, None].astype(np.float64) * w[None, :, k].astype(np.float64)
        total = (total.astype(np.float64) + product).astype(np.float32)
    return total


def pair_chain(x: NDArray[np.float32], w: NDArray[np.float32]) -> NDArray[np.float32]:
    """The same as x86's VDPBF16PS makes it: of each pair of columns the second one first."""
    order = np.arange(x.shape[1]).reshape(-1, 2)[:, ::-1].reshape(-1)
    return fma_chain(x[:, order], w[:, order])


def tile_chain(x: NDArray[np.float32], w: NDArray[np.float32]) -> NDArray[np.float32]:
    """The same as AMX's TDPBF16PS makes it, from 32 columns at a time.

    Their even and odd ones are two chains from zero; both together are added to the sum.
    """
    total = np.zeros((len(x), len(w)), np.float32)
    for k in range(0, x.shape[1], 32):
        even, odd = (fma_chain(x[:, k + i : k + 32 : 2], w[:, k + i : k + 32 : 2]) for i in (0, 1))
        total = total + (even + odd)
    return total


def activate(name: str, values: NDArray[np.floating]) -> Doubles:
    x: Any = values.astype(np.float64)
    if name == "silu":
        return x / (1 + np.exp(-x))
    if name == "gelu":
        return 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))
    if name == "gelu_tanh":
        return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    assert name == "relu"
    return np.maximum(x, 0)


def rms_norm(rows: NDArray[np.floating], weight: NDArray[np.floating], eps: float) -> Doubles:
    x: Any = rows.astype(np.float64)
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def rotate(x: Doubles, rotary_dim: int) -> Doubles:
    """Rope over [tokens, heads, head_dim], the token's index being its position."""
    half = rotary_dim // 2
    if half == 0:
        return x
    angles = np.arange(len(x))[:, None, None] * 10000.0 ** -(np.arange(half) / half)
    a, b, rest = x[..., :half], x[..., half:rotary_dim], x[..., rotary_dim:]
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1)


def attention(
    case: AttentionCase,
    qkv: NDArray[np.float32],
    stored: tuple[NDArray[np.float32], NDArray[np.float32]] | None = None,
) -> Doubles:
    """Dense causal attention of one sequence: [tokens, num_heads * head_dim].

    `stored` are keys, rotated, and values [tokens, num_kv_heads, head_dim] to take instead.
    """
    heads, kv_heads, dim = case.num_heads, case.num_kv_heads, case.head_dim
    x = qkv.astype(np.float64).reshape(len(qkv), heads + 2 * kv_heads, dim)
    q, k, v = x[:, :heads], x[:, heads : heads + kv_heads], x[:, heads + kv_heads :]
    if case.q_norm is not None:
        q = rms_norm(q, case.q_norm, 1e-6)
    if case.k_norm is not None:
        k = rms_norm(k, case.k_norm, 1e-6)
    q, k = rotate(q, case.rotary_dim), rotate(k, case.rotary_dim)
    if case.query_scales is not None:
        q = q * case.query_scales[: len(q), None, None]
    if stored is not None:
        k, v = (part.astype(np.float64) for part in stored)
    k, v = (np.repeat(part, heads // kv_heads, axis=1) for part in (k, v))
    scores = np.einsum("qhd,khd->hqk", q, k) * case.scale
    if case.soft_cap:
        scores = case.soft_cap * np.tanh(scores / case.soft_cap)
    distance = np.arange(len(x))[:, None] - np.arange(len(x))
    hidden = distance < 0
    if case.is_chunked:
        chunks = np.arange(len(x)) // case.window
        hidden |= chunks[:, None] != chunks
    elif case.window:
        hidden |= distance >= case.window
    scores[:, hidden] = -np.inf
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.einsum("hqk,khd->qhd", weights, v).reshape(len(x), heads * dim)
