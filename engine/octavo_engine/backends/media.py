"""What the runner needs from a backend whose model sees, and the arithmetic around its programs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np

from octavo_engine.models.vision_config import MediaConfig  # noqa: TC001  (a protocol's member)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from octavo_engine.state.media import MediaItem
    from octavo_engine.weights.checkpoint import Checkpoint


class MediaEncoder(Protocol):
    """A tower and a projector in memory."""

    @property
    def config(self) -> MediaConfig: ...

    def encode(self, item: MediaItem) -> NDArray[np.float32]:
        """One tile's rows of the language model's input, [num_rows, text_size]. They are the
        caller's."""


@runtime_checkable
class TakesMedia(Protocol):
    """A backend that can have an encoder beside its model."""

    media: MediaEncoder | None

    def load_media(self, config: MediaConfig, checkpoint: Checkpoint) -> None:
        """After construction, before `prepare`, from a `VisionPart`. Raises ModelError."""


def pixel_rows(item: MediaItem, config: MediaConfig) -> NDArray[np.float32]:
    """[tokens, patch columns] of a tile: normalised, a patch a row, by channel, then by line."""
    vision = config.vision
    size, patch, side = vision.image_size, vision.patch_size, vision.side
    if (item.height, item.width) != (size, size):
        raise ValueError(f"a tile has {item.height} x {item.width} pixels, not {size} x {size}")
    pixels = np.frombuffer(item.pixels, np.uint8).reshape(size, size, 3)
    scaled = (pixels * np.float64(item.scale)).astype(np.float32)
    values = (scaled - np.array(item.mean, np.float32)) / np.array(item.std, np.float32)
    used = values[: side * patch, : side * patch]
    patches = used.reshape(side, patch, side, patch, 3).transpose(0, 2, 4, 1, 3)
    rows = np.zeros((vision.num_tokens, vision.patch_columns), np.float32)
    rows[int(vision.has_class) :] = patches.reshape(side * side, vision.patch_columns)
    return rows


def brought_together(hidden: NDArray[np.float32], config: MediaConfig) -> NDArray[np.float32]:
    """A tower's hidden states as rows of the projector's input."""
    vision = config.vision
    if vision.has_class and not config.keeps_class:
        hidden = hidden[1:]
    side, by = vision.side, config.shuffle * config.pool
    if by == 1:
        return np.ascontiguousarray(hidden)
    squares = hidden.reshape(side // by, by, side // by, by, vision.hidden_size)
    if config.pool > 1:
        means: NDArray[np.float32] = squares.mean(axis=(1, 3), dtype=np.float32)
        return means.reshape(-1, vision.hidden_size)
    return np.ascontiguousarray(squares.transpose(0, 2, 1, 3, 4)).reshape(
        -1, config.projector_columns
    )
