"""Models that pool: each family against transformers, and the bits of a text in any company."""

from __future__ import annotations

import itertools
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from octavo_engine import _native
from octavo_engine.backends.native.pooling import parts_of
from octavo_engine.backends.pooling import PoolingStep, make_step
from octavo_engine.backends.pooling_registry import build_pooling_backend
from octavo_engine.config import EngineConfig
from octavo_engine.errors import ConfigError, ModelError
from octavo_engine.models.pooling_config import read_pooling
from octavo_engine.weights.source import resolve_model
from tests.engine.backends.tolerance import (
    INT4_AGAINST_FLOAT32,
    INT8_AGAINST_FLOAT32,
    INTEGERS_WITH_8_BITS,
    error,
)
from tests.engine.models.tiny_poolers import (
    CLASSIFIERS,
    EMBEDDERS,
    MAX_POSITIONS,
    VOCABULARY,
    TinyPooler,
    tiny_classifier,
    tiny_embedder,
)

if TYPE_CHECKING:
    from octavo_engine.backends.native.pooling import NativePoolingBackend
    from octavo_engine.backends.pooling import PoolingBackend

MAX_TOKENS = 700
# Lengths around the blocks of 16, the tiles of 48 and 128, and the ends of what there may be.
LENGTHS = (1, 2, 15, 16, 17, 31, 47, 48, 49, 127, 128, 129)
LONGEST = MAX_POSITIONS - 2  # RoBERTa's table of positions begins at 2
# Sums of a hundred float32 products in other orders, over a few layers; values are about 1.
CLOSE: dict[str, Any] = {"rtol": 1e-4, "atol": 2e-5}
# bf16 keeps 8 bits of weights and of what goes into linears.
BF16 = 0.04


def build(tiny: TinyPooler, **settings) -> PoolingBackend:
    files = resolve_model(str(tiny.folder))
    config = read_pooling(files.config, files.path)
    assert config is not None
    settings = {"device": "cpu", "num_threads": 2, **settings}
    backend = build_pooling_backend(
        EngineConfig(model=str(tiny.folder), **settings),
        config,
        files,
        max_model_len=config.max_length,
    )
    backend.prepare(max_tokens=MAX_TOKENS, max_texts=16)
    return backend


def texts_of(lengths, seed=0) -> list[list[int]]:
    rng = random.Random(seed)  # ids from 3: padding in a text shifts RoBERTa's positions
    return [[rng.randrange(3, VOCABULARY) for _ in range(length)] for length in lengths]


def step_of(backend: PoolingBackend, texts) -> PoolingStep:
    return make_step([(ids, ()) for ids in texts], is_last=backend.config.pooling == "last")


def embed(backend: PoolingBackend, texts) -> np.ndarray:
    return backend.pool(step_of(backend, texts)).copy()


@pytest.mark.slow
@pytest.mark.parametrize("device", ["torch", "cpu"])
@pytest.mark.parametrize("name", EMBEDDERS)
def test_embeddings_are_those_of_transformers(name, device):
    tiny = tiny_embedder(name)
    backend = build(tiny, device=device)
    for lengths in (LENGTHS, (LONGEST,)):
        texts = texts_of(lengths)
        expected = np.stack([tiny.embedding(ids) for ids in texts])
        np.testing.assert_allclose(embed(backend, texts), expected, **CLOSE)


@pytest.mark.parametrize("device", ["torch", "cpu"])
@pytest.mark.parametrize("name", CLASSIFIERS)
def test_logits_are_those_of_transformers(name, device):
    tiny = tiny_classifier(name)
    backend = build(tiny, device=device)
    texts = texts_of((1, 16, 50, LONGEST))
    expected = np.stack([tiny.logits(ids) for ids in texts])
    np.testing.assert_allclose(embed(backend, texts), expected, **CLOSE)


