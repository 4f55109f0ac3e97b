"""From a picture file's bytes to the pixels that the encoder reads. Runs in worker processes.

Sizes are checked before anything is decoded. Resizing is Pillow's own, so that pixels are those
that transformers' processors make.
"""

from __future__ import annotations

import hashlib
import io
import struct
import warnings
from math import ceil, floor, sqrt
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np

from octavo_engine.core.media.spec import (
    MAX_EDGE,
    FillTiles,
    FitEdge,
    FitPixels,
    PadToTiles,
    SplitIntoTiles,
)
from octavo_engine.models.vision_config import MOST_MORE
from octavo_engine.state.media import MediaItem, TileGrid

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from PIL import Image

    from octavo_engine.core.media.spec import CropToTile, PictureSpec
    from octavo_engine.models.vision_config import MediaConfig

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
MAX_PIXELS = 40_000_000  # of a picture, decoded or resized
MAX_RATIO = 200  # of the sides of a picture that keeps its shape
VERSION = b"octavo-media-1"  # raise it when preprocessing changes: old and new must never meet


class BadPicture(ValueError):
    """What is wrong with it, for its sender."""


class PreparedPicture(NamedTuple):
    """A picture as tiles for the encoder, in the order in which the prompt has them."""

    tiles: tuple[MediaItem, ...]
    # Into how many it was split; a tile of the whole picture follows them. None: it was not.
    rows: int = 0
    columns: int = 0


class PreparationResult(NamedTuple):
    """What a worker sends back: one of both."""

    picture: PreparedPicture | None
    problem: str = ""


def prepare(data: bytes, spec: PictureSpec) -> PreparationResult:
    """Never raises for what is in the file."""
    try:
        return PreparationResult(prepare_image(_decode(data), spec))
    except BadPicture as error:
        return PreparationResult(None, str(error))


def prepare_decoded(image: Image.Image, spec: PictureSpec) -> PreparedPicture:
    """Of a picture that a caller has opened, whatever its mode. Raises BadPicture."""
    _check_size(*image.size)
    return prepare_image(_upright(image), spec)


def prepare_image(image: Image.Image, spec: PictureSpec) -> PreparedPicture:
    """Of a picture in RGB. Raises BadPicture."""
    if isinstance(spec.shape, SplitIntoTiles):
        return _split(image, spec, spec.shape)
    if isinstance(spec.shape, PadToTiles):
        return _padded(image, spec, spec.shape)
    if isinstance(spec.shape, FillTiles):
        return _filled(image, spec, spec.shape)
    if isinstance(spec.shape, FitPixels | FitEdge):
        height, width = _fitting_size(*image.size, spec.shape)
        vision = spec.media.vision
        if height * width > vision.num_tokens * vision.patch_size**2:
            raise BadPicture(f"becomes {width} x {height} pixels, too many to be read; crop it")
        resized = _resized(image, height, width, spec)
        return PreparedPicture((_tile(np.asarray(resized, np.uint8), spec),))
    resized = _resized(image, *_cropped_size(*image.size, spec, spec.shape), spec)
    return PreparedPicture((_tile(_middle(np.asarray(resized, np.uint8), *spec.size), spec),))


def _split(image: Image.Image, spec: PictureSpec, shape: SplitIntoTiles) -> PreparedPicture:
    """Each step resizes what the one before made, as the model's own processor does."""
    height, width = shape.size
    if shape.longest_edge is not None:
        height, width = _size_by_longest(*image.size, shape.longest_edge)
    image = _resized(image, height, width, spec)
    side = spec.size[0]
    tiles = []
    rows = columns = 0
    if shape.is_split:
        height, width = _size_in_tiles(height, width, side)
        image = _resized(image, height, width, spec)
        if max(height, width) > side:
            rows, columns = height // side, width // side
            tiles = _cut(np.asarray(image, np.uint8), side)
    tiles.append(np.asarray(_resized(image, side, side, spec), np.uint8))
    return PreparedPicture(tuple(_tile(pixels, spec) for pixels in tiles), rows, columns)


def _filled(image: Image.Image, spec: PictureSpec, shape: FillTiles) -> PreparedPicture:
    side = spec.size[0]
    rows, columns = _best_grid(*image.size, side, shape)
    tiles = []
    if (rows, columns) != (1, 1):
        full = _resized(image, rows * side, columns * side, spec)
        tiles = _cut(np.asarray(full, np.uint8), side)
    else:
        rows = columns = 0
    tiles.append(np.asarray(_resized(image, side, side, spec), np.uint8))
    return PreparedPicture(tuple(_tile(pixels, spec) for pixels in tiles), rows, columns)


