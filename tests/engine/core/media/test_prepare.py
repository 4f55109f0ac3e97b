"""Pixels are those of transformers' processors; what is broken or too large is refused."""

from __future__ import annotations

import random
import resource
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from PIL import Image

from octavo_engine.backends.media import pixel_rows, tiles_of
from octavo_engine.core.media import prepare as preparing
from octavo_engine.core.media.prepare import PreparationResult, prepare
from octavo_engine.core.media.prompt import PictureTokens, expand
from octavo_engine.core.media.spec import FitPixels, check_picture_overrides, read_picture_spec
from octavo_engine.errors import ConfigError, ModelError
from octavo_engine.models.vision_config import read_media_config
from octavo_engine.tokenization.text_tokenizer import TextTokenizer
from octavo_engine.weights.source import resolve_model
from tests.engine.models.tiny_seeing import BEGIN, END, PLACEHOLDER, normalised, seeing_model
from tests.fakes.seeing import (
    ANYRES,
    FILLING,
    FITTING,
    FITTING_LARGE,
    LINED,
    PADDING,
    PREPROCESSOR,
    SPLITTING,
    STRETCHING,
    encoded,
    tokenizer,
    write_seeing_model,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from octavo_engine.core.media.prepare import PreparedPicture
    from octavo_engine.core.media.prompt import PromptMedia
    from octavo_engine.core.media.spec import PictureSpec
    from octavo_engine.state.media import MediaItem
    from octavo_engine.weights.source import ModelFiles


def spec() -> PictureSpec:
    from octavo_engine.core.media.spec import _read_clip

    media = read_media_config(seeing_model("llava").config)
    assert media is not None
    return _read_clip(PREPROCESSOR, media)


def splitting_spec(**overrides: Any) -> PictureSpec:
    from octavo_engine.core.media.spec import _read_idefics3

    return _read_idefics3(SPLITTING | overrides, seeing_model("smolvlm").media)


def tiles(data: bytes, spec: PictureSpec) -> tuple[MediaItem, ...]:
    picture, problem = prepare(data, spec)
    assert picture is not None, problem
    return picture.tiles


def only_tile(data: bytes, spec: PictureSpec) -> MediaItem:
    (tile,) = tiles(data, spec)
    return tile


def noise(width: int, height: int, mode: str = "RGB") -> Image.Image:
    generator = np.random.default_rng(width * 7919 + height)
    pixels: NDArray[np.uint8] = generator.integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(pixels).convert(mode)


SIZES = [(42, 42), (100, 60), (61, 200), (20, 30), (43, 42), (1, 1), (640, 480)]


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_pixels_are_those_of_transformers(width: int, height: int) -> None:
    from transformers import CLIPImageProcessorPil

    processor = CLIPImageProcessorPil(**PREPROCESSOR)
    image = noise(width, height)
    truth = np.asarray(processor(image, return_tensors="np")["pixel_values"][0])
    np.testing.assert_array_equal(normalised(only_tile(encoded(image), spec())), truth)


SPLIT_SIZES = [(80, 60), (30, 100), (42, 42), (126, 126), (200, 40), (40, 41), (1, 1), (1, 900),
               (640, 480), (333, 500)]  # fmt: skip
SPLIT_OVERRIDES: list[dict[str, Any]] = [
    {},
    {"size": {"longest_edge": 84}},
    {"size": {"height": 50, "width": 120}},
    {"do_image_splitting": False},
    {"resample": 3, "image_mean": [0.1, 0.2, 0.3], "rescale_factor": 0.5},
]


def transformers_processor(overrides: dict[str, Any]) -> Any:
    from transformers import Idefics3Processor, PreTrainedTokenizerFast
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    values = {k: v for k, v in SPLITTING.items() if k != "image_processor_type"} | overrides
    words = PreTrainedTokenizerFast(tokenizer_object=tokenizer("smolvlm"))
    num_rows = seeing_model("smolvlm").media.num_rows
    return Idefics3Processor(Idefics3ImageProcessorPil(**values), words, image_seq_len=num_rows)


@pytest.mark.parametrize("overrides", SPLIT_OVERRIDES, ids=lambda each: next(iter(each), ""))
def test_tiles_and_the_tokens_around_them_are_those_of_transformers(
    overrides: dict[str, Any],
) -> None:
    processor, spec = transformers_processor(overrides), splitting_spec(**overrides)
    words = TextTokenizer(tokenizer("smolvlm"), where="test")
    tokens = PictureTokens(spec.media, words)
    prompt = "user <image> what colour <image>\n\n is it"
    for size, other in zip(SPLIT_SIZES, SPLIT_SIZES[1:] + SPLIT_SIZES[:1], strict=True):
        images = [noise(*size), noise(*other)]
        truth = processor(images=[images], text=prompt)
        prepared = [prepare(encoded(image), spec).picture for image in images]
        pictures = [picture for picture in prepared if picture is not None]
        ids, media = expand(words.encode(prompt), pictures, tokens)
        assert ids == truth["input_ids"][0]
        found = [normalised(tile) for picture in pictures for tile in picture.tiles]
        np.testing.assert_array_equal(np.stack(found), np.asarray(truth["pixel_values"])[0])
        assert [span.digest for span in media.spans] == [
            tile.digest for picture in pictures for tile in picture.tiles
        ]
        assert all(set(ids[span.first : span.end]) == {PLACEHOLDER} for span in media.spans)
        first, second = media.places
        assert ids[: first.first] == [1] and ids[second.end :] == words.encode("\n\n is it")
        assert ids[first.end : second.first] == words.encode("what colour")


def test_a_picture_of_one_colour_has_equal_tiles_that_are_encoded_once() -> None:
    spec = splitting_spec()
    words = TextTokenizer(tokenizer("smolvlm"), where="test")
    picture = prepare(encoded(Image.new("RGB", (100, 100), "red")), spec).picture
    assert picture is not None and (picture.rows, picture.columns) == (3, 3)
    _, media = expand([PLACEHOLDER], [picture], PictureTokens(spec.media, words))
    assert (len(media.spans), len(media.items), len(media.places)) == (10, 1, 1)


def test_settings_of_tiles_that_the_tower_cannot_read_are_refused() -> None:
    for overrides, message in (
        ({"max_image_size": {"longest_edge": 28}}, "pictures become (28, 28)"),
        ({"size": {"height": 9000, "width": 42}}, "size must be at most 4096"),
        ({"size": {"shortest_edge": 42}}, "is not understood"),
        ({"do_resize": False}, "do_resize must be true"),
    ):
        with pytest.raises(ModelError) as caught:
            splitting_spec(**overrides)
        assert message in str(caught.value)


def test_a_tokenizer_without_the_tokens_of_pictures_is_refused() -> None:
    words = TextTokenizer(tokenizer("llava"), where="test")
    with pytest.raises(ModelError, match="must have the tokens <fake_token_around_image>"):
        PictureTokens(seeing_model("smolvlm").media, words)


def gemma3_spec(**overrides: Any) -> PictureSpec:
    from octavo_engine.core.media.spec import _read_gemma3

    return _read_gemma3(STRETCHING | overrides, seeing_model("gemma3").media)


def gemma3_processor() -> Any:
    from transformers import Gemma3Processor, PreTrainedTokenizerFast
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    values = {k: v for k, v in STRETCHING.items() if k != "image_processor_type"}
    special = {
        "image_token": "<image_soft_token>", "boi_token": "<start_of_image>",
        "eoi_token": "<end_of_image>",
    }  # fmt: skip
    words = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer("gemma3"), extra_special_tokens=special
    )
    num_rows = seeing_model("gemma3").media.num_rows
    return Gemma3Processor(Gemma3ImageProcessorPil(**values), words, image_seq_length=num_rows)


