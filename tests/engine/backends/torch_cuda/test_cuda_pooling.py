"""Models that pool on the device backend: each family against transformers, padded and alone."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import numpy as np
import pytest
import torch

from octavo_engine.backends.pooling import make_step
from octavo_engine.backends.pooling_registry import _open, build_pooling_backend
from octavo_engine.backends.torch import memory
from octavo_engine.backends.torch.build_pooling import pooling_dtype
from octavo_engine.backends.torch.cuda_pooling import CudaPoolingBackend, check_pooled
from octavo_engine.backends.torch.text_kernels import PlainTextKernels
from octavo_engine.backends.torch.text_ops import TextOps
from octavo_engine.config import EngineConfig
from octavo_engine.core.pooling.engine import PoolingEngine, PoolingLimits
from octavo_engine.core.process.heartbeat import Heartbeat
from octavo_engine.errors import ConfigError, ModelError
from octavo_engine.models.pooling_config import read_pooling
from octavo_engine.state.pooling import PoolingParams, PoolingRequest
from octavo_engine.weights.source import ModelFiles, resolve_model
from tests.engine.backends.test_pooling_heads import splade
from tests.engine.backends.test_pooling_models import CLOSE, LENGTHS, LONGEST, step_of, texts_of
from tests.engine.backends.torch_cuda.test_packed_models import Quantized
from tests.engine.backends.torch_cuda.variants import Variants
from tests.engine.models.tiny_poolers import (
    CLASSIFIERS,
    EMBEDDERS,
    SHAPE,
    tiny_classifier,
    tiny_embedder,
)

pytestmark = pytest.mark.slow  # kernels in the interpreter

TRITON = ["bert", "bert-max", "nomic", "modernbert", "qwen3", "mistral-window"]
SHORT = (1, 17, 2, 33)


def files_of(tiny) -> tuple[ModelFiles, Any]:
    """With what the model is, checked by tests of its own."""
    files = resolve_model(str(tiny.folder))
    return files, read_pooling(files.config, files.path)


def build(tiny, device, *, max_tokens=700, **options):
    files, config = files_of(tiny)
    options = {"dtype": torch.float32, "kernels": "triton", **options}
    backend = CudaPoolingBackend(
        config, _open(EngineConfig(model=str(tiny.folder)), config, files),
        max_model_len=config.max_length, device=device.type, **options,
    )  # fmt: skip
    backend.prepare(max_tokens=max_tokens, max_texts=16)
    return backend


def embed(backend, texts):
    return backend.pool(step_of(backend, texts)).copy()


@pytest.mark.parametrize("name", EMBEDDERS)
def test_plain_kernels_embed_as_transformers_do(device, name):
    tiny = tiny_embedder(name)
    backend = build(tiny, device, kernels="plain")
    for lengths in (LENGTHS, (LONGEST,)):
        texts = texts_of(lengths)
        expected = np.stack([tiny.embedding(ids) for ids in texts])
        np.testing.assert_allclose(embed(backend, texts), expected, **CLOSE)


@pytest.mark.parametrize("name", TRITON)
def test_triton_kernels_embed_as_transformers_do(device, name):
    tiny = tiny_embedder(name)
    backend = build(tiny, device)
    texts = texts_of(SHORT)
    expected = np.stack([tiny.embedding(ids) for ids in texts])
    np.testing.assert_allclose(embed(backend, texts), expected, **CLOSE)


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_logits_are_those_of_transformers(device, name):
    tiny = tiny_classifier(name)
    backend = build(tiny, device, kernels="plain")
    texts = texts_of((1, 16, 50, LONGEST))
    expected = np.stack([tiny.logits(ids) for ids in texts])
    np.testing.assert_allclose(embed(backend, texts), expected, **CLOSE)


@pytest.mark.parametrize("name", ["bert", "modernbert", "qwen3"])
def test_token_rows_are_the_last_hidden_states(device, name):
    tiny = tiny_embedder(name)
    backend = build(tiny, device)
    texts = texts_of((1, 40, 20))
    expected = np.concatenate([tiny.hidden(ids).numpy() for ids in texts])
    rows = backend.token_rows(step_of(backend, texts))
    np.testing.assert_allclose(rows, expected, **CLOSE)


@pytest.mark.parametrize("kernels", ["plain", "triton"])
@pytest.mark.parametrize("kind", ["int4", "int8"])
def test_quantised_weights_stay_so(device, kind, kernels):
    tiny = tiny_embedder("qwen3")
    files, config = files_of(tiny)
    checkpoint = Quantized(kind)
    checkpoint.inner = _open(EngineConfig(model=str(tiny.folder)), config, files)
    checkpoint.total_bytes = checkpoint.inner.total_bytes
    backends: list[Any] = [
        CudaPoolingBackend(
            config, checkpoint, max_model_len=160, dtype=torch.float32, device=device.type,
            **options,
        )
        for options in ({"kernels": kernels}, {"kernels": "plain", "keep_quantized": False})
    ]  # fmt: skip
    made = [backend._model.body.body.layers[0].attention.qkv.weight for backend in backends]
    assert [isinstance(weight, torch.Tensor) for weight in made] == [False, True]
    for backend in backends:
        backend.prepare(max_tokens=64, max_texts=4)
    texts = texts_of((9, 17))
    np.testing.assert_allclose(embed(backends[0], texts), embed(backends[1], texts), **CLOSE)


def test_types_tell_the_texts_of_a_pair_apart(device):
    tiny = tiny_classifier("bert-score")
    backend = build(tiny, device)
    (ids,) = texts_of([30])
    types = [0] * 12 + [1] * 18
    found = backend.pool(make_step([(ids, types), (ids, ())], is_last=False))
    np.testing.assert_allclose(found[0], tiny.logits(ids, types), **CLOSE)
    np.testing.assert_allclose(found[1], tiny.logits(ids), **CLOSE)


def test_sparse_vectors_are_the_cpus(device):
    tiny = splade("BertForMaskedLM", SHAPE)
    texts = texts_of((3, 20))
    found = embed(build(tiny, device), texts)
    np.testing.assert_allclose(found, embed(build(tiny, device, kernels="plain"), texts), **CLOSE)
    assert found.shape == (2, 300)


@pytest.mark.parametrize("name", ["bert", "modernbert", "qwen3"])
@pytest.mark.parametrize("kernels", ["plain", "triton"])
def test_16_bits_turn_no_vector_away(device, name, kernels):
    tiny = tiny_embedder(name)
    backend = build(tiny, device, dtype=torch.float16, kernels=kernels)
    texts = texts_of((1, 17, 40))
    for row, ids in zip(embed(backend, texts), texts, strict=True):
        truth = tiny.embedding(ids)
        cosine = row @ truth / np.linalg.norm(row) / np.linalg.norm(truth)
        assert cosine > 0.9999


@pytest.mark.parametrize("name", ["bert", "modernbert"])
def test_batch_invariant_bits_are_a_texts_own(device, name, row_by_row):
    backend = build(tiny_embedder(name), device, batch_invariant=True)
    texts = texts_of((1, 17, 5, 20), seed=4)
    alone = [embed(backend, [ids])[0] for ids in texts]
    order = list(range(len(texts)))
    random.Random(0).shuffle(order)
    together = embed(backend, [texts[i] for i in order])
    for row, index in zip(together, order, strict=True):
        np.testing.assert_array_equal(row, alone[index])


# ── as a whole, on a device or one that is pretended ──


@pytest.fixture
def gpu(request) -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda", 0)
    pretended: torch.device = request.getfixturevalue("pretended")
    return pretended


def requests_of(texts, task="embed"):
    return [
        PoolingRequest(request_id=str(i), token_ids=ids, params=PoolingParams(task=task))
        for i, ids in enumerate(texts)
    ]


def served(engine, texts, task="embed") -> list[np.ndarray]:
    engine.add_pooling(requests_of(texts, task))
    found = {}
    while engine.has_work:
        for output in engine.step().pooled:
            assert output.error is None
            found[int(output.request_id)] = np.frombuffer(output.data, "<f4")
    return [found[i] for i in range(len(texts))]


@pytest.mark.parametrize("name", ["bert", "qwen3"])
def test_small_steps_are_graphs_that_give_what_launches_give(gpu, name):
    tiny = tiny_embedder(name)
    backend = build(tiny, gpu, max_tokens=64)
    launched = build(tiny, gpu, max_tokens=64, use_graphs=False)
    for seed in range(3):
        texts = texts_of((9, 2, 11 + seed), seed=seed)
        np.testing.assert_allclose(embed(backend, texts), embed(launched, texts), **CLOSE)
    assert len(backend._graphs.captured) == 1
    assert not launched._graphs.captured


def test_an_engine_launches_a_step_before_it_finishes_the_one_before(gpu):
    backend = build(tiny_embedder("bert"), gpu, max_tokens=24)
    limits = PoolingLimits(max_model_len=24, max_tokens=24, max_texts=16, max_queue=64)
    engine = PoolingEngine(backend, limits)
    engine.warm_up()
    texts = texts_of((14, 11, 12, 24, 7))
    engine.add_pooling(requests_of(texts))
    counts = []
    while engine.has_work:
        counts.append(len(engine.step().pooled))
    assert counts[0] == 0 and sum(counts) == 5
    found = served(engine, texts)
    for row, ids in zip(found, texts, strict=True):
        truth = tiny_embedder("bert").embedding(ids)
        assert row @ truth / np.linalg.norm(row) / np.linalg.norm(truth) > 0.9999


@pytest.mark.parametrize("level", [1, 2])
def test_weights_leave_the_device_and_come_back(gpu, level):
    backend = build(tiny_embedder("bert"), gpu, max_tokens=64)
    limits = PoolingLimits(max_model_len=64, max_tokens=64, max_texts=16, max_queue=64)
    engine = PoolingEngine(backend, limits)
    texts = texts_of((9, 20))
    before = [served(engine, texts) for _ in range(3)][-1]
    assert backend._graphs.captured
    engine.sleep(on=True, level=level)
    assert not backend._graphs.captured
    engine.sleep(on=False)
    for row, was in zip(served(engine, texts), before, strict=True):
        np.testing.assert_allclose(row, was, **CLOSE)


def test_steps_that_do_not_fit_are_refused_with_the_numbers(gpu, monkeypatch):
    monkeypatch.setattr(
        memory, "device_memory", lambda device: memory.DeviceMemory(
            memory.SPARE_BYTES + (1 << 20), 1 << 30
        ),
    )  # fmt: skip
    with pytest.raises(ConfigError, match=r"steps of 700 tokens need .* --max-num-batched-tokens"):
        build(tiny_embedder("bert"), gpu)


@pytest.mark.skipif(torch.cuda.is_available(), reason="launches are seen in the interpreter")
def test_nothing_compiles_once_texts_are_served(pretended, monkeypatch):
    """Variants of kernels, by Triton's own key."""
    variants = Variants(monkeypatch, runs=False)
    backend = build(tiny_embedder("bert"), pretended, max_tokens=20)
    backend.warm_up(Heartbeat())
    warm = variants.take()
    for lengths in ((1,), (9, 7)):
        texts = texts_of(lengths)
        for _ in range(2):
            embed(backend, texts)
        backend.token_rows(step_of(backend, texts))
    assert warm and variants.take() <= warm
    backend.close()


