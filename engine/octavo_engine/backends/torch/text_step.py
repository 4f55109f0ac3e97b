"""A step of whole texts on the device: packed into one pinned buffer, sent by one copy.

As `device_step.py` does for steps of sequences; there is no cache here, so all of a step is new. In
a bucket, which a graph stands for, tokens and texts of padding follow: the tokens are of no text,
and the texts have no tokens.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from octavo_engine.backends.torch.device_step import ALIGNMENT, cut_tiles

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from octavo_engine.backends.pooling import PoolingStep
    from octavo_engine.backends.torch.landing import StreamMark

FEW_TEXTS = (4, 64)  # buckets of texts below the most; a text of padding costs next to nothing
LEAST_BUCKET = 16  # tokens
# What a launch takes on the host, and multiplications a second that a step of small matrices has at
# most: a step that computes longer than its launches take needs no graph.
LAUNCH_S = 450e-6  # of a layer: 24 of them took 11 ms beside an H100
FLOPS = 400e12


class TextSizes(NamedTuple):
    """How many of each; in a bucket, how many there is room for."""

    tokens: int
    texts: int
    tiles: int


@dataclass(frozen=True, slots=True)
class TextStep:
    """A step as the operations see it. `host` is None where it is padded."""

    token_ids: Tensor
    type_ids: Tensor
    positions: Tensor
    starts: Tensor  # [B + 1]
    logit_rows: Tensor  # [B]: the token that may stand for a text
    tile_texts: Tensor  # -1: none
    tile_starts: Tensor
    slots: Tensor  # where each token's key and value lie: 0, 1, 2, …
    host: PoolingStep | None
    adapter_tiles: Tensor | None = None  # what pools is not adapted

    def by_group(self) -> list[TextStep]:
        """There is no cache, whose layers would differ."""
        return [self]

    @property
    def is_decode(self) -> bool:
        """Rows are chosen from those of all tokens."""
        return False


def most_captured(*, layer_weights: int, max_tokens: int) -> int:
    """Tokens of the largest step that takes longer to launch than to compute."""
    return min(max_tokens, int(LAUNCH_S * FLOPS / (2 * max(1, layer_weights))))


def token_buckets(most: int) -> list[int]:
    """16, 24, 32, 48, 64, 96, … so that at most a third of a step is padding."""
    sizes: list[int] = []
    size = LEAST_BUCKET
    while size <= most:
        sizes += [size, size * 3 // 2]
        size *= 2
    return [size for size in sizes if size <= most]


def text_buckets(max_texts: int) -> list[int]:
    return [*(count for count in FEW_TEXTS if count < max_texts), max_texts]


def bucket_of(
    step: PoolingStep, tokens: Sequence[int], texts: Sequence[int], *, tokens_per_tile: int
) -> TextSizes | None:
    """The smallest that holds the step; None if none does."""
    at = bisect.bisect_left(tokens, len(step.token_ids))
    place = bisect.bisect_left(texts, len(step.pooled_rows))
    if at == len(tokens) or place == len(texts):
        return None
    # Each text's last tile may be partly filled.
    count = min(texts[place], tokens[at])
    if count < len(step.pooled_rows):
        return None
    return TextSizes(tokens[at], count, tokens[at] // tokens_per_tile + count)


class TextBuffer:
    """The pinned words, two sides of them in turn, and their twin on the device."""

    def __init__(
        self,
        *,
        max_tokens: int,
        max_texts: int,
        tokens_per_tile: int,
        device: torch.device,
        make_mark: Callable[[], StreamMark],
    ) -> None:
        self._tokens_per_tile = tokens_per_tile
        self._make_mark = make_mark
        most = TextSizes(max_tokens, max_texts, max_tokens // tokens_per_tile + max_texts)
        num_words = _layout(most)[1]
        is_pinned = device.type == "cuda"
        self._hosts = [
            torch.zeros(num_words, dtype=torch.int32, pin_memory=is_pinned) for _ in range(2)
        ]
        self._sent: list[StreamMark | None] = [None, None]
        self._device = torch.zeros(num_words, dtype=torch.int32, device=device)
        self._slots = torch.arange(max_tokens, dtype=torch.int32, device=device)

    def fill(self, step: PoolingStep, bucket: TextSizes | None) -> TextSizes:
        """Lay the step out and send it. Gives the sizes that it has on the device."""
        texts, tile_starts = cut_tiles(step.starts, self._tokens_per_tile)[:2]
        # Tiles of long texts look at the most tokens, so they begin first.
        order = np.argsort(-np.diff(step.starts)[texts], kind="stable")
        num_tokens, num_texts = len(step.token_ids), len(step.pooled_rows)
        sizes = bucket or TextSizes(num_tokens, num_texts, len(texts))
        self._hosts.reverse()
        self._sent.reverse()
        sent = self._sent[0]
        if sent is not None:
            sent.wait()  # of two steps ago
        host = self._hosts[0]
        words: NDArray[np.int32] = host.numpy()
        places, num_words = _layout(sizes)
        fields = {
            "token_ids": (step.token_ids, 0),
            "type_ids": (step.type_ids, 0),
            "positions": (step.positions, 0),
            "starts": (step.starts, num_tokens),
            "logit_rows": (step.pooled_rows, 0),
            "tile_texts": (texts[order], -1),
            "tile_starts": (tile_starts[order], 0),
        }
        for name, (values, padding) in fields.items():
            start, end = places[name]
            words[start : start + len(values)] = values
            words[start + len(values) : end] = padding
        self._device[:num_words].copy_(host[:num_words], non_blocking=True)
        self._sent[0] = self._make_mark()
        return sizes

    def step(self, sizes: TextSizes, host: PoolingStep | None) -> TextStep:
        """Views of the device's words."""
        places = _layout(sizes)[0]
        fields = {name: self._device[start:end] for name, (start, end) in places.items()}
        return TextStep(**fields, slots=self._slots[: sizes.tokens], host=host)


def _layout(sizes: TextSizes) -> tuple[dict[str, tuple[int, int]], int]:
    """Where each field lies, and where they end."""
    tokens, texts, tiles = sizes
    places, at = {}, 0
    for name, length in (
        ("token_ids", tokens), ("type_ids", tokens), ("positions", tokens), ("starts", texts + 1),
        ("logit_rows", texts), ("tile_texts", tiles), ("tile_starts", tiles),
    ):  # fmt: skip
        places[name] = (at, at + length)
        at += -(-length // ALIGNMENT) * ALIGNMENT
    return places, at