def check_tiles(
    images: Sequence[Image.Image],
    prompt: str,
    spec: PictureSpec,
    words: TextTokenizer,
    truth: Mapping[str, Any],
) -> tuple[list[PreparedPicture], PromptMedia]:
    """Token ids and tiles are those of the other library."""
    prepared = [prepare(encoded(image), spec).picture for image in images]
    pictures = [picture for picture in prepared if picture is not None]
    ids, media = expand(words.encode(prompt), pictures, PictureTokens(spec.media, words))
    assert ids == list(truth["input_ids"][0])
    found = [normalised(tile) for picture in pictures for tile in picture.tiles]
    np.testing.assert_array_equal(np.stack(found), np.asarray(truth["pixel_values"]))
    assert all(set(ids[s.first : s.end]) == {PLACEHOLDER} for s in media.spans)
    return pictures, media


@pytest.mark.parametrize(
    "prompt",
    [
        "user <start_of_image> what <start_of_image>",
        "user\n<start_of_image>what\n\n<start_of_image>\n\nis\n\nit",
        "<start_of_image><start_of_image>\n",
        "\n\n<start_of_image>\n<start_of_image> is\n",
    ],
)
def test_pictures_of_gemma_3_and_the_newlines_around_them_are_those_of_transformers(
    prompt: str,
) -> None:
    processor, spec = gemma3_processor(), gemma3_spec()
    words = TextTokenizer(tokenizer("gemma3"), where="test")
    for sizes in ([(80, 60), (30, 100)], [(1, 1), (640, 480)], [(42, 42), (1, 900)]):
        images = [noise(*size) for size in sizes]
        truth = processor(images=[images], text=prompt)
        _, media = check_tiles(images, prompt, spec, words, truth)
        assert all(span.is_two_way for span in media.spans)


