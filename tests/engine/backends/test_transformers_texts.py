"""Encoders and classifiers without a page of ours, as transformers computes them."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo_engine.backends.pooling import make_step
from octavo_engine.backends.pooling_registry import build_pooling_backend
from octavo_engine.config import EngineConfig
from octavo_engine.core.pooling.build import build_pooling_engine, pooling_config
from octavo_engine.errors import ConfigError, ModelError
from octavo_engine.models.pooling_config import LibraryBody
from octavo_engine.weights.source import resolve_model
from tests.engine.models.tiny_poolers import (
    DECODER,
    ROBERTA,
    SHAPE,
    VOCABULARY,
    saved,
    write_modules,
)

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from octavo_engine.backends.pooling import PoolingBackend
    from octavo_engine.models.pooling_config import PoolingConfig
    from tests.engine.models.tiny_poolers import TinyPooler

DEBERTA = SHAPE | {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "type_vocab_size": 0}
ALBERT = SHAPE | {"embedding_size": 32}
# transformers chooses other kernels of attention than the model that was saved.
CLOSE: dict[str, Any] = {"rtol": 1e-4, "atol": 2e-5}


def read(folder: Path, **settings: Any) -> tuple[EngineConfig, PoolingConfig]:
    config = EngineConfig(**{"model": str(folder), "device": "cpu", "num_threads": 1, **settings})
    pooling = pooling_config(config, resolve_model(str(folder)))
    assert pooling is not None
    return config, pooling


def build(folder: Path, **settings: Any) -> PoolingBackend:
    config, pooling = read(folder, **settings)
    return build_pooling_backend(
        config, pooling, resolve_model(str(folder)), max_model_len=pooling.max_length
    )


def texts_of(*lengths: int) -> list[list[int]]:
    draw = random.Random(len(lengths))  # ids from 3: padding in a text shifts RoBERTa's positions
    return [[draw.randrange(3, VOCABULARY) for _ in range(length)] for length in lengths]


def pooled(backend: PoolingBackend, *texts: list[int]) -> NDArray[np.float32]:
    is_last = backend.config.pooling == "last"
    return backend.pool(make_step([(ids, ()) for ids in texts], is_last=is_last))


@pytest.mark.parametrize(
    ("kind", "fields", "pooling"),
    [
        ("MPNetModel", ROBERTA, "mean"),
        ("ElectraModel", SHAPE, "cls"),
        ("AlbertModel", ALBERT, "max"),
        ("DebertaV2Model", DEBERTA, None),
        ("ApertusModel", DECODER, None),
        ("BertModel", SHAPE, "weightedmean"),  # by --model-impl transformers: there is a page
    ],
)
def test_embeddings_are_those_of_transformers(
    kind: str, fields: dict[str, Any], pooling: str | None
) -> None:
    tiny = saved(kind, fields, pooling or ("last" if fields is DECODER else "mean"))
    if pooling is not None:
        write_modules(tiny.folder, pooling)
    backend = build(tiny.folder, model_impl="transformers" if kind == "BertModel" else "auto")
    assert backend.name == "transformers/cpu/float32"
    assert backend.config.pooling == tiny.pooling
    longest = backend.config.max_length
    assert longest == SHAPE["max_position_embeddings"] - (2 if kind == "MPNetModel" else 0)
    texts = texts_of(1, 40, longest, 17)
    expected = np.stack([tiny.embedding(ids) for ids in texts])
    np.testing.assert_allclose(pooled(backend, *texts), expected, **CLOSE)
    np.testing.assert_array_equal(pooled(backend, texts[3])[0], pooled(backend, *texts)[3])
    rows = backend.token_rows(make_step([(ids, ()) for ids in texts[:2]], is_last=False))
    hidden = np.concatenate([tiny.hidden(ids).numpy() for ids in texts[:2]])
    np.testing.assert_allclose(rows, hidden, **CLOSE)


@pytest.mark.parametrize(
    ("kind", "fields", "labels"),
    [
        ("ElectraForSequenceClassification", SHAPE, 3),
        ("DebertaV2ForSequenceClassification", DEBERTA, 1),
        ("MPNetForSequenceClassification", ROBERTA, 2),
        ("BartForSequenceClassification", {
            "vocab_size": VOCABULARY, "d_model": 64, "encoder_layers": 1, "decoder_layers": 1,
            "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 96,
            "decoder_ffn_dim": 96, "max_position_embeddings": 64, "eos_token_id": 2,
        }, 3),
    ],
)  # fmt: skip
def test_logits_are_those_of_transformers(kind: str, fields: dict[str, Any], labels: int) -> None:
    tiny = saved(kind, fields | {"num_labels": labels})
    backend = build(tiny.folder)
    tasks = ("classify", "score") if labels == 1 else ("classify",)
    assert backend.config.tasks == tasks
    texts = [[*ids, 2] for ids in texts_of(1, 12, 50)]  # BART classifies by its end of text
    expected = np.stack([tiny.logits(ids) for ids in texts])
    np.testing.assert_allclose(pooled(backend, *texts), expected, **CLOSE)


def test_types_tell_the_texts_of_a_pair_apart() -> None:
    tiny = saved("ElectraForSequenceClassification", SHAPE | {"num_labels": 1})
    backend = build(tiny.folder)
    (ids,) = texts_of(30)
    types = [0] * 12 + [1] * 18
    given = backend.pool(make_step([(ids, types), (ids, ())], is_last=False))
    np.testing.assert_allclose(given[0], tiny.logits(ids, types), **CLOSE)
    np.testing.assert_allclose(given[1], tiny.logits(ids), **CLOSE)
    assert abs(given[0] - given[1]).max() > 0.01


def test_layers_behind_the_pooling_are_computed() -> None:
    tiny = saved("ElectraModel", SHAPE, "mean")
    write_modules(tiny.folder, "mean")
    modules = json.loads((tiny.folder / "modules.json").read_text())
    modules.insert(2, {"idx": 2, "name": "2", "path": "2_Dense",
                       "type": "sentence_transformers.models.Dense"})  # fmt: skip
    (tiny.folder / "modules.json").write_text(json.dumps(modules))
    dense = tiny.folder / "2_Dense"
    dense.mkdir()
    weight, bias = torch.randn(24, 64), torch.randn(24)
    save_file({"linear.weight": weight, "linear.bias": bias}, dense / "model.safetensors")
    (dense / "config.json").write_text(json.dumps({
        "in_features": 64, "out_features": 24, "bias": True,
        "activation_function": "torch.nn.modules.activation.Tanh",
    }))  # fmt: skip
    backend = build(tiny.folder)
    assert backend.config.num_columns == 24
    (ids,) = texts_of(20)
    expected = torch.tanh(weight @ torch.from_numpy(tiny.embedding(ids)) + bias)
    np.testing.assert_allclose(pooled(backend, ids)[0], expected.numpy(), rtol=1e-4, atol=1e-5)


def test_the_engine_says_who_computes_it() -> None:
    tiny = saved("MPNetModel", ROBERTA, "mean")
    config, pooling = read(tiny.folder)
    engine, info = build_pooling_engine(config, pooling, resolve_model(str(tiny.folder)))
    engine.close()
    assert (info.implementation, info.architecture) == ("transformers", "MPNetModel")
    assert info.tasks == ("embed", "token_embed")


def test_without_weights_it_is_filled_as_the_seed_says() -> None:
    tiny = saved("ElectraModel", SHAPE, "mean")
    (tiny.folder / "model.safetensors").unlink()
    backends = [build(tiny.folder, load_format="dummy", seed=seed) for seed in (3, 3, 4)]
    first, same, other = (pooled(backend, *texts_of(9)) for backend in backends)
    np.testing.assert_array_equal(first, same)
    assert abs(first - other).max() > 1e-3


def lose(tiny: TinyPooler, word: str) -> None:
    file = tiny.folder / "model.safetensors"
    tensors = {name: tensor for name, tensor in load_file(file).items() if word not in name}
    save_file(tensors, file, metadata={"format": "pt"})


def test_weights_that_are_missing_are_not_made_up() -> None:
    embeds = saved("AlbertModel", ALBERT, "mean")
    lose(embeds, "pooler")
    assert np.isfinite(pooled(build(embeds.folder), *texts_of(5))).all()
    lose(embeds, "attention.dense")
    with pytest.raises(ModelError, match=r"no weights for .*attention\.dense"):
        build(embeds.folder)
    labels = saved("ElectraForSequenceClassification", SHAPE)
    lose(labels, "classifier.out_proj")
    with pytest.raises(ModelError, match=r"no weights for classifier\.out_proj"):
        build(labels.folder)


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        ("T5Model", {"vocab_size": VOCABULARY, "d_model": 32, "num_layers": 1, "d_ff": 32,
                     "num_heads": 2, "d_kv": 16}, "an encoder and a decoder"),
        ("CLIPModel", {}, "does not say its"),
    ],
)  # fmt: skip
def test_other_models_are_refused(
    kind: str, fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    import transformers

    settings = getattr(transformers, kind).config_class(**fields)
    settings.architectures = [kind]
    settings.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=f"{message}.*the transformers fallback cannot serve it"):
        read(tmp_path)


def test_sparse_vectors_and_our_settings_are_refused() -> None:
    tiny = saved("ElectraModel", SHAPE, "mean")
    with pytest.raises(ConfigError, match="--quantization int8 is not available for a model that"):
        read(tiny.folder, quantization="int8")
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.MLMTransformer"},
        {"idx": 1, "name": "1", "path": "1_SpladePooling",
         "type": "sentence_transformers.models.SpladePooling"},
    ]  # fmt: skip
    (tiny.folder / "modules.json").write_text(json.dumps(modules))
    (tiny.folder / "1_SpladePooling").mkdir()
    (tiny.folder / "1_SpladePooling" / "config.json").write_text('{"pooling_strategy": "max"}')
    with pytest.raises(ModelError, match="sparse vectors are supported of bert, roberta"):
        read(tiny.folder)


def test_a_page_of_ours_comes_first() -> None:
    tiny = saved("BertModel", SHAPE, "mean")
    assert not isinstance(read(tiny.folder)[1].body, LibraryBody)
    with pytest.raises(ModelError, match="'XLMRobertaLoRA' is not supported: it is Jina v3"):
        (tiny.folder / "config.json").write_text('{"architectures": ["XLMRobertaLoRA"]}')
        read(tiny.folder)
