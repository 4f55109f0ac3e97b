"""From a picture file's bytes to the pixels that the encoder reads. Runs in worker processes.

Sizes are checked before anything is decoded. Resizing is Pillow's own, so that pixels are those
that transformers' processors make.
"""

from __future__ import annotations

import hashlib
import io
import struct
import warnings
from math import ceil
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from octavo_engine.state.media import MediaItem

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from PIL import Image

    from octavo_engine.core.media.spec import PictureSpec

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
MAX_PIXELS = 40_000_000  # of a picture, decoded or resized
VERSION = b"octavo-media-1"  # raise it when preprocessing changes: old and new must never meet


class BadPicture(ValueError):
    """What is wrong with it, for its sender."""


class PreparedPicture(NamedTuple):
    """What a worker sends back: one of both."""

    item: MediaItem | None
    problem: str = ""


def prepare(data: bytes, spec: PictureSpec) -> PreparedPicture:
    """Never raises for what is in the file."""
    try:
        return PreparedPicture(prepare_image(_decode(data), spec))
    except BadPicture as error:
        return PreparedPicture(None, str(error))


def prepare_decoded(image: Image.Image, spec: PictureSpec) -> MediaItem:
    """Of a picture that a caller has opened, whatever its mode. Raises BadPicture."""
    _check_size(*image.size)
    return prepare_image(_upright(image), spec)


def prepare_image(image: Image.Image, spec: PictureSpec) -> MediaItem:
    """Of a picture in RGB. Raises BadPicture."""
    width, height = image.size
    new_height, new_width = _new_size(height, width, spec)
    if new_height * new_width > MAX_PIXELS:
        raise BadPicture(f"has {width} x {height} pixels, too narrow to be resized; crop it")
    resized = np.asarray(image.resize((new_width, new_height), resample=spec.resample), np.uint8)
    pixels = _middle(resized, *spec.size).tobytes()
    return MediaItem(
        digest=_digest(pixels, spec),
        height=spec.size[0],
        width=spec.size[1],
        pixels=pixels,
        scale=spec.scale,
        mean=spec.mean,
        std=spec.std,
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


def _new_size(height: int, width: int, spec: PictureSpec) -> tuple[int, int]:
    if spec.shortest_edge is None:
        return spec.size
    short, long = min(height, width), max(height, width)
    new_short, new_long = spec.shortest_edge, int(spec.shortest_edge * long / short)
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


def _digest(pixels: bytes, spec: PictureSpec) -> bytes:
    """Of the pixels and of all that makes rows of them."""
    numbers = struct.pack("<2q7d", *spec.size, spec.scale, *spec.mean, *spec.std)
    return hashlib.blake2b(VERSION + numbers + pixels, digest_size=16).digest()