def test_newlines_apart_from_pictures_stay_as_they_were_read() -> None:
    words = TextTokenizer(tokenizer("gemma3"), where="test")
    one = words.encode("\n")
    tokens = PictureTokens(seeing_model("gemma3").media, words)
    ids = [1, *one, *one, 2, *one, tokens.placeholder, 3, *one, *one]
    two = words.encode("\n\n")
    three = words.encode("\n\n\n")
    assert tokens.with_newlines(ids) == [
        1, *one, *one, 2, *three, tokens.placeholder, *two, 3, *one, *one
    ]  # fmt: skip


def test_settings_of_gemma_3_that_are_not_computed_are_refused() -> None:
    for overrides, message in (
        ({"do_pan_and_scan": True}, "do_pan_and_scan is not supported"),
        ({"size": {"shortest_edge": 42}}, "size must have height and width"),
        ({"size": {"height": 28, "width": 42}}, "pictures become (28, 42)"),
    ):
        with pytest.raises(ModelError) as caught:
            gemma3_spec(**overrides)
        assert message in str(caught.value)


def made_spec(folder: Path, name: str, **overrides: Any) -> PictureSpec:
    files = resolve_model(str(write_seeing_model(folder / name, name)))
    spec = read_picture_spec(files, overrides)
    assert spec is not None
    return spec


@pytest.mark.parametrize(
    "overrides", [{}, {"resample": 2, "image_std": [0.5, 1.0, 2.0]}],
    ids=lambda each: next(iter(each), ""),
)  # fmt: skip
def test_tiles_of_llava_next_are_those_of_transformers(
    tmp_path: Path, overrides: dict[str, Any]
) -> None:
    from transformers import LlavaNextProcessor, PreTrainedTokenizerFast
    from transformers.models.llava_next.image_processing_pil_llava_next import (
        LlavaNextImageProcessorPil,
    )

    left_out = ("image_processor_type", "aspect_ratio_setting")
    values = {k: v for k, v in PADDING.items() if k not in left_out} | overrides
    processor = LlavaNextProcessor(
        LlavaNextImageProcessorPil(**values),
        PreTrainedTokenizerFast(tokenizer_object=tokenizer("llava")),
        patch_size=7, vision_feature_select_strategy="default", num_additional_image_tokens=1,
    )  # fmt: skip
    spec = made_spec(tmp_path, "llava-next", **overrides)
    words = TextTokenizer(tokenizer("llava"), where="test")
    counts = set()
    for size in [*SPLIT_SIZES, (500, 2), (85, 84), (84, 200)]:
        image = noise(*size)
        truth = processor(images=[image], text="user <image> what")
        picture = prepare(encoded(image), spec).picture
        assert picture is not None
        ids, media = expand(words.encode("user <image> what"), [picture], PictureTokens(
            spec.media, words
        ))  # fmt: skip
        assert ids == list(truth["input_ids"][0])
        (item,) = picture.tiles
        found = np.stack([normalised(tile) for tile in tiles_of(item, spec.media)])
        np.testing.assert_array_equal(found, np.asarray(truth["pixel_values"][0]))
        assert len(media.spans) == 1 and media.spans[0].length == len(ids) - 2
        counts.add(len(found))
    assert counts == {3, 4, 5}


def test_pictures_of_equal_tiles_and_other_edges_are_two(tmp_path: Path) -> None:
    """What is left out of their rows differs."""
    spec = made_spec(tmp_path, "llava-next")
    items = [
        only_tile(encoded(Image.new("RGB", size, "black")), spec)
        for size in [(84, 60), (84, 70), (84, 60)]
    ]
    assert items[0].pixels == items[1].pixels
    assert items[0].digest != items[1].digest and items[0].digest == items[2].digest


def test_settings_of_llava_next_that_are_not_computed_are_refused(tmp_path: Path) -> None:
    from octavo_engine.core.media.spec import _read_llava_next

    media = seeing_model("llava-next").media
    for overrides, message in (
        ({"image_grid_pinpoints": [[84, 84]]}, "must be those of config.json"),
        ({"size": {"shortest_edge": 60}}, "size must be 42, as the tower's"),
        ({"crop_size": {"height": 28, "width": 42}}, "pictures become (28, 42)"),
    ):
        with pytest.raises(ModelError) as caught:
            _read_llava_next(PADDING | overrides, media)
        assert message in str(caught.value)
    config = seeing_model("llava-next").config
    for changes, message in (
        ({"image_grid_pinpoints": [[84, 80]]}, "whole tiles of 42 pixels"),
        ({"image_grid_pinpoints": [[420, 420]]}, "fewer than 40"),
        ({"image_grid_pinpoints": []}, "must be a list of heights and widths"),
        ({"vision_feature_select_strategy": "full"}, "must be default"),
    ):
        with pytest.raises(ModelError) as caught:
            read_media_config(config | changes)
        assert message in str(caught.value)


