"""Towers and projectors in plain torch, slow and obvious: what the fast ones must equal."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch

from octavo_engine.backends.media import (
    PartOrder,
    brought_together,
    patch_places,
    pixel_rows,
    put_together,
    tiles_of,
    timed_part,
    windows_of,
    with_positions,
)
from octavo_engine.backends.pooling import PoolingStep
from octavo_engine.backends.torch.loader import TorchLoader
from octavo_engine.backends.torch.reference_pooling import ReferencePoolingOps
from octavo_engine.models.hearing import media_tower
from octavo_engine.models.vision import MediaProjector
from octavo_engine.ops import layer_output

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from octavo_engine.backends.torch.precision import Precision
    from octavo_engine.models.vision_config import MediaConfig
    from octavo_engine.ops import AttentionSpec
    from octavo_engine.state.media import MediaItem
    from octavo_engine.weights.checkpoint import Checkpoint


class ReferenceVisionOps(ReferencePoolingOps):
    """VisionOps over the rows of one tile."""

    def __init__(
        self, inputs: NDArray[np.float32], precision: Precision,
        places: NDArray[np.int32] | None = None, segments: NDArray[np.int32] | None = None,
    ) -> None:  # fmt: skip
        num_rows = len(inputs)
        nothing = np.zeros(num_rows, np.int32)
        step = PoolingStep(
            token_ids=nothing,
            type_ids=nothing,
            positions=np.arange(num_rows, dtype=np.int32),
            starts=np.array([0, num_rows], np.int32),
            pooled_rows=np.zeros(1, np.int32),
        )
        super().__init__(step, precision)
        self.kept = {}
        self._rope_positions = None if places is None else torch.from_numpy(places)
        self._segments = None if segments is None else segments.tolist()
        self._rows = torch.from_numpy(inputs).to(precision.dtype)

    def encoder_attention(self, qkv: Tensor, spec: AttentionSpec) -> Tensor:
        whole = self._texts
        if spec.is_segmented and self._segments is not None:
            self._texts = [slice(a, b) for a, b in pairwise(self._segments)]
        try:
            return super().encoder_attention(qkv, spec)
        finally:
            self._texts = whole

    def input(self, columns: int, *, first: int = 0) -> Tensor:
        assert self._rows.shape[1] >= first + columns
        return self._rows[:, first : first + columns]


class TorchMediaEncoder:
    """A MediaEncoder."""

    def __init__(self, config: MediaConfig, checkpoint: Checkpoint, precision: Precision) -> None:
        self.config = config
        self._precision = precision
        self._order = PartOrder()
        loader = TorchLoader(checkpoint, precision)
        self._tower = media_tower(config, loader)
        self._projector = MediaProjector(config, loader)
        layers = config.vision.deep_layers
        self._kept = [layer_output(index) for index in layers]
        self._deep = [MediaProjector(config, loader, i) for i in range(len(layers))]
        loader.finish()

    @property
    def work_bytes(self) -> int:
        """Of one layer: the scores of all heads are there at once."""
        vision = self.config.vision
        return 8 * vision.num_tokens**2 * vision.num_heads

    def measure(self) -> float:
        return timed_part(
            self.config, lambda rows, places: self._run(self._tower.forward, rows, places)
        )

    def encode(self, item: MediaItem) -> NDArray[np.float32]:
        rows = self.encode_part(item, 0, 1)
        assert rows is not None, "it was the last part"
        return rows

    def encode_part(self, item: MediaItem, part: int, num_parts: int) -> NDArray[np.float32] | None:
        """The last part is all of the work."""
        self._order.begin(item, part, num_parts)
        if not self._order.end(item, part, num_parts):
            return None
        rows = [self._encoded(tile) for tile in tiles_of(item, self.config)]
        newline = self._projector.newline
        return put_together(rows, item, None if newline is None else newline.float().numpy())

    def _encoded(self, tile: MediaItem) -> NDArray[np.float32]:
        config, square = self.config, self._tower.stretched
        windows = windows_of(tile, config)
        pixels = pixel_rows(tile, config)
        if square is not None:
            pixels = with_positions(pixels, tile, config, square.float().numpy())
        hidden = self._run(
            self._tower.forward, pixels, patch_places(tile, config),
            None if windows is None else windows.starts, keep=self._kept,
        )  # fmt: skip
        rows = [
            self._run(projector.forward, brought_together(values, config, windows))[0]
            for projector, values in zip((self._projector, *self._deep), hidden, strict=True)
        ]
        return np.concatenate(rows, axis=1)

    def _run(
        self, forward: Callable[[ReferenceVisionOps], Tensor], inputs: NDArray[np.float32],
        places: NDArray[np.int32] | None = None, segments: NDArray[np.int32] | None = None,
        *, keep: Sequence[str] = (),
    ) -> list[NDArray[np.float32]]:  # fmt: skip
        """The result, and what is kept."""
        ops = ReferenceVisionOps(inputs, self._precision, places, segments)
        ops.wanted = keep
        with torch.inference_mode():
            found = [forward(ops), *(ops.kept[name] for name in keep)]
            return [np.ascontiguousarray(rows.float().numpy()) for rows in found]