def _padded(image: Image.Image, spec: PictureSpec, shape: PadToTiles) -> PreparedPicture:
    side = spec.size[0]
    if not shape.grids:
        square = np.asarray(_resized(_square(image, spec), side, side, spec), np.uint8)
        return PreparedPicture((_tile(square, spec, TileGrid(0, 0, 0, 0, 1, 0, 1, 0)),))
    rows, columns = _largest_grid(*image.size, side, shape.grids)
    height, width = _size_inside(*image.size, rows * side, columns * side)
    full = np.zeros((rows * side, columns * side, 3), np.uint8)
    top, left = (rows * side - height) // 2, (columns * side - width) // 2
    full[top : top + height, left : left + width] = np.asarray(
        _resized(image, height, width, spec), np.uint8
    )
    small = np.asarray(_resized(image, side, side, spec), np.uint8)
    kept = _kept(*image.size, rows, columns, spec.media)
    return PreparedPicture((_tile(np.concatenate([small, *_cut(full, side)]), spec, kept),))


def _largest_grid(
    width: int, height: int, side: int, grids: Sequence[tuple[int, int]]
) -> tuple[int, int]:
    """Rows and columns of tiles that show most of the picture, and of those the fewest pixels."""
    best, most, least_wasted = grids[0], 0, float("inf")
    for rows, columns in grids:
        scale = min(columns * side / width, rows * side / height)
        shown = min(int(width * scale) * int(height * scale), width * height)
        wasted = rows * columns * side * side - shown
        if shown > most or (shown == most and wasted < least_wasted):
            best, most, least_wasted = (rows, columns), shown, wasted
    return best


def _size_inside(width: int, height: int, most_height: int, most_width: int) -> tuple[int, int]:
    """Height and width of the picture's shape, as large as fits."""
    by_width, by_height = most_width / width, most_height / height
    if by_width < by_height:
        return min(ceil(height * by_width), most_height), most_width
    return most_height, min(ceil(width * by_height), most_width)


