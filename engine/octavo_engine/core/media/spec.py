"""How a model wants its pictures or sounds prepared, read from its preprocessor_config.json."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

from octavo_engine.errors import ConfigError, ModelError
from octavo_engine.models.vision_config import MAX_TILES, MediaConfig, read_media_config

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from octavo_engine.weights.source import ModelFiles

_CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
_CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
_LANCZOS, _BILINEAR, _BICUBIC = 1, 2, 3  # as Pillow counts its filters
MAX_EDGE = 4096  # pixels of a side that a picture is resized to before it is split
_MAX_FILE_BYTES = 1 << 20
_SPECTROGRAM = {"sampling_rate": 16_000, "hop_length": 160, "n_fft": 400}
_ROWS_A_SECOND = 50
_PIXELS = (
    "do_normalize", "do_rescale", "do_resize", "image_mean", "image_std", "resample",
    "rescale_factor", "size",
)  # fmt: skip
# What --mm-processor-kwargs may replace, by family: fields that make the pixels.
_OVERRIDABLE = {
    "qwen2_vl": tuple(sorted(("max_pixels", "min_pixels", *_PIXELS))),
    "pixtral": _PIXELS,
    "llava": tuple(sorted(("crop_size", "do_center_crop", *_PIXELS))),
    "llava_next": tuple(sorted(("crop_size", "do_center_crop", *_PIXELS))),
    "llava_onevision": _PIXELS,
    "gemma3": _PIXELS,
    "idefics3": tuple(sorted(("do_image_splitting", "max_image_size", *_PIXELS))),
    "internvl": tuple(sorted(("crop_to_patches", "max_patches", "min_patches", *_PIXELS))),
}


@dataclass(frozen=True, slots=True)
class CropToTile:
    """One tile of each picture: resized, and cut out of the middle."""

    shortest_edge: int | None  # resized so that it has this; None: to the tile whatever the shape


@dataclass(frozen=True, slots=True)
class SplitIntoTiles:
    """A picture is resized, stretched to whole tiles and cut into them; the last tile is the whole
    picture, small. One that fits a tile is only that."""

    longest_edge: int | None  # resized so that it has this; None: to `size` whatever the shape
    size: tuple[int, int]
    is_split: bool  # otherwise only the whole picture


@dataclass(frozen=True, slots=True)
class FillTiles:
    """A picture is stretched to as many tiles as suit its shape, and cut into them; the last tile
    is the whole picture, small. One that suits one tile is only that."""

    least: int
    most: int


@dataclass(frozen=True, slots=True)
class PadToTiles:
    """A picture is resized into the grid of tiles that shows most of it, with black around it, and
    cut; the whole picture, small, comes before. All are encoded as one."""

    grids: tuple[tuple[int, int], ...]  # rows and columns
    # In a prompt with several pictures each is one tile, with the mean colour around it.
    only_alone: bool = False


@dataclass(frozen=True, slots=True)
class FitPixels:
    """One tile of each picture, of nearly its own shape: sides of whole `factor`s, and so many
    pixels."""

    factor: int
    least: int
    most: int


@dataclass(frozen=True, slots=True)
class FitEdge:
    """One tile of each picture, of nearly its own shape: made smaller where its longest edge is
    above this, and stretched to sides of whole `factor`s."""

    factor: int
    longest_edge: int


Shape: TypeAlias = CropToTile | SplitIntoTiles | FillTiles | PadToTiles | FitPixels | FitEdge


@dataclass(frozen=True, slots=True, kw_only=True)
class PictureSpec:
    """How a picture becomes tiles, and tiles numbers."""

    media: MediaConfig
    shape: Shape
    size: tuple[int, int]  # height and width of a tile; of FitPixels and FitEdge it says nothing
    resample: int  # as Pillow counts its filters
    scale: float
    mean: tuple[float, float, float]
    std: tuple[float, float, float]

    def among(self, num_pictures: int) -> PictureSpec:
        """How a picture is prepared in a prompt of so many."""
        if num_pictures < 2 or not isinstance(self.shape, PadToTiles) or not self.shape.only_alone:
            return self
        return replace(self, shape=PadToTiles(()))


@dataclass(frozen=True, slots=True)
class SoundSpec:
    """How a sound becomes rows of a spectrogram: as Whisper's do."""

    media: MediaConfig

    @property
    def max_seconds(self) -> float:
        return self.media.vision.num_tokens / _ROWS_A_SECOND

    def among(self, num_sounds: int) -> SoundSpec:
        return self


