"""The kernels of models that pool, beside those of `kernels.py`: plain torch or Triton."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Protocol

import torch
from torch.nn import functional

from octavo_engine.backends.torch.reference_pooling import attend_whole, pooled

if TYPE_CHECKING:
    from torch import Tensor

    from octavo_engine.backends.torch.head_shape import HeadShape
    from octavo_engine.backends.torch.operands import NormWeights
    from octavo_engine.backends.torch.text_step import TextStep
    from octavo_engine.ops import AttentionSpec, Pool


class TextKernels(Protocol):
    """What whole texts need besides."""

    @property
    def tokens_per_tile(self) -> int:
        """How many of a text's tokens one attention program takes."""

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, step: TextStep, spec: AttentionSpec
    ) -> Tensor:
        """q, k and v [T, heads * head_dim], turned and normed; each text by itself."""

    def layer_norm(
        self, x: Tensor, y: Tensor | None, scale: float, norm: NormWeights, *, keeps_sum: bool
    ) -> tuple[Tensor | None, Tensor]:
        """(x + scale * y in float32 if it is kept, its norm)."""

    def pool(self, x: Tensor, step: TextStep, how: Pool) -> Tensor:
        """[B, columns] in float32."""


class PlainTextKernels:
    """What Triton's must equal. Looks at lengths on the host."""

    tokens_per_tile = 64  # there are no tiles here

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, step: TextStep, spec: AttentionSpec
    ) -> Tensor:
        out = q.new_zeros((len(q), spec.num_heads * spec.head_dim))
        shape = (len(q), -1, spec.head_dim)
        q, k, v = (x.reshape(shape).float() for x in (q, k, v))
        for own in _texts(step):
            out[own] = attend_whole(q[own], k[own], v[own], spec).to(out.dtype)
        return out

    def layer_norm(
        self, x: Tensor, y: Tensor | None, scale: float, norm: NormWeights, *, keeps_sum: bool
    ) -> tuple[Tensor | None, Tensor]:
        total = x.float() if y is None else x.float() + scale * y.float()
        normed = functional.layer_norm(total, total.shape[-1:], *norm[:3]).to(norm.dtype)
        return (total if keeps_sum and y is not None else None), normed

    def pool(self, x: Tensor, step: TextStep, how: Pool) -> Tensor:
        return torch.stack([pooled(x[own].float(), how) for own in _texts(step)])


class TritonTextKernels:
    """Launches; decides only how the work is cut."""

    def __init__(self, shape: HeadShape, dtype: torch.dtype, *, max_text_len: int) -> None:
        from octavo_engine.backends.torch.triton import texts

        self._texts = texts
        group = shape.num_heads // shape.num_kv_heads
        self._tile = texts.choose_tile(
            group=group, head_dim=shape.head_dim, itemsize=dtype.itemsize,
            max_text_len=max_text_len,
        )  # fmt: skip
        self.tokens_per_tile = self._tile.block_m // group
        self._slopes: dict[int, tuple[AttentionSpec, Tensor]] = {}  # by the spec's id, which lives

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, step: TextStep, spec: AttentionSpec
    ) -> Tensor:
        slopes = self._slopes_of(spec, q.device)
        return self._texts.attend(q, k, v, step, spec, slopes=slopes, tile=self._tile)

    def layer_norm(
        self, x: Tensor, y: Tensor | None, scale: float, norm: NormWeights, *, keeps_sum: bool
    ) -> tuple[Tensor | None, Tensor]:
        return self._texts.layer_norm(x, y, scale, norm, keeps_sum=keeps_sum)

    def pool(self, x: Tensor, step: TextStep, how: Pool) -> Tensor:
        return self._texts.pool(x, step, how)

    def _slopes_of(self, spec: AttentionSpec, device: torch.device) -> Tensor | None:
        if spec.alibi is None:
            return None
        known = self._slopes.get(id(spec))
        if known is None:  # before a graph is captured: its bucket's first step is launched
            known = self._slopes[id(spec)] = (spec, torch.from_numpy(spec.alibi).to(device))
        return known[1]


def _texts(step: TextStep) -> list[slice]:
    assert step.host is not None, "plain kernels need the step's lengths on the host"
    return [slice(a, b) for a, b in itertools.pairwise(step.host.starts.tolist())]