def _square(image: Image.Image, spec: PictureSpec) -> Image.Image:
    """In the middle of the mean colour."""
    from PIL import Image

    width, height = image.size
    if width == height:
        return image
    side = max(width, height)
    if side * side > MAX_PIXELS:
        raise BadPicture(f"has {width} x {height} pixels, too narrow to be made a square; crop it")
    red, green, blue = (int(255 * mean) for mean in spec.mean)
    square = Image.new("RGB", (side, side), (red, green, blue))
    square.paste(image, ((side - width) // 2, (side - height) // 2))
    return square


def _kept(width: int, height: int, rows: int, columns: int, media: MediaConfig) -> TileGrid:
    """Patches of the picture, without those of its black edges, in the model's own rounding."""
    side = media.vision.side
    all_lines, all_columns = rows * side, columns * side
    top = left = 0
    if width / height > all_columns / all_lines:
        top = (all_lines - int(round(height * (all_columns / width), 7))) // 2
    else:
        left = (all_columns - int(round(width * (all_lines / height), 7))) // 2
    lines, in_line = all_lines - 2 * top, all_columns - 2 * left
    shrunk = lines, in_line
    if media.most_tiles:
        ratio = sqrt(lines * in_line / (media.most_tiles * side**2))
        if ratio > MOST_MORE:
            shrunk = int(lines // ratio), int(in_line // ratio)
    return TileGrid(rows, columns, top, left, lines, in_line, *shrunk)


def _best_grid(width: int, height: int, side: int, shape: FillTiles) -> tuple[int, int]:
    """Rows and columns of tiles whose shape is nearest to the picture's. Of equal shapes more tiles
    are taken, as long as the picture has more than half of their pixels."""
    numbers = range(1, shape.most + 1)
    grids = [(w, h) for w in numbers for h in numbers if shape.least <= w * h <= shape.most]
    best, least = (1, 1), float("inf")
    for w, h in sorted(grids, key=lambda grid: grid[0] * grid[1]):
        difference = abs(width / height - w / h)
        has_enough = width * height > 0.5 * side * side * w * h
        if difference < least or (difference == least and has_enough):
            best, least = (w, h), difference
    return best[1], best[0]


def _cut(pixels: NDArray[np.uint8], side: int) -> list[NDArray[np.uint8]]:
    """Line by line."""
    height, width = pixels.shape[:2]
    return [
        pixels[top : top + side, left : left + side]
        for top in range(0, height, side)
        for left in range(0, width, side)
    ]


def _fitting_size(width: int, height: int, shape: FitPixels | FitEdge) -> tuple[int, int]:
    """Height and width in whole factors, as the models' own processors round them."""
    if isinstance(shape, FitEdge):
        ratio = max(height / shape.longest_edge, width / shape.longest_edge)
        if ratio > 1:
            height, width = floor(height / ratio), floor(width / ratio)
        lines, columns = (max(ceil(side / shape.factor), 1) for side in (height, width))
        return lines * shape.factor, columns * shape.factor
    if max(width, height) > MAX_RATIO * min(width, height):
        raise BadPicture(
            f"has {width} x {height} pixels; a side may be {MAX_RATIO} times as long as the other "
            "at most: crop it"
        )
    factor = shape.factor
    new_height, new_width = round(height / factor) * factor, round(width / factor) * factor
    if new_height * new_width > shape.most:
        shrink = sqrt(height * width / shape.most)
        new_height = max(factor, floor(height / shrink / factor) * factor)
        new_width = max(factor, floor(width / shrink / factor) * factor)
    elif new_height * new_width < shape.least:
        grow = sqrt(shape.least / (height * width))
        new_height = ceil(height * grow / factor) * factor
        new_width = ceil(width * grow / factor) * factor
    return new_height, new_width


def _size_by_longest(width: int, height: int, edge: int) -> tuple[int, int]:
    """Height and width with this longest edge, and the other one even, in the steps and the
    rounding of the models' processors."""
    ratio = width / height
    if width >= height:
        width, height = edge, int(edge / ratio)
        height += height % 2
    else:
        width, height = int(edge * ratio), edge
        width += width % 2
    width, height = max(width, 1), max(height, 1)
    ratio = width / height
    if width >= height and width > MAX_EDGE:
        width, height = MAX_EDGE, int(MAX_EDGE / ratio)
    elif height > width and height > MAX_EDGE:
        width, height = int(MAX_EDGE * ratio), MAX_EDGE
    return max(height, 1), max(width, 1)


def _size_in_tiles(height: int, width: int, side: int) -> tuple[int, int]:
    """The next larger size of whole tiles."""
    ratio = width / height
    if width >= height:
        width = ceil(width / side) * side
        height = int(width / ratio)
    else:
        height = ceil(height / side) * side
        width = int(height * ratio)
    return ceil(height / side) * side, ceil(width / side) * side


def _resized(image: Image.Image, height: int, width: int, spec: PictureSpec) -> Image.Image:
    if height * width > MAX_PIXELS:
        own = " x ".join(map(str, image.size))
        raise BadPicture(f"has {own} pixels, too narrow to be resized; crop it")
    return image.resize((width, height), resample=spec.resample)


def _tile(pixels: NDArray[np.uint8], spec: PictureSpec, tiles: TileGrid | None = None) -> MediaItem:
    height, width = pixels.shape[:2]
    data = pixels.tobytes()
    return MediaItem(
        digest=_digest(data, height, width, spec, tiles),
        height=height,
        width=width,
        pixels=data,
        scale=spec.scale,
        mean=spec.mean,
        std=spec.std,
        tiles=tiles,
    )


def _decode(data: bytes) -> Image.Image:
    from PIL import Image, UnidentifiedImageError

    # The size is checked here, before pixels are decoded; a caller's own bound stays as it was.
    own_bound, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            image = Image.open(io.BytesIO(data), formats=FORMATS)
            _check_size(*image.size)
            image.load()
            return _upright(image)
        except BadPicture:
            raise
        except UnidentifiedImageError:
            raise BadPicture(
                f"is none of the formats that are read: {', '.join(FORMATS)}"
            ) from None
        except MemoryError:
            raise BadPicture("takes too much memory to decode; make it smaller") from None
        except Exception as error:  # decoders raise whatever a broken file leads them to
            raise BadPicture(f"cannot be decoded ({type(error).__name__}); save it anew") from None
        finally:
            Image.MAX_IMAGE_PIXELS = own_bound


def _check_size(width: int, height: int) -> None:
    if width < 1 or height < 1 or width * height > MAX_PIXELS:
        raise BadPicture(
            f"has {width} x {height} pixels; at most {MAX_PIXELS} are read: make it smaller"
        )


def _upright(image: Image.Image) -> Image.Image:
    """In RGB, turned as its EXIF data says."""
    from PIL import ImageOps

    return ImageOps.exif_transpose(image).convert("RGB")


def _cropped_size(width: int, height: int, spec: PictureSpec, shape: CropToTile) -> tuple[int, int]:
    if shape.shortest_edge is None:
        return spec.size
    short, long = min(height, width), max(height, width)
    new_short, new_long = shape.shortest_edge, int(shape.shortest_edge * long / short)
    return (new_long, new_short) if width <= height else (new_short, new_long)


def _middle(pixels: NDArray[np.uint8], height: int, width: int) -> NDArray[np.uint8]:
    """Cut out of the middle; black where the picture is smaller."""
    own_height, own_width = pixels.shape[:2]
    top, left = (own_height - height) // 2, (own_width - width) // 2
    if top >= 0 and left >= 0:
        return pixels[top : top + height, left : left + width]
    full = np.zeros((max(height, own_height), max(width, own_width), 3), np.uint8)
    pad_top, pad_left = (
        ceil((full.shape[0] - own_height) / 2), ceil((full.shape[1] - own_width) / 2)
    )  # fmt: skip
    full[pad_top : pad_top + own_height, pad_left : pad_left + own_width] = pixels
    top, left = max(0, top + pad_top), max(0, left + pad_left)
    return full[top : top + height, left : left + width]


def _digest(
    pixels: bytes, height: int, width: int, spec: PictureSpec, tiles: TileGrid | None
) -> bytes:
    """Of the pixels and of all that makes rows of them."""
    numbers = struct.pack("<2q7d", height, width, spec.scale, *spec.mean, *spec.std)
    if tiles is not None:
        numbers += struct.pack("<8q", *msgspec.structs.astuple(tiles))
    return hashlib.blake2b(VERSION + numbers + pixels, digest_size=16).digest()