def internvl_spec(folder: Path, **overrides: Any) -> PictureSpec:
    return made_spec(folder, "internvl", **overrides)


def internvl_processor(overrides: dict[str, Any]) -> Any:
    from transformers import InternVLProcessor, PreTrainedTokenizerFast
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

    class OnlyPictures(InternVLProcessor):
        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> None:
            """Its processor of films needs a library that is not here."""

    values = {k: v for k, v in FILLING.items() if k != "image_processor_type"} | overrides
    special = {
        "context_image_token": "<IMG_CONTEXT>", "start_image_token": "<img>",
        "end_image_token": "</img>", "video_token": "w20",
    }  # fmt: skip
    words = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer("internvl"), extra_special_tokens=special
    )
    return OnlyPictures(
        GotOcr2ImageProcessorPil(**values), words,
        image_seq_length=seeing_model("internvl").media.num_rows,
    )  # fmt: skip


FILLING_OVERRIDES: list[dict[str, Any]] = [
    {},
    {"max_patches": 3},
    {"min_patches": 4, "max_patches": 12},
    {"max_patches": 1, "resample": 2, "image_mean": [0.1, 0.2, 0.3]},
]


@pytest.mark.parametrize("overrides", FILLING_OVERRIDES, ids=lambda each: next(iter(each), ""))
def test_tiles_of_internvl_are_those_of_transformers(
    tmp_path: Path, overrides: dict[str, Any]
) -> None:
    processor, spec = internvl_processor(overrides), internvl_spec(tmp_path, **overrides)
    words = TextTokenizer(tokenizer("internvl"), where="test")
    prompt = "user <IMG_CONTEXT> what <IMG_CONTEXT> is it"
    counts: set[int] = set()
    for size, other in zip(SPLIT_SIZES, SPLIT_SIZES[1:] + SPLIT_SIZES[:1], strict=True):
        images = [noise(*size), noise(*other)]
        truth = processor(images=images, text=prompt)
        pictures, _ = check_tiles(images, prompt, spec, words, truth)
        counts.update(len(picture.tiles) for picture in pictures)
    assert (len(counts) > 1) == (overrides.get("max_patches") != 1)


def test_a_picture_of_internvl_is_one_tile_if_it_is_not_to_be_cut(tmp_path: Path) -> None:
    data = encoded(noise(640, 200))
    assert len(tiles(data, internvl_spec(tmp_path / "cut"))) == 4
    assert len(tiles(data, internvl_spec(tmp_path / "whole", crop_to_patches=False))) == 1


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"max_patches": 41}, "min_patches and max_patches must be from 1 to 40"),
        ({"min_patches": 7}, "got 7 and 6"),
        ({"size": {"shortest_edge": 42}}, "size must have height and width"),
        ({"size": {"height": 28, "width": 42}}, "pictures become (28, 42)"),
    ],
)
def test_settings_of_internvl_that_cannot_be_applied_are_refused(
    tmp_path: Path, overrides: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError) as caught:
        internvl_spec(tmp_path, **overrides)
    assert message in str(caught.value)


def test_a_tokenizer_without_the_tokens_around_pictures_of_internvl_is_refused() -> None:
    words = TextTokenizer(tokenizer("llava"), where="test")
    with pytest.raises(ModelError, match="must have the token <img>, which pictures need"):
        PictureTokens(seeing_model("internvl").media, words)


def qwen2_vl_spec(given: dict[str, Any] | None = None, **values: Any) -> PictureSpec:
    from octavo_engine.core.media.spec import _read_qwen2_vl

    given = given or {}
    return _read_qwen2_vl(FITTING | values | given, seeing_model("qwen2vl").media, given)


FITTING_SIZES = [(80, 60), (30, 100), (42, 42), (14, 14), (1, 1), (1, 200), (640, 480), (333, 7),
                 (21, 35), (7, 7), (49, 63), (5000, 30)]  # fmt: skip