MediaSpec: TypeAlias = PictureSpec | SoundSpec


def read_media_spec(
    files: ModelFiles, overrides: Mapping[str, Any] | None = None
) -> MediaSpec | None:
    """None where the model neither sees nor hears. Raises as `read_picture_spec` does."""
    media = None if files.kind == "gguf" else read_media_config(files.config)
    if media is None or media.kind == "image":
        return read_picture_spec(files, overrides)
    values = _read_preprocessor(files.path)
    wanted = {"feature_size": media.vision.num_mels, **_SPECTROGRAM}
    for name, value in wanted.items():
        if values.get(name, value) != value:
            raise ModelError(
                f"preprocessor_config.json: {name} must be {value}; got {values[name]!r:.40}"
            )
    return SoundSpec(media)


def read_picture_spec(
    files: ModelFiles, overrides: Mapping[str, Any] | None = None
) -> PictureSpec | None:
    """None where the model does not see. Raises ModelError where it does and it is not known
    how, ConfigError for `overrides` that this family does not take."""
    if files.kind == "gguf":
        return None
    media = read_media_config(files.config)
    if media is None or media.kind != "image":
        return None
    given = dict(overrides or {})
    _check_overrides(given, media.family)
    values = _read_preprocessor(files.path)
    if media.family == "internvl":  # its processor cuts pictures whatever the file says
        values.pop("crop_to_patches", None)
    values |= given
    if media.family == "qwen2_vl":
        return _read_qwen2_vl(values, media, given)
    if media.family == "pixtral":
        return _read_pixtral(values, media, is_given="size" in given)
    return _READERS[media.family](values, media)


def check_picture_overrides(files: ModelFiles | None, overrides: Mapping[str, Any]) -> None:
    """Raises ConfigError where pictures of this model cannot be prepared with them."""
    if not overrides:
        return
    try:
        spec = None if files is None else read_picture_spec(files, overrides)
    except ModelError as error:
        raise ConfigError(f"--mm-processor-kwargs cannot be applied: {error}") from None
    if spec is None:
        raise ConfigError(
            "--mm-processor-kwargs is for models that take pictures; this model takes none: leave "
            "it out"
        )


def _check_overrides(given: Mapping[str, Any], family: str) -> None:
    known = _OVERRIDABLE[family]
    for name in given:
        if name not in known:
            raise ConfigError(
                f"--mm-processor-kwargs: {name:.60} is not supported for {family} models; they "
                f"take {', '.join(known)}"
            )


def _read_preprocessor(folder: Path) -> dict[str, Any]:
    for name in ("preprocessor_config.json", "processor_config.json"):
        file = folder / name
        if not file.is_file():
            continue
        if file.stat().st_size > _MAX_FILE_BYTES:
            raise ModelError(f"{file} has more than {_MAX_FILE_BYTES} bytes")
        try:
            value = json.loads(file.read_bytes())
        except (ValueError, RecursionError) as error:
            raise ModelError(f"{file} is no JSON: {error}") from None
        if isinstance(value, dict) and name == "processor_config.json":
            value = value.get("image_processor")
        if isinstance(value, dict):
            return value
    raise ModelError(f"{folder / 'preprocessor_config.json'} is missing: it says how pictures look")


def _read_clip(values: dict[str, Any], media: MediaConfig) -> PictureSpec:
    side, is_clip = media.vision.image_size, media.vision.has_class
    shortest, size = _sizes(values.get("size"), "shortest_edge", default=side if is_clip else None)
    crops = values.get("do_center_crop", is_clip) is True
    if crops:
        _, size = _sizes(values.get("crop_size"), "shortest_edge", fallback=(side, side))
    else:
        shortest = None
    mean, std = (_CLIP_MEAN, _CLIP_STD) if is_clip else ((0.5,) * 3, (0.5,) * 3)
    return _with_numbers(
        values, media, CropToTile(shortest), size, resample=_BICUBIC, mean=mean, std=std
    )


def _read_llava_next(values: dict[str, Any], media: MediaConfig) -> PictureSpec:
    spec = _read_clip(values, media)
    side = media.vision.image_size
    if spec.shape not in (CropToTile(side), CropToTile(None)):
        raise ModelError(f"preprocessor_config.json: size must be {side}, as the tower's")
    _check_grids(values, media)
    return replace(spec, shape=PadToTiles(media.grids))


