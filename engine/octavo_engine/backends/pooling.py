"""What the pooling engine needs from any backend: a step of whole texts in, a row for each out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from octavo_engine.models.pooling_config import PoolingConfig


@dataclass(slots=True)
class PoolingStep:
    """Whole texts as flat arrays, one behind the other without padding: B texts, T tokens."""

    token_ids: NDArray[np.int32]  # [T]
    type_ids: NDArray[np.int32]  # [T]
    positions: NDArray[np.int32]  # [T]
    starts: NDArray[np.int32]  # [B + 1]
    pooled_rows: NDArray[np.int32]  # [B]  the first or last token of each, where one stands for all


def make_step(
    texts: Sequence[tuple[Sequence[int], Sequence[int]]], *, is_last: bool
) -> PoolingStep:
    """Of (token ids, type ids or nothing); `is_last` says which token may stand for a text."""
    lengths = np.fromiter((len(tokens) for tokens, _ in texts), np.int32, len(texts))
    starts = np.zeros(len(texts) + 1, np.int32)
    np.cumsum(lengths, out=starts[1:])
    total = int(starts[-1])
    token_ids, type_ids = np.empty(total, np.int32), np.zeros(total, np.int32)
    for (tokens, types), start in zip(texts, starts.tolist(), strict=False):
        token_ids[start : start + len(tokens)] = tokens
        if types:
            type_ids[start : start + len(tokens)] = types
    positions = np.arange(total, dtype=np.int32) - np.repeat(starts[:-1], lengths)
    return PoolingStep(
        token_ids=token_ids,
        type_ids=type_ids,
        positions=positions.astype(np.int32),
        starts=starts,
        pooled_rows=(starts[1:] - 1 if is_last else starts[:-1]).astype(np.int32),
    )


class PoolingBackend(Protocol):
    """A model that pools, in memory. Built by `backends.pooling_registry`."""

    @property
    def name(self) -> str:
        """Such as "native/avx2"."""

    @property
    def config(self) -> PoolingConfig: ...

    def prepare(self, *, max_tokens: int, max_texts: int) -> None:
        """Plan memory for the largest step. Called once, after loading."""

    def pool(self, step: PoolingStep) -> NDArray[np.float32]:
        """[B, columns]: embeddings as they are before normalisation, or a classifier's logits.
        Valid until the next step."""

    def token_rows(self, step: PoolingStep) -> NDArray[np.float32]:
        """[T, columns], of a model that embeds: the same for each token. Valid until the next."""

    def close(self) -> None:
        """Let go of memory and threads."""


class PendingRows(Protocol):
    """Rows that a device is computing."""

    def wait(self) -> NDArray[np.float32]:
        """Until they are there; they stay valid."""


@runtime_checkable
class LaunchesTexts(Protocol):
    """A backend whose steps compute while the next ones are packed."""

    def launch(self, step: PoolingStep, *, is_per_token: bool) -> PendingRows:
        """Begin with a step, behind those that were launched before it: what `pool` gives, or
        `token_rows`."""