@pytest.mark.parametrize(
    "given", [{}, {"max_pixels": 2000}, {"size": {"shortest_edge": 3000, "longest_edge": 9000}}],
    ids=lambda each: next(iter(each), ""),
)  # fmt: skip
def test_pixels_of_qwen2_vl_are_those_of_transformers(given: dict[str, Any]) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    values = {k: v for k, v in FITTING.items() if k != "image_processor_type"}
    if "size" in given:
        values = {k: v for k, v in values.items() if k not in ("min_pixels", "max_pixels")}
    processor, spec = Qwen2VLImageProcessorPil(**values | given), qwen2_vl_spec(given)
    tokens = PictureTokens(spec.media, TextTokenizer(tokenizer("qwen2vl"), where="test"))
    for size in FITTING_SIZES:
        image = noise(*size)
        truth = processor(image)
        picture = prepare(encoded(image), spec).picture
        assert picture is not None
        grid = np.asarray(truth["image_grid_thw"])[0]
        np.testing.assert_array_equal(
            pixel_rows(picture.tiles[0], spec.media), np.asarray(truth["pixel_values"])
        )
        ids, media = expand([1, BEGIN, PLACEHOLDER, END, 2], [picture], tokens)
        num_rows = int(grid.prod()) // 4
        assert ids == [1, BEGIN, *[PLACEHOLDER] * num_rows, END, 2]
        assert media.spans[0].grid == (grid[1] // 2, grid[2] // 2)
        assert media.places == ((2, 2 + num_rows, PLACEHOLDER),)


def test_pixels_of_qwen3_vl_are_those_of_transformers(tmp_path: Path) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    spec = made_spec(tmp_path, "qwen3vl")
    values = {k: v for k, v in FITTING_LARGE.items() if k != "image_processor_type"}
    most = 5120 * 7 * 7
    processor = Qwen2VLImageProcessorPil(
        **values | {"size": {"longest_edge": most, "shortest_edge": 784}}
    )
    for size in FITTING_SIZES:
        image = noise(*size)
        found = pixel_rows(only_tile(encoded(image), spec), spec.media)
        np.testing.assert_array_equal(found, np.asarray(processor(image)["pixel_values"]))


@pytest.mark.parametrize(
    ("part", "changes", "message"),
    [
        ("vision_config", {"num_position_embeddings": 26}, "must be those of a square"),
        ("vision_config", {"deepstack_visual_indexes": [0, 4]}, "must be below 4 layers"),
        ("vision_config", {"deepstack_visual_indexes": [2, 0]}, "must be in ascending order"),
        ("vision_config", {"deepstack_visual_indexes": 8}, "must be a list of layers"),
        ("vision_config", {"deepstack_visual_indexes": [0, 1, 2]}, "at most 2 deep layers"),
        ("text_config", {"rope_parameters": {"rope_type": "default"}}, "have an mrope_section"),
        (
            "text_config",
            {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 2, 5]}},
            "at most a third of the pairs",
        ),
    ],
)
def test_parts_of_qwen3_vl_that_do_not_fit_are_refused(
    part: str, changes: dict[str, Any], message: str
) -> None:
    from octavo_engine.models.config import ModelConfig

    config = seeing_model("qwen3vl").config
    config = config | {part: config[part] | changes}
    with pytest.raises(ModelError, match=message):
        read_media_config(config)
        ModelConfig.from_hf(config)


def test_pictures_of_qwen2_vl_that_are_too_long_are_refused() -> None:
    result = prepare(encoded(noise(1, 201)), qwen2_vl_spec())
    assert "a side may be 200 times as long as the other at most" in result.problem


def test_sizes_that_qwen2_vls_tower_does_not_read_are_refused_or_lowered() -> None:
    most = 5120 * 7 * 7
    shape = qwen2_vl_spec(max_pixels=12_845_056).shape
    assert isinstance(shape, FitPixels) and shape.most == most
    for given, message in (
        ({"max_pixels": 12_845_056}, f"max_pixels must be at most {most}"),
        ({"min_pixels": 6000}, "min_pixels is 6000 and max_pixels 5000"),
        ({"max_pixels": 100}, "the latter must be at least 196"),
        ({"min_pixels": "many"}, "min_pixels must be a positive number of pixels"),
    ):
        with pytest.raises(ModelError) as caught:
            qwen2_vl_spec(given)
        assert message in str(caught.value)
    with pytest.raises(ModelError, match="patch_size must be 7, as the tower's"):
        qwen2_vl_spec(patch_size=14)