# ── what is chosen, and what is refused ──


def test_an_encoders_float32_is_kept_in_float16():
    _, bert = files_of(tiny_embedder("bert"))
    assert pooling_dtype(EngineConfig(), bert) == torch.float16
    assert pooling_dtype(EngineConfig(dtype="float32"), bert) == torch.float32
    stored = dataclasses.replace(bert, torch_dtype="bfloat16")
    assert pooling_dtype(EngineConfig(), stored) == torch.bfloat16
    _, qwen = files_of(tiny_embedder("qwen3"))
    assert pooling_dtype(EngineConfig(), qwen) == torch.bfloat16


def test_flashinfer_is_refused_where_nothing_is_cached():
    files, pooling = files_of(tiny_embedder("bert"))
    config = EngineConfig(model=str(files.path), device="cuda", attention_backend="flashinfer")
    with pytest.raises(ConfigError, match="keep none; leave it out"):
        build_pooling_backend(config, pooling, files, max_model_len=64)


def test_bodies_that_only_the_cpu_computes_are_refused_by_name():
    _, config = files_of(tiny_embedder("qwen3"))
    check_pooled(config, "triton")
    block = dataclasses.replace(config.body.block, qk_norm="head", qk_norm_after_rope=True)
    other = dataclasses.replace(config, body=dataclasses.replace(config.body, block=block))
    check_pooled(other, "plain")
    with pytest.raises(ModelError, match=r"normed after their rope.*--device cpu"):
        check_pooled(other, "triton")


@pytest.mark.parametrize("keeps_sums", [True, False])
def test_the_residual_stream_is_float32_where_norms_come_before_blocks(keeps_sums):
    """A sum that is normed at once is never written."""
    nothing: Any = None
    kernels = PlainTextKernels()
    ops = TextOps(nothing, nothing, kernels, nothing, torch.float16, keeps_sums=keeps_sums)
    x, y = torch.ones((2, 16)).half(), torch.full((2, 16), 2.0**-12).half()
    total = ops.add(x, y)
    assert ops.layer_norm(total, None, None, 1e-5).dtype == torch.float16
    assert total.is_formed == keeps_sums
    assert total.form().dtype == (torch.float32 if keeps_sums else torch.float16)
    assert (total.form() > 1).all() == keeps_sums