@pytest.mark.parametrize("device", ["torch", "cpu"])
@pytest.mark.parametrize("name", ["bert", "modernbert", "qwen3"])
def test_token_rows_are_the_last_hidden_states(name, device):
    tiny = tiny_embedder(name)
    backend = build(tiny, device=device)
    texts = texts_of((1, 40, 20))
    expected = np.concatenate([tiny.hidden(ids).numpy() for ids in texts])
    rows = backend.token_rows(step_of(backend, texts))
    np.testing.assert_allclose(rows, expected, **CLOSE)


@pytest.mark.parametrize("device", ["torch", "cpu"])
def test_types_tell_the_texts_of_a_pair_apart(device):
    tiny = tiny_classifier("bert-score")
    backend = build(tiny, device=device)
    (ids,) = texts_of([30])
    types = [0] * 12 + [1] * 18
    reported = backend.pool(make_step([(ids, types), (ids, ())], is_last=False))
    np.testing.assert_allclose(reported[0], tiny.logits(ids, types), **CLOSE)
    np.testing.assert_allclose(reported[1], tiny.logits(ids), **CLOSE)
    assert abs(reported[0] - reported[1]).max() > 0.01


@pytest.mark.parametrize("settings", [{}, {"dtype": "bfloat16"}, {"quantization": "int8"}],
                         ids=["float32", "bf16", "int8"])  # fmt: skip
@pytest.mark.parametrize("name", ["bert", "modernbert", "nomic", "mistral-window", "bert-max"])
def test_a_text_has_the_same_bits_alone_and_in_any_company(name, settings):
    backend = build(tiny_embedder(name), **settings)
    texts = texts_of((1, 17, 5, 128, 33, 64, 150, 16, 2), seed=4)
    alone = [embed(backend, [ids])[0] for ids in texts]
    order = list(range(len(texts)))
    for seed in range(3):
        random.Random(seed).shuffle(order)
        together = embed(backend, [texts[i] for i in order])
        for row, index in zip(together, order, strict=True):
            np.testing.assert_array_equal(row, alone[index])


def test_threads_instruction_sets_and_fusion_change_no_bit():
    tiny = tiny_embedder("bert")
    texts = texts_of((1, 17, 100, 150), seed=5)
    expected = embed(build(tiny, num_threads=1), texts)
    np.testing.assert_array_equal(embed(build(tiny, num_threads=3), texts), expected)
    for isa in _native.available_isas():
        np.testing.assert_array_equal(embed(native(tiny, isa=isa), texts), expected)
    np.testing.assert_array_equal(embed(native(tiny, is_fused=False), texts), expected)


@pytest.mark.parametrize("max_tokens", [1, 40, 151, 1000])
@pytest.mark.parametrize("lengths", [(1,), (150,), (3, 150, 1), (40, 40, 1, 40, 17, 150, 2)])
def test_parts_are_a_steps_texts_in_their_order(lengths, max_tokens):
    texts = texts_of(lengths, seed=6)
    step = make_step([(ids, [1] * len(ids)) for ids in texts], is_last=True)
    parts = list(parts_of(step, max_tokens))
    found = []
    for part in parts:
        for begin, end, last in zip(part.starts, part.starts[1:], part.pooled_rows, strict=False):
            found.append(part.token_ids[begin:end].tolist())
            assert part.positions[begin:end].tolist() == list(range(end - begin))
            assert part.type_ids[begin:end].tolist() == [1] * (end - begin)
            assert last == end - 1
        assert len(part.token_ids) <= max_tokens or len(part.pooled_rows) == 1
    assert found == texts
    both = [len(a.token_ids) + len(b.token_ids) for a, b in itertools.pairwise(parts)]
    assert all(total > max_tokens for total in both)


@pytest.mark.parametrize("settings", [{}, {"quantization": "int8", "activation_bits": 8}],
                         ids=["float32", "8 bits"])  # fmt: skip
def test_texts_in_parts_have_the_bits_of_one_step(settings, monkeypatch):
    tiny = tiny_embedder("bert")
    texts = texts_of((1, 17, 100, 150, 2, 33), seed=7)
    whole = build(tiny, **settings)
    monkeypatch.setattr("octavo_engine.backends.native.pooling.TOKENS_PER_THREAD", 20)
    monkeypatch.setattr("octavo_engine.backends.native.pooling.MIN_TOKENS", 20)
    in_parts = build(tiny, **settings)
    np.testing.assert_array_equal(embed(in_parts, texts), embed(whole, texts))
    np.testing.assert_array_equal(
        in_parts.token_rows(step_of(in_parts, texts)), whole.token_rows(step_of(whole, texts))
    )


