"""What the runner needs from a backend whose model sees or hears, and the arithmetic around its
programs."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

import msgspec
import numpy as np

from octavo_engine.models.vision_config import (
    ROWS_A_SOUND_TOKEN,
    MediaConfig,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from octavo_engine.state.media import MediaItem
    from octavo_engine.weights.checkpoint import Checkpoint

MEASURED_PATCHES = 512


class MediaEncoder(Protocol):
    """A tower and a projector in memory."""

    @property
    def config(self) -> MediaConfig: ...

    @property
    def work_bytes(self) -> int:
        """Memory that the largest picture takes while it is encoded, weights aside."""

    def measure(self) -> float:
        """About how many seconds the largest picture takes: those of a part, and what the rest is
        to it. A large tower takes minutes on a few threads, for which no start should wait."""

    def encode(self, item: MediaItem) -> NDArray[np.float32]:
        """One tile's rows of the language model's input, [num_rows, row_columns]. They are
        the caller's."""

    def encode_part(self, item: MediaItem, part: int, num_parts: int) -> NDArray[np.float32] | None:
        """One of the parts of the same work, of about equal length and in their order; the last one
        gives the rows. Part 0 begins anew, whatever was under way; raises ValueError where another
        one does not follow the part that was computed last."""


class PartOrder:
    """Sees to it that parts of tiles are never mixed, nor left out."""

    def __init__(self) -> None:
        self._next: tuple[bytes, int, int] | None = None  # digest, part, parts

    def begin(self, item: MediaItem, part: int, num_parts: int) -> None:
        """Raises ValueError. Until `end` nothing is under way: a part may fail in the middle."""
        expected, self._next = self._next, None
        if part and expected != (item.digest, part, num_parts):
            raise ValueError(f"part {part} of {num_parts} of a tile does not follow the last one")

    def end(self, item: MediaItem, part: int, num_parts: int) -> bool:
        """Whether it was the last one."""
        is_last = part + 1 == num_parts
        self._next = None if is_last else (item.digest, part + 1, num_parts)
        return is_last


@runtime_checkable
class TakesMedia(Protocol):
    """A backend that can have an encoder beside its model."""

    media: MediaEncoder | None

    def load_media(self, config: MediaConfig, checkpoint: Checkpoint) -> None:
        """After construction, before `prepare`, from a `VisionPart`. Raises ModelError."""


def timed_part(
    config: MediaConfig, run: Callable[[NDArray[np.float32], NDArray[np.int32] | None], object]
) -> float:
    """How long the largest picture takes if `run` has a tower compute some rows of pixels at some
    places."""
    vision = config.vision
    num_rows = min(vision.num_tokens, MEASURED_PATCHES)
    places = None if vision.rope_theta is None else np.zeros((3, num_rows), np.int32)
    started = time.perf_counter()
    run(np.zeros((num_rows, vision.input_columns), np.float32), places)
    took_s = time.perf_counter() - started
    tile_s = took_s * vision.operations(vision.num_tokens) / vision.operations(num_rows)
    return tile_s * config.num_tiles


def tiles_of(item: MediaItem, config: MediaConfig) -> list[MediaItem]:
    """What the tower reads one after the other. Raises ValueError where it is not what the model
    takes."""
    grid, side = item.tiles, config.vision.image_size
    if grid is None:
        return [item]
    shape = (item.height, item.width)
    known = (*config.grids, (0, 0)) if config.most_tiles else config.grids
    if (grid.rows, grid.columns) not in known or shape != (grid.num_tiles * side, side):
        raise ValueError(f"{shape} pixels are not the tiles of a picture that is read")
    count = 3 * side * side
    return [
        msgspec.structs.replace(
            item, height=side, tiles=None, pixels=item.pixels[i * count : (i + 1) * count]
        )
        for i in range(grid.num_tiles)
    ]


def put_together(
    rows: Sequence[NDArray[np.float32]], item: MediaItem, newline: NDArray[np.float32] | None
) -> NDArray[np.float32]:
    """The rows of a picture from those of its tiles."""
    grid = item.tiles
    if grid is None:
        return rows[0]
    assert newline is not None, "families that put tiles together have one"
    if not grid.rows:
        return np.concatenate((rows[0], newline[None]))
    side = math.isqrt(len(rows[0]))
    parts = np.stack(rows[1:]).reshape(grid.rows, grid.columns, side, side, -1)
    whole = parts.transpose(0, 2, 1, 3, 4).reshape(grid.rows * side, grid.columns * side, -1)
    kept = whole[grid.top : grid.top + grid.height, grid.left : grid.left + grid.width]
    if (grid.shrunk_height, grid.shrunk_width) != (grid.height, grid.width):
        kept = _shrunk(kept, grid.shrunk_height, grid.shrunk_width)
    lines = np.concatenate((kept, np.broadcast_to(newline, (len(kept), 1, len(newline)))), 1)
    return np.concatenate((rows[0], lines.reshape(-1, len(newline))))