@pytest.mark.parametrize("name", ["mistral3", "pixtral"])
@pytest.mark.parametrize("overrides", [{}, {"size": {"longest_edge": 50}, "resample": 2}])
def test_lines_of_pixtral_are_those_of_transformers(
    tmp_path: Path, name: str, overrides: dict[str, Any]
) -> None:
    from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

    values = {k: v for k, v in LINED.items() if k != "image_processor_type"} | overrides
    merge = 2 if name == "mistral3" else 1
    processor: Any = PixtralImageProcessorPil(**values)
    spec = made_spec(tmp_path, name, **overrides)
    words = TextTokenizer(tokenizer("mistral3"), where="test")
    prompt = "user [IMG] what [IMG]"
    for size, other in zip(FITTING_SIZES, FITTING_SIZES[1:] + FITTING_SIZES[:1], strict=True):
        images = [noise(*size), noise(*other)]
        if min(*size, *other) * 84 < max(*size, *other):
            continue  # the library makes nothing of one of them
        truth = processor(images, patch_size=7 * merge)
        prepared = [prepare(encoded(image), spec).picture for image in images]
        pictures = [picture for picture in prepared if picture is not None]
        ids, media = expand(words.encode(prompt), pictures, PictureTokens(spec.media, words))
        lines = [(h // (7 * merge), w // (7 * merge)) for h, w in truth["image_sizes"]]
        first, second = (  # [IMG_BREAK] behind each line, [IMG_END] behind the last
            [*([*[PLACEHOLDER] * width, BEGIN] * height)[:-1], END] for height, width in lines
        )
        assert ids == [1, *first, 4, *second]
        for index, picture in enumerate(pictures):
            found = normalised(picture.tiles[0])
            padded = np.asarray(truth["pixel_values"][index])
            np.testing.assert_array_equal(found, padded[:, : found.shape[1], : found.shape[2]])
        for span, place in zip(media.spans, media.places, strict=True):
            assert (span.first, span.end) == (place.first, place.end)
            assert ids[span.first : span.end].count(PLACEHOLDER) == span.num_rows
            assert ids[span.end - 1] == END and span.grid is None


def test_a_narrow_picture_is_a_line_of_pixtral(tmp_path: Path) -> None:
    tile = only_tile(encoded(noise(5000, 30)), made_spec(tmp_path, "mistral3"))
    assert (tile.height, tile.width) == (14, 84)


def test_edges_that_pixtrals_tower_does_not_read_are_refused_or_lowered(tmp_path: Path) -> None:
    from octavo_engine.core.media.spec import FitEdge, _read_pixtral

    media, most = seeing_model("mistral3").media, 70 * 7
    large = {"size": {"longest_edge": 1540}}
    assert _read_pixtral(LINED | large, media, is_given=False).shape == FitEdge(14, most)
    with pytest.raises(ModelError, match=f"longest_edge must be at most {most}; got 1540"):
        _read_pixtral(LINED | large, media, is_given=True)
    with pytest.raises(ModelError, match="size must have a longest_edge"):
        _read_pixtral(LINED | {"size": {"height": 42, "width": 42}}, media, is_given=False)


@pytest.mark.parametrize(
    ("part", "changes", "message"),
    [
        ("", {"vision_feature_layer": -2}, "must be -1 for a Pixtral tower"),
        ("", {"projector_hidden_act": "sine"}, "projector_hidden_act must be one of"),
        ("vision_config", {"hidden_size": 90}, "must be a multiple of 4 x 4 heads"),
        ("vision_config", {"model_type": "clip_vision_model"}, "model_type must be pixtral"),
        ("vision_config", {"hidden_act": "quick_gelu"}, "hidden_act must be one of"),
    ],
)
def test_parts_of_mistral_3_that_do_not_fit_are_refused(
    part: str, changes: dict[str, Any], message: str
) -> None:
    config = seeing_model("mistral3").config
    config = config | ({part: config[part] | changes} if part else changes)
    with pytest.raises(ModelError, match=message):
        read_media_config(config)


def without_torchvision(processor: Any, **attributes: Any) -> Any:
    """A processor whose constructor needs that library, for what it says of tokens."""
    made = object.__new__(processor)
    for name, value in attributes.items():
        setattr(made, name, value)
    return made


def onevision_processors() -> tuple[Any, Any]:
    """Of pixels and of tokens."""
    from transformers.models.llava_onevision.image_processing_pil_llava_onevision import (
        LlavaOnevisionImageProcessorPil,
    )
    from transformers.models.llava_onevision.processing_llava_onevision import (
        LlavaOnevisionProcessor,
    )

    values = {k: v for k, v in ANYRES.items() if k != "image_processor_type"}
    pixels = LlavaOnevisionImageProcessorPil(**values)
    tokens = without_torchvision(
        LlavaOnevisionProcessor, num_image_tokens=36, vision_feature_select_strategy="full",
        vision_aspect_ratio="anyres_max_2", image_token="<image>", image_processor=pixels,
    )  # fmt: skip
    return pixels, tokens


def test_tiles_of_llava_onevision_are_those_of_transformers(tmp_path: Path) -> None:
    processor, tokens = onevision_processors()
    spec = made_spec(tmp_path, "llava-onevision")
    words = TextTokenizer(tokenizer("llava"), where="test")
    counts, are_shrunk = set(), set()
    for size in [*SPLIT_SIZES, (500, 2), (85, 84), (84, 200)]:
        image = noise(*size)
        truth = processor([[image]])
        picture = prepare(encoded(image), spec.among(1)).picture
        assert picture is not None
        ids, media = expand(
            words.encode("user <image> what"), [picture], PictureTokens(spec.media, words)
        )
        count = tokens.replace_image_token(truth, 0).count("<image>")
        assert ids == [1, *[PLACEHOLDER] * count, 4]
        (item,) = picture.tiles
        assert item.tiles is not None
        found = np.stack([normalised(tile) for tile in tiles_of(item, spec.media)])
        np.testing.assert_array_equal(found, np.asarray(truth["pixel_values"][0]))
        assert len(media.spans) == 1 and media.spans[0].length == len(ids) - 2
        assert media.spans[0].length <= spec.media.num_rows
        counts.add(len(found))
        are_shrunk.add(item.tiles.shrunk_height != item.tiles.height)
    assert {2, 4, 5, 7, 10} <= counts and are_shrunk == {True, False}


def test_several_pictures_of_llava_onevision_are_a_tile_each(tmp_path: Path) -> None:
    processor, tokens = onevision_processors()
    spec = made_spec(tmp_path, "llava-onevision")
    words = TextTokenizer(tokenizer("llava"), where="test")
    prompt = "user <image> what <image>"
    for sizes in ([(80, 60), (30, 100)], [(1, 1), (640, 480)], [(42, 42), (1, 900)]):
        images = [noise(*size) for size in sizes]
        truth = processor([images])
        prepared = [prepare(encoded(image), spec.among(2)).picture for image in images]
        pictures = [picture for picture in prepared if picture is not None]
        ids, _ = expand(words.encode(prompt), pictures, PictureTokens(spec.media, words))
        first, second = (tokens.replace_image_token(truth, i).count("<image>") for i in (0, 1))
        assert ids == [1, *[PLACEHOLDER] * first, 4, *[PLACEHOLDER] * second]
        found = [normalised(t) for p in pictures for t in tiles_of(p.tiles[0], spec.media)]
        wanted = np.asarray(truth["pixel_values"]).reshape(2, 3, 42, 42)
        np.testing.assert_array_equal(np.stack(found), wanted)


def test_settings_of_llava_onevision_that_are_not_computed_are_refused(tmp_path: Path) -> None:
    from octavo_engine.core.media.spec import _read_llava_onevision

    config = seeing_model("llava-onevision").config
    for changes, message in (
        ({"vision_aspect_ratio": "anyres"}, "must be anyres_max_1 to anyres_max_40"),
        ({"vision_feature_select_strategy": "default"}, "must be full for a SigLIP tower"),
        ({"image_grid_pinpoints": [[84, 80]]}, "whole tiles of 42 pixels"),
    ):
        with pytest.raises(ModelError, match=message):
            read_media_config(config | changes)
    media = seeing_model("llava-onevision").media
    for values, message in (
        ({"do_center_crop": True}, "do_center_crop must be false"),
        ({"size": {"shortest_edge": 42}}, "size must have height and width"),
        ({"image_grid_pinpoints": [[42, 42]]}, "must be those of config.json"),
    ):
        with pytest.raises(ModelError, match=message):
            _read_llava_onevision(ANYRES | values, media)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    return resolve_model(str(write_seeing_model(tmp_path_factory.mktemp("seeing") / "llava")))


def test_a_file_that_cannot_be_read_is_a_fault_of_the_model(tmp_path: Path) -> None:
    folder = write_seeing_model(tmp_path / "llava")
    for content in ("no json", "[" * 3000):
        (folder / "preprocessor_config.json").write_text(content)
        with pytest.raises(ModelError, match=r"preprocessor_config\.json is no JSON"):
            read_picture_spec(resolve_model(str(folder)))


OVERRIDES: list[dict[str, Any]] = [
    {"size": {"shortest_edge": 60}},
    {"do_center_crop": False, "size": {"height": 42, "width": 42}},
    {"resample": 2},
    {"rescale_factor": 0.5, "image_mean": [0.1, 0.2, 0.3], "image_std": [1.0, 2.0, 3.0]},
]


@pytest.mark.parametrize("overrides", OVERRIDES, ids=lambda each: next(iter(each)))
def test_pixels_with_processor_settings_are_those_of_transformers(
    files: ModelFiles, overrides: dict[str, Any]
) -> None:
    from transformers import CLIPImageProcessorPil

    processor = CLIPImageProcessorPil(**PREPROCESSOR)
    image = noise(100, 60)
    truth = np.asarray(processor(image, return_tensors="np", **overrides)["pixel_values"][0])
    own = read_picture_spec(files, overrides)
    assert own is not None
    item, plain = only_tile(encoded(image), own), only_tile(encoded(image), spec())
    np.testing.assert_array_equal(normalised(item), truth)
    assert item.digest != plain.digest


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"num_crops": 4}, "num_crops is not supported for llava models; they take crop_size, "),
        ({"crop_size": 28}, "cannot be applied: preprocessor_config.json: pictures become (28"),
        ({"do_resize": False}, "do_resize must be true"),
        ({"resample": 9}, "resample must be 0 to 5"),
    ],
    ids=lambda each: next(iter(each)) if isinstance(each, dict) else "",
)  # fmt: skip
def test_processor_settings_that_cannot_be_applied_are_refused(
    files: ModelFiles, overrides: dict[str, Any], message: str
) -> None:
    check_picture_overrides(files, {"resample": 2})
    with pytest.raises(ConfigError, match=r"^--mm-processor-kwargs") as caught:
        check_picture_overrides(files, overrides)
    assert message in str(caught.value)


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "1", "LA"])
def test_other_modes_become_rgb(mode: str) -> None:
    from transformers import CLIPImageProcessorPil

    image = noise(50, 70, mode)
    truth = CLIPImageProcessorPil(**PREPROCESSOR)(image, return_tensors="np")["pixel_values"][0]
    tile = only_tile(encoded(image), spec())
    np.testing.assert_array_equal(normalised(tile), np.asarray(truth))