def _read_llava_onevision(values: dict[str, Any], media: MediaConfig) -> PictureSpec:
    side = media.vision.image_size
    edge, size = _sizes(values.get("size"), "shortest_edge", fallback=(side, side))
    if edge is not None and not isinstance(values["size"], int):
        raise ModelError("preprocessor_config.json: size must have height and width")
    if values.get("do_center_crop"):
        raise ModelError("preprocessor_config.json: do_center_crop must be false")
    _check_grids(values, media)
    return _with_numbers(
        values, media, PadToTiles(media.grids, only_alone=True), size, resample=_BICUBIC,
        mean=_CLIP_MEAN, std=_CLIP_STD,
    )  # fmt: skip


def _check_grids(values: dict[str, Any], media: MediaConfig) -> None:
    side = media.vision.image_size
    sizes = values.get("image_grid_pinpoints")
    own = [[rows * side, columns * side] for rows, columns in media.grids]
    if sizes is not None and [list(size) for size in sizes] != own:
        raise ModelError(
            "preprocessor_config.json: image_grid_pinpoints must be those of config.json"
        )


def _read_idefics3(values: dict[str, Any], media: MediaConfig) -> PictureSpec:
    longest, size = _sizes(values.get("size"), "longest_edge", default=4 * 364)
    if longest is None and max(size) > MAX_EDGE:
        raise ModelError(
            f"preprocessor_config.json: size must be at most {MAX_EDGE} x {MAX_EDGE}; got {size}"
        )
    _, tile = _sizes(values.get("max_image_size"), "longest_edge", fallback=(364, 364))
    shape = SplitIntoTiles(longest, size, values.get("do_image_splitting", True) is True)
    half = (0.5,) * 3
    return _with_numbers(values, media, shape, tile, resample=_LANCZOS, mean=half, std=half)


def _read_internvl(values: dict[str, Any], media: MediaConfig) -> PictureSpec:
    side = media.vision.image_size
    edge, size = _sizes(values.get("size"), "shortest_edge", fallback=(side, side))
    if edge is not None and not isinstance(values["size"], int):
        raise ModelError("preprocessor_config.json: size must have height and width")
    least, most = values.get("min_patches", 1), values.get("max_patches", 12)
    if values.get("crop_to_patches") is False:
        least = most = 1
    if not (type(least) is int and type(most) is int and 1 <= least <= most <= MAX_TILES):
        raise ModelError(
            "preprocessor_config.json: min_patches and max_patches must be from 1 to "
            f"{MAX_TILES}, the former at most the latter; got {least!r:.40} and {most!r:.40}"
        )
    return _with_numbers(
        values, media, FillTiles(least, most), size, resample=_BICUBIC, mean=_CLIP_MEAN,
        std=_CLIP_STD,
    )  # fmt: skip


def _read_gemma3(values: dict[str, Any], media: MediaConfig) -> PictureSpec:
    if values.get("do_pan_and_scan"):
        raise ModelError(
            "preprocessor_config.json: do_pan_and_scan is not supported; set it to false"
        )
    edge, size = _sizes(values.get("size"), "shortest_edge", fallback=(224, 224))
    if edge is not None:
        raise ModelError("preprocessor_config.json: size must have height and width")
    half = (0.5,) * 3
    return _with_numbers(
        values, media, CropToTile(None), size, resample=_BILINEAR, mean=half, std=half
    )


_READERS = {
    "llava": _read_clip,
    "llava_next": _read_llava_next,
    "llava_onevision": _read_llava_onevision,
    "idefics3": _read_idefics3,
    "internvl": _read_internvl,
    "gemma3": _read_gemma3,
}


def _read_qwen2_vl(
    values: dict[str, Any], media: MediaConfig, given: Mapping[str, Any]
) -> PictureSpec:
    """A file's `max_pixels` is lowered to what the tower reads here; one that is given is not."""
    vision = media.vision
    factor = vision.patch_size * media.shuffle
    most_here = vision.num_tokens * vision.patch_size**2
    for name, own in (
        ("patch_size", vision.patch_size), ("merge_size", media.shuffle),
        ("temporal_patch_size", vision.num_frames),
    ):  # fmt: skip
        if values.get(name, own) != own:
            raise ModelError(f"preprocessor_config.json: {name} must be {own}, as the tower's")
    if "size" in given:  # it goes before what the file says in the older spelling
        older = ("min_pixels", "max_pixels")
        values = {k: v for k, v in values.items() if k not in older or k in given}
    least = _pixels(values, "min_pixels", "shortest_edge", 56 * 56)
    most = _pixels(values, "max_pixels", "longest_edge", most_here)
    is_given = "max_pixels" in given or "size" in given
    if is_given and most > most_here:
        raise ModelError(f"max_pixels must be at most {most_here}; got {most}")
    most = min(most, most_here)
    if not factor**2 <= most or least > most:
        raise ModelError(
            f"preprocessor_config.json: min_pixels is {least} and max_pixels {most}; the latter "
            f"must be at least {factor**2} and not below the former"
        )
    shape = FitPixels(factor, least, most)
    return _with_numbers(
        values, media, shape, (0, 0), resample=_BICUBIC, mean=_CLIP_MEAN, std=_CLIP_STD
    )