def _shrunk(rows: NDArray[np.float32], height: int, width: int) -> NDArray[np.float32]:
    """Lines of rows, as those nearest to each place in fewer of them say, in between if need be."""
    for axis, count in enumerate((height, width)):
        own = rows.shape[axis]
        centres = (np.arange(count, dtype=np.float32) + np.float32(0.5)) * np.float32(own / count)
        former, latter, share = _taps(np.maximum(centres - np.float32(0.5), 0), own)
        by = share[:, None, None] if axis == 0 else share[:, None]
        rows = rows.take(former, axis) * (1 - by) + rows.take(latter, axis) * by
    return rows


def num_patches(item: MediaItem, config: MediaConfig) -> int:
    """Tokens of a tile. Raises ValueError where it is not read."""
    if config.vision.image_size:
        return config.vision.num_tokens
    if config.kind == "audio":
        return _num_sound_rows(item, config)
    lines, columns = _grid(item, config)
    return lines * columns


def pixel_rows(item: MediaItem, config: MediaConfig) -> NDArray[np.float32]:
    """[tokens, patch columns] of a tile: normalised, a patch a row, by channel, then by line."""
    vision = config.vision
    if config.kind == "audio":
        rows = np.frombuffer(item.pixels, np.float32).copy()
        return rows.reshape(_num_sound_rows(item, config), vision.input_columns)
    if not vision.image_size:
        return _grouped_pixel_rows(item, config)
    size, patch, side = vision.image_size, vision.patch_size, vision.side
    if (item.height, item.width) != (size, size):
        raise ValueError(f"a tile has {item.height} x {item.width} pixels, not {size} x {size}")
    used = _normalised(item)[: side * patch, : side * patch]
    patches = used.reshape(side, patch, side, patch, 3).transpose(0, 2, 4, 1, 3)
    rows = np.zeros((vision.num_tokens, vision.patch_columns), np.float32)
    rows[int(vision.has_class) :] = patches.reshape(side * side, vision.patch_columns)
    return rows


def _num_sound_rows(item: MediaItem, config: MediaConfig) -> int:
    vision = config.vision
    if item.width != vision.input_columns or not 2 <= item.height <= vision.num_tokens:
        raise ValueError(f"a sound has {item.height} x {item.width} features, which are not read")
    return item.height


def _normalised(item: MediaItem) -> NDArray[np.float32]:
    """[height, width, 3]."""
    pixels = np.frombuffer(item.pixels, np.uint8).reshape(item.height, item.width, 3)
    scaled: NDArray[np.float32] = (pixels * np.float64(item.scale)).astype(np.float32)
    mean, std = np.array(item.mean, np.float32), np.array(item.std, np.float32)
    return np.asarray((scaled - mean) / std, np.float32)