def test_a_picture_is_turned_as_its_camera_says() -> None:
    image = noise(60, 90)
    exif = Image.Exif()
    exif[0x0112] = 3  # upside down
    turned = prepare(encoded(image.rotate(180), exif=exif), spec())
    assert turned == prepare(encoded(image), spec())


def test_the_digest_is_of_pixels_and_preprocessing() -> None:
    image, other = noise(60, 60), noise(60, 61)
    png = prepare(encoded(image), spec())
    assert png == prepare(encoded(image, "BMP"), spec())
    assert png != prepare(encoded(other), spec())
    import dataclasses

    darker = dataclasses.replace(spec(), mean=(0.5, 0.5, 0.5))
    normal, dark = only_tile(encoded(image), spec()), only_tile(encoded(image), darker)
    assert normal.pixels == dark.pixels and normal.digest != dark.digest


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "none of the formats"),
        (b"GIF89a", "none of the formats"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "none of the formats"),
        (encoded(noise(64, 64))[:400], "cannot be decoded"),
        (encoded(Image.new("1", (40_000, 1_200))), "at most 40000000 are read"),
        (encoded(Image.new("1", (1, 100_000))), "too narrow to be resized"),
    ],
    ids=["empty", "header", "svg", "truncated", "bomb", "narrow"],
)
def test_what_cannot_be_read_is_refused(data: bytes, problem: str) -> None:
    prepared = prepare(data, spec())
    assert prepared.picture is None
    assert problem in prepared.problem


