"""Models that see against transformers: the rows of pictures, and what is said of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from octavo_engine import _native
from octavo_engine.backends.backend import BackendLimits, BackendStep
from octavo_engine.backends.native.backend import NativeBackend
from octavo_engine.backends.native.media import NativeMediaEncoder
from octavo_engine.config import BLOCK_SIZE
from octavo_engine.model_runner.media_rows import places_of, rows_between
from octavo_engine.state.media import MediaItem, TileGrid
from tests.engine.backends.tolerance import (
    BF16_AGAINST_FLOAT32,
    BF16_AGAINST_ROUNDED_REFERENCE,
    FLOAT32,
    error,
)
from tests.engine.models.tiny_seeing import (
    SEEING,
    normalised,
    patches_of,
    prompt_of,
    seeing_model,
    tile,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from octavo_engine.backends.torch.backend import TorchBackend
    from octavo_engine.state.media import MediaSpan
    from tests.engine.models.tiny_seeing import SeeingModel

LIMITS = BackendLimits(max_tokens=512, max_seqs=2, max_logit_rows=512, max_model_len=512)


def all_logits(
    backend: NativeBackend | TorchBackend,
    tokens: list[int],
    spans: tuple[MediaSpan, ...],
    items: tuple[MediaItem, ...],
    limits: BackendLimits = LIMITS,
) -> NDArray[np.float32]:
    """Of a prompt in one step."""
    backend.prepare(limits, limits.max_model_len // 8)
    assert backend.media is not None
    encoded = {item.digest: backend.media.encode(item) for item in items}
    count = len(tokens)
    ramp = np.arange(count, dtype=np.int32)
    groups, blocks = len(backend.cache_layout.windows), -(-count // BLOCK_SIZE)
    tables = np.arange(groups * blocks, dtype=np.int32).reshape(groups, 1, blocks)
    step = BackendStep(
        token_ids=np.array(tokens, np.int32),
        positions=ramp,
        slots=ramp + BLOCK_SIZE * tables[:, :, 0],
        seq_starts=np.array([0, count], np.int32),
        seq_lens=np.array([count], np.int32),
        rows=np.zeros(1, np.int32),
        block_tables=tables,
        logit_rows=ramp,
        copies=np.zeros((0, 3), np.int32),
    )
    if spans[0].grid is not None:
        step.rope_positions = places_of(spans, 0, count)
    step.input_rows = np.full(count, -1, np.int32)
    rows, place = [], 0
    for span in spans:
        rows.append(encoded[span.digest])
        where = rows_between(span, span.first, span.end)
        step.input_rows[span.first : span.end] = np.where(where >= 0, place + where, -1)
        place += span.num_rows
        if span.is_two_way:
            step.seen_to = np.zeros(count, np.int32) if step.seen_to is None else step.seen_to
            step.seen_to[span.first : span.end] = span.end
    step.inputs = np.concatenate(rows)
    return backend.logits(step).copy()


def example(name: str) -> tuple[list[int], tuple[MediaSpan, ...], tuple[MediaItem, ...]]:
    media = seeing_model(name).media
    first, second = tile(media, 1), tile(media, 2)
    return prompt_of(media, [5, 6, 7], first, [11, 12], second, [20, 21, 22, 23])


@pytest.mark.parametrize("name", SEEING)
@pytest.mark.parametrize("dtype", ["torch", "f32"])
def test_logits_are_those_of_transformers(name: str, dtype: str) -> None:
    tokens, spans, items = example(name)
    model = seeing_model(name)
    truth = model.logits(tokens, list(items))
    found = all_logits(model.backend(dtype), tokens, spans, items)
    np.testing.assert_allclose(found, truth, **FLOAT32)


@pytest.mark.parametrize(
    "name",
    ["llava", "idefics3", "gemma3", "qwen2vl", "qwen2.5vl", "qwen3vl", "internvl", "mistral3"],
)
def test_bf16_is_as_close_as_it_is_for_text(name: str) -> None:
    tokens, spans, items = example(name)
    model = seeing_model(name)
    found = all_logits(model.backend("bf16", stored="BF16"), tokens, spans, items)
    rounded = all_logits(model.backend("torch-bf16", stored="BF16"), tokens, spans, items)
    exact = all_logits(model.backend("torch", stored="BF16"), tokens, spans, items)
    assert error(found, exact) < 2 * BF16_AGAINST_FLOAT32  # two models behind each other
    assert error(found, rounded) < 2 * BF16_AGAINST_ROUNDED_REFERENCE


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2vl", "qwen2.5vl", "qwen3vl"])
@pytest.mark.parametrize("size", [(14, 14), (28, 28), (14, 700), (280, 294), (322, 350)])
def test_rows_of_pictures_of_any_size_are_those_of_transformers(
    name: str, size: tuple[int, int]
) -> None:
    """Of a thousand patches and more too: attention is cut into partitions, threads share them."""
    model = seeing_model(name)
    pixels = np.random.default_rng(1).integers(0, 256, (*size, 3), np.uint8).tobytes()
    item = MediaItem(bytes(16), *size, pixels, mean=(0.5, 0.4, 0.3), std=(0.25, 0.3, 0.2))
    patches, grids = patches_of([item])
    with torch.inference_mode():
        output = model.reference.model.visual(patches, grid_thw=grids)
        more = getattr(output, "deepstack_features", None) or []
        truth = torch.cat([output.pooler_output, *more], dim=1).numpy()
    check_rows(model, item, truth)


def check_rows(model: SeeingModel, item: MediaItem, truth: NDArray[np.float32]) -> None:
    for backend in (
        model.backend("torch"), model.backend("f32"), model.backend("f32", num_threads=3)
    ):  # fmt: skip
        assert backend.media is not None
        np.testing.assert_allclose(backend.media.encode(item), truth, **FLOAT32)


@pytest.mark.parametrize("dtype", ["torch", "f32"])
def test_pictures_that_are_a_tile_each_end_with_the_row_of_a_line(dtype: str) -> None:
    model = seeing_model("llava-onevision")
    media = model.media
    pair = [
        MediaItem(t.digest, t.height, t.width, t.pixels, mean=t.mean, std=t.std,
                  tiles=TileGrid(0, 0, 0, 0, 1, 0, 1, 0))
        for t in (tile(seeing_model("llava-siglip").media, seed) for seed in (1, 2))
    ]  # fmt: skip
    tokens, spans, items = prompt_of(media, [5, 6], pair[0], [11], pair[1], [20, 21])
    assert [span.length for span in spans] == [37, 37]
    truth = model.logits(tokens, list(items), [(42, 42), (42, 42)])
    found = all_logits(model.backend(dtype), tokens, spans, items)
    np.testing.assert_allclose(found, truth, **FLOAT32)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pixtral", "mistral3"])
@pytest.mark.parametrize("size", [(14, 28), (14, 700), (280, 294), (322, 350)])
def test_rows_of_pixtral_are_those_of_transformers_whatever_the_size(
    name: str, size: tuple[int, int]
) -> None:
    model = seeing_model(name)
    pixels = np.random.default_rng(1).integers(0, 256, (*size, 3), np.uint8).tobytes()
    item = MediaItem(bytes(16), *size, pixels, mean=(0.5, 0.4, 0.3), std=(0.25, 0.3, 0.2))
    with torch.inference_mode():
        output = model.reference.model.get_image_features(
            pixel_values=torch.from_numpy(normalised(item))[None],
            image_sizes=torch.tensor([size]), vision_feature_layer=-1,
        )  # fmt: skip
        truth = torch.cat(list(output.pooler_output)).numpy()
    check_rows(model, item, truth)


@pytest.mark.parametrize("dtype", ["torch", "f32"])
def test_what_layers_add_of_a_picture_is_at_its_placeholders_only(dtype: str) -> None:
    """What the first layer adds changes them and what follows, through the layers behind it."""
    model = seeing_model("qwen3vl")
    backend = model.backend(dtype)
    prompt = prompt_of(model.media, [5, 6, 7], tile(model.media, 1), [8, 9])
    plain = all_logits(backend, *prompt)
    encode = backend.media.encode  # type: ignore[union-attr]  # it sees

    def changed(item: MediaItem) -> NDArray[np.float32]:
        rows = encode(item)
        size = model.media.text_size  # of the picture's own rows, which are the first columns
        rows[:, size : 2 * size] += 1.0
        return rows

    backend.media.encode = changed  # type: ignore[method-assign, union-attr]
    other = all_logits(backend, *prompt)
    np.testing.assert_array_equal(plain[:3], other[:3])
    assert np.abs(plain[3:] - other[3:]).max(axis=1).min() > 1e-3


def test_inputs_that_a_program_cannot_have_are_refused() -> None:
    team = _native.Team(1)
    program = _native.Program(team, 1 << 16, 4, 4, 16)
    rows = program.buffer(0, 16, "f32", "T")
    program.input(rows)
    program.input(rows, 16)
    with pytest.raises(ValueError, match="taken already"):
        program.input(rows)
    with pytest.raises(ValueError, match="from column -1 on"):
        program.input(rows, -1, is_sparse=True)


@pytest.mark.parametrize("size", [(21, 28), (14, 15), (14, 14 * 1300)])
def test_pictures_that_the_tower_does_not_read_are_refused(size: tuple[int, int]) -> None:
    backend = seeing_model("qwen2.5vl").backend("f32")
    item = MediaItem(bytes(16), *size, bytes(3 * size[0] * size[1]))
    assert backend.media is not None
    with pytest.raises(ValueError, match="which are not read"):
        backend.media.encode(item)


@pytest.mark.parametrize(
    ("starts", "message"),
    [
        ([0, 2], "from 0 to its 4 tokens"),
        ([1, 4], "from 0 to its 4 tokens"),
        ([0, 3, 3, 4], r"segment_starts\[2\] is 3; it must be above 3"),
    ],
)
def test_segments_that_are_no_parts_of_the_step_are_refused(
    starts: list[int], message: str
) -> None:
    backend = seeing_model("qwen2.5vl").backend("f32")
    assert isinstance(backend.media, NativeMediaEncoder)
    columns = backend.media.config.vision.patch_columns
    rows, segments = np.zeros((4, columns), np.float32), np.array(starts, np.int32)
    with pytest.raises(ValueError, match=message):
        backend.media._run(backend.media._tower, rows, np.zeros((3, 4), np.int32), segments)


@pytest.mark.parametrize("name", ["llava", "qwen3vl", "mistral3"])
def test_fusion_changes_no_bit(name: str) -> None:
    tokens, spans, items = example(name)
    model = seeing_model(name)
    plain = all_logits(model.backend("bf16", is_fused=False), tokens, spans, items)
    fused = all_logits(model.backend("bf16"), tokens, spans, items)
    np.testing.assert_array_equal(plain, fused)


def test_another_picture_changes_what_follows_it_only() -> None:
    model = seeing_model("llava")
    media = model.media
    backend = model.backend("f32")
    a = all_logits(backend, *prompt_of(media, [5, 6, 7], tile(media, 1), [8, 9]))
    b = all_logits(backend, *prompt_of(media, [5, 6, 7], tile(media, 2), [8, 9]))
    np.testing.assert_array_equal(a[:3], b[:3])
    assert np.abs(a[3:] - b[3:]).max(axis=1).min() > 1e-3


def test_rows_of_a_picture_see_each_other_and_nothing_else_behind_them() -> None:
    model = seeing_model("gemma3")
    backend = model.backend("f32")
    tokens, spans, items = prompt_of(model.media, [5, 6, 7], tile(model.media, 1), [8, 9])
    a = all_logits(backend, tokens, spans, items)
    span = spans[0]
    causal = all_logits(backend, tokens, (span_without_sight(span),), items)
    np.testing.assert_array_equal(a[: span.first], causal[: span.first])
    assert np.abs(a[span.first : span.end - 1] - causal[span.first : span.end - 1]).max() > 1e-3
    b = all_logits(backend, [*tokens[:-1], 20], spans, items)
    np.testing.assert_array_equal(a[:-1], b[:-1])


@pytest.mark.parametrize("num_before", [504, 508, 511])
def test_a_picture_across_partitions_of_a_context_is_seen_whole(num_before: int) -> None:
    """Attention is cut into partitions of 512 keys, which threads share."""
    model = seeing_model("gemma3")
    limits = BackendLimits(max_tokens=600, max_seqs=2, max_logit_rows=600, max_model_len=600)
    text = [5 + i % 60 for i in range(num_before)]
    tokens, spans, items = prompt_of(model.media, text, tile(model.media, 1), [7, 8, 9])
    truth = model.logits(tokens, list(items))
    native = [model.backend("f32", max_model_len=600, num_threads=count) for count in (1, 3)]
    for backend in (*native, model.backend("torch")):
        found = all_logits(backend, tokens, spans, items, limits)
        np.testing.assert_allclose(found, truth, **FLOAT32)


def span_without_sight(span: MediaSpan) -> MediaSpan:
    return type(span)(span.digest, span.first, span.length)


@pytest.mark.parametrize(
    ("seen_to", "message"),
    [
        ([0, 1, 0, 0], r"seen_to\[1\] is 1; it must be 0, or between 2 and 4"),
        ([0, 0, 5, 0], r"seen_to\[2\] is 5; it must be 0, or between 3 and 4"),
        ([0, 4, 0, 0], r"seen_to\[2\] is 0; it must be 0, or between 4 and 4"),
        ([0, 0, 0], "seen_to has 3 entries"),
    ],
)
def test_sight_that_attention_cannot_have_is_refused(seen_to: list[int], message: str) -> None:
    model = seeing_model("gemma3")
    backend = model.backend("f32")
    all_logits(backend, *prompt_of(model.media, [5, 6], tile(model.media, 1), [7]))
    assert isinstance(backend, NativeBackend)
    compiled, kv = backend._compiled, backend._kv
    assert compiled is not None and kv is not None
    ramp = np.arange(4, dtype=np.int32)
    one = np.zeros(1, np.int32)
    groups = len(backend.cache_layout.windows)
    arrays = (
        ramp, ramp, np.tile(ramp, (groups, 1)), np.array([0, 4], np.int32), one + 4, one,
        np.zeros((groups, 1, 1), np.int32), one,
    )  # fmt: skip
    with pytest.raises(ValueError, match=message):
        compiled.program.run(kv, *arrays, seen_to=np.array(seen_to, np.int32))


def test_rows_that_do_not_fit_are_refused() -> None:
    model = seeing_model("llava")
    tokens, spans, items = prompt_of(model.media, [5], tile(model.media, 1), [8])
    backend = model.backend("f32")
    all_logits(backend, tokens, spans, items)
    assert isinstance(backend, NativeBackend)
    compiled, kv = backend._compiled, backend._kv
    assert compiled is not None and kv is not None
    one = np.zeros(1, np.int32)
    arrays = (one, one, one[None], np.array([0, 1], np.int32), one + 1, one, one[None, None], one)
    for rows, inputs, message in (
        (one + 3, np.zeros((3, 64), np.float32), "inputs has 3 rows"),
        (one, np.zeros((3, 63), np.float32), "63 columns"),
        (np.zeros(2, np.int32), np.zeros((3, 64), np.float32), "input_rows has 2 entries"),
    ):
        with pytest.raises(ValueError, match=message):
            compiled.program.run(kv, *arrays, input_rows=rows, inputs=inputs)