def _grouped_pixel_rows(item: MediaItem, config: MediaConfig) -> NDArray[np.float32]:
    """Of a tower that takes pictures of any size: patches that become one row lie one after the
    other, and each has all its frames."""
    vision, by = config.vision, config.shuffle
    patch = vision.patch_size
    lines, columns = _grid(item, config)
    values = _normalised(item).reshape(lines // by, by, patch, columns // by, by, patch, 3)
    patches = values.transpose(0, 3, 1, 4, 6, 2, 5)[..., None, :, :]
    frames = np.broadcast_to(patches, (*patches.shape[:5], vision.num_frames, *patches.shape[6:]))
    rows = np.ascontiguousarray(frames).reshape(lines * columns, vision.patch_columns)
    windows = windows_of(item, config)
    return rows if windows is None else np.ascontiguousarray(rows[windows.order])


def with_positions(
    rows: NDArray[np.float32], item: MediaItem, config: MediaConfig, square: NDArray[np.float32]
) -> NDArray[np.float32]:
    """Rows of pixels, and behind each its position, of those of a square that is stretched over the
    picture."""
    vision, by = config.vision, config.shuffle
    side = vision.positions_side
    lines, columns = _grid(item, config)
    table = square.reshape(side, side, vision.hidden_size)
    (above, below, down), (left, right, along) = (
        _taps(_between(count, side), side) for count in (lines, columns)
    )
    at = np.zeros((lines, columns, vision.hidden_size), np.float32)
    for line, by_line in ((above, 1 - down), (below, down)):
        for column, by_column in ((left, 1 - along), (right, along)):
            share = by_line[:, None] * by_column
            at += table[line[:, None], column] * share[..., None]
    grouped = at.reshape(lines // by, by, columns // by, by, -1).transpose(0, 2, 1, 3, 4)
    return np.concatenate((rows, grouped.reshape(len(rows), -1)), 1)


def _between(count: int, side: int) -> NDArray[np.float32]:
    """`count` places between the first and the last of `side`."""
    return np.asarray(
        np.arange(count, dtype=np.float32) * np.float32(side - 1) / np.float32(max(count - 1, 1)),
        np.float32,
    )


def _taps(
    source: NDArray[np.float32], side: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32]]:
    """For each place among `side`: the two that it is between, and how far it is from the
    former."""
    former = np.floor(source).astype(np.int64)
    return former, np.minimum(former + 1, side - 1), (source - former).astype(np.float32)


def patch_places(item: MediaItem, config: MediaConfig) -> NDArray[np.int32] | None:
    """[3, tokens]: in time, which is one, the line and the column of each patch, in the order of
    `pixel_rows`. None where patches know their places by a table."""
    if config.vision.rope_theta is None:
        return None
    by = config.shuffle
    lines, columns = _grid(item, config)
    places = np.zeros((3, lines, columns), np.int32)
    places[1], places[2] = np.arange(lines)[:, None], np.arange(columns)
    grouped = places.reshape(3, lines // by, by, columns // by, by).transpose(0, 1, 3, 2, 4)
    whole = np.ascontiguousarray(grouped).reshape(3, -1)
    windows = windows_of(item, config)
    return whole if windows is None else np.ascontiguousarray(whole[:, windows.order])


class Windows(NamedTuple):
    """A picture's patches window by window."""

    order: NDArray[np.int64]  # which patch is where
    starts: NDArray[np.int32]  # of the windows, and the end


def windows_of(item: MediaItem, config: MediaConfig) -> Windows | None:
    """None where all patches see all. Windows at the right and below may be smaller; patches that
    become one row are in one window."""
    if not config.vision.window:
        return None
    by = config.shuffle
    lines, columns = (patches // by for patches in _grid(item, config))
    side = config.vision.window // by
    index = np.arange(lines * columns).reshape(lines, columns)
    parts = [
        index[line : line + side, column : column + side].reshape(-1)
        for line in range(0, lines, side)
        for column in range(0, columns, side)
    ]
    order = np.concatenate(parts)[:, None] * by**2 + np.arange(by**2)
    ends = np.cumsum([len(part) * by**2 for part in parts])
    return Windows(order.reshape(-1), np.concatenate(([0], ends)).astype(np.int32))


def _grid(item: MediaItem, config: MediaConfig) -> tuple[int, int]:
    """Lines and columns of patches. Raises ValueError where they are not whole or too many."""
    vision = config.vision
    (lines, odd), (columns, odd_too) = (
        divmod(pixels, vision.patch_size) for pixels in (item.height, item.width)
    )
    is_whole = not (odd or odd_too or lines % config.shuffle or columns % config.shuffle)
    if not is_whole or not 0 < lines * columns <= vision.num_tokens:
        raise ValueError(f"a tile has {item.height} x {item.width} pixels, which are not read")
    return lines, columns


def brought_together(
    hidden: NDArray[np.float32], config: MediaConfig, windows: Windows | None = None
) -> NDArray[np.float32]:
    """A tower's hidden states as rows of the projector's input."""
    if windows is not None:
        ordered = np.empty_like(hidden)
        ordered[windows.order] = hidden
        hidden = ordered
    vision = config.vision
    if config.kind == "audio":
        count = len(hidden) // ROWS_A_SOUND_TOKEN
        pairs = hidden[: count * ROWS_A_SOUND_TOKEN].reshape(count, ROWS_A_SOUND_TOKEN, -1)
        heard: NDArray[np.float32] = pairs.mean(axis=1, dtype=np.float32)
        return heard
    if not vision.image_size:
        return np.ascontiguousarray(hidden).reshape(-1, config.projector_columns)
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