def mutated(rng: random.Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.choice((1, 2, 8, 40))):
        place = rng.randrange(min(len(changed), rng.choice((32, 64, 4096))))
        match rng.randrange(4):
            case 0:
                changed[place] = rng.randrange(256)
            case 1:
                changed[place : place + rng.randrange(16)] = rng.randbytes(rng.randrange(16))
            case 2:
                changed[place : place + 4] = rng.choice((b"\xff" * 4, b"\0" * 4, b"\x7f\xff" * 2))
            case _:
                del changed[max(1, place * rng.randrange(1, 64)) :]
        if not changed:
            return b""
    return bytes(changed)


def try_mutations(count: int, seed: int) -> None:
    rng = random.Random(seed)
    image = noise(70, 50)
    files = [encoded(image, kind) for kind in preparing.FORMATS]
    files.append(encoded(image.convert("P"), "GIF"))
    outcomes = {"read": 0, "refused": 0}
    for _ in range(count):
        prepared = prepare(mutated(rng, rng.choice(files)), spec())
        assert isinstance(prepared, PreparationResult)
        assert (prepared.picture is None) == bool(prepared.problem)
        outcomes["read" if prepared.picture else "refused"] += 1
    assert min(outcomes.values()) > count // 20, outcomes


def test_mutated_files_are_read_or_refused() -> None:
    try_mutations(500, seed=1)


@pytest.mark.slow
def test_ten_thousand_mutated_files_take_bounded_memory() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try_mutations(10_000, seed=2)
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown_kib < 700 << 10  # one picture of 40 megapixels, decoded and in RGB