def _read_pixtral(values: dict[str, Any], media: MediaConfig, *, is_given: bool) -> PictureSpec:
    """A file's `longest_edge` is lowered to what the tower reads here of a square; one that is
    given is not. Its `patch_size` is the processor's own business, and is not read."""
    vision = media.vision
    factor = vision.patch_size * media.shuffle
    edge, _ = _sizes(values.get("size"), "longest_edge", default=1024)
    if edge is None:
        raise ModelError("preprocessor_config.json: size must have a longest_edge")
    most = math.isqrt(vision.num_tokens) * vision.patch_size // factor * factor
    if is_given and edge > most:
        raise ModelError(f"size: longest_edge must be at most {most}; got {edge}")
    return _with_numbers(
        values, media, FitEdge(factor, min(edge, most)), (0, 0), resample=_BICUBIC,
        mean=_CLIP_MEAN, std=_CLIP_STD,
    )  # fmt: skip


def _pixels(values: dict[str, Any], name: str, in_size: str, default: int) -> int:
    """In today's spelling or the older one, which goes before."""
    size = values.get("size")
    value = values.get(name)
    if value is None and isinstance(size, dict):
        value = size.get(in_size, size.get(name))
    value = default if value is None else value
    if type(value) is not int or value < 1:
        raise ModelError(f"preprocessor_config.json: {name} must be a positive number of pixels")
    return value


def _with_numbers(
    values: dict[str, Any], media: MediaConfig, shape: Shape,
    tile: tuple[int, int], *, resample: int, mean: tuple[float, ...], std: tuple[float, ...],
) -> PictureSpec:  # fmt: skip
    """`resample`, `mean` and `std` are the family's own, where its file does not say."""
    side = media.vision.image_size
    for name in ("do_resize", "do_rescale", "do_normalize"):
        if values.get(name) is False:
            raise ModelError(f"preprocessor_config.json: {name} must be true")
    if tile != (side, side):
        raise ModelError(
            f"preprocessor_config.json: pictures become {tile}; the tower reads {(side, side)}"
        )
    resample = values.get("resample", resample)
    if not isinstance(resample, int) or not 0 <= resample <= 5:
        raise ModelError(f"preprocessor_config.json: resample must be 0 to 5; got {resample!r}")
    return PictureSpec(
        media=media,
        shape=shape,
        size=tile,
        resample=resample,
        scale=_numbers([values.get("rescale_factor", 1 / 255)] * 3, "rescale_factor")[0],
        mean=_numbers(values.get("image_mean", mean), "image_mean"),
        std=_numbers(values.get("image_std", std), "image_std"),
    )


def _sizes(
    value: Any, edge_name: str, *, default: int | None = None, fallback: tuple[int, int] = (0, 0)
) -> tuple[int | None, tuple[int, int]]:
    """The edge of that name, if that is given, and height and width."""
    if value is None:
        return default, fallback
    if isinstance(value, int) and value > 0:
        return value, (value, value)
    if isinstance(value, dict):
        edge = value.get(edge_name)
        if isinstance(edge, int) and edge > 0:
            return edge, (edge, edge)
        height, width = value.get("height"), value.get("width")
        if isinstance(height, int) and isinstance(width, int) and min(height, width) > 0:
            return None, (height, width)
    raise ModelError(f"preprocessor_config.json: a size of {value!r:.80} is not understood")


def _numbers(value: Any, name: str) -> tuple[float, float, float]:
    is_list = isinstance(value, list | tuple) and len(value) == 3
    if is_list and all(isinstance(v, int | float) and math.isfinite(v) for v in value):
        red, green, blue = map(float, value)
        if name == "image_mean" or min(red, green, blue) > 0:
            return red, green, blue
    raise ModelError(f"preprocessor_config.json: {name} must be numbers, one a colour")