@pytest.mark.parametrize("name", ["bert", "nomic", "qwen3", "modernbert"])
def test_fewer_bits_cost_what_they_must(name):
    tiny = tiny_embedder(name)
    texts = texts_of((1, 40, 100))
    truth = np.stack([tiny.embedding(ids) for ids in texts])
    assert error(embed(build(tiny, dtype="bfloat16"), texts), truth) < BF16
    assert error(embed(build(tiny, quantization="int8"), texts), truth) < INT8_AGAINST_FLOAT32
    assert error(embed(build(tiny, quantization="int4"), texts), truth) < INT4_AGAINST_FLOAT32
    in_bytes = embed(build(tiny, quantization="int8", activation_bits=8), texts)
    assert error(in_bytes, truth) < INT8_AGAINST_FLOAT32 + INTEGERS_WITH_8_BITS


def test_a_text_that_computes_to_nan_spoils_no_other():
    tiny = tiny_embedder("bert")
    backend = build(tiny)
    texts = texts_of((20, 30, 40))
    expected = embed(backend, texts)
    with_nan = tiny.model.embeddings.word_embeddings.weight.detach().clone()
    with_nan[texts[1][7]] = float("nan")
    spoilt = {texts[1][7]}
    assert not spoilt & {*texts[0], *texts[2]}
    backend = native(tiny, replaced={"embeddings.word_embeddings.weight": with_nan.numpy()})
    rows = embed(backend, texts)
    assert np.isnan(rows[1]).all()
    np.testing.assert_array_equal(rows[[0, 2]], expected[[0, 2]])


def test_what_cannot_be_served_is_said():
    tiny = tiny_embedder("bert")
    with pytest.raises(ConfigError, match="--device plugin does not serve models for embeddings"):
        build(tiny, device="plugin")
    with pytest.raises(ConfigError, match="int8 is computed by --device cpu only"):
        build(tiny, device="torch", quantization="int8")
    files = resolve_model(str(tiny.folder))
    narrow = read_pooling({**files.config, "num_attention_heads": 8}, files.path)
    assert narrow is not None
    with pytest.raises(ModelError, match="multiple of 16 columns on this device; they have 8"):
        build_pooling_backend(
            EngineConfig(model="x", device="cpu"), narrow, files, max_model_len=16
        )


def native(tiny: TinyPooler, *, replaced=None, **options) -> NativePoolingBackend:
    """With what only tests may ask for."""
    from octavo_engine.backends.native.pooling import NativePoolingBackend
    from octavo_engine.models.encoder_names import encoder_rename
    from octavo_engine.weights.open import open_checkpoint
    from octavo_engine.weights.views import Renamed

    files = resolve_model(str(tiny.folder))
    config = read_pooling(files.config, files.path)
    assert config is not None
    checkpoint = Renamed(open_checkpoint(files), encoder_rename("bert"))
    backend = NativePoolingBackend(
        config,
        _Replaced(checkpoint, replaced or {}),
        max_model_len=config.max_length,
        dtype="f32",
        num_threads=2,
        **options,
    )
    backend.prepare(max_tokens=MAX_TOKENS, max_texts=16)
    return backend


class _Replaced:
    """A checkpoint with some tensors' values changed."""

    def __init__(self, checkpoint, values) -> None:
        self._checkpoint = checkpoint
        self._values = values

    def names(self):
        return self._checkpoint.names()

    def read(self, name, shape):
        import dataclasses

        stored = self._checkpoint.read(name, shape)
        if name not in self._values:
            return stored
        data = np.ascontiguousarray(self._values[name], np.float32).view(np.uint8).reshape(-1)
        return dataclasses.replace(stored, data=data)

    @property
    def total_bytes(self):
        return self._checkpoint.total_bytes
