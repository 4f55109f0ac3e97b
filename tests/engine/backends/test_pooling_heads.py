"""What models make of a body beside a vector or labels: sparse vectors, a vector for each token,
rewards. The truth is transformers' body and the formula, written out."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo_engine.backends.pooling import make_step
from octavo_engine.core.pooling.postprocess import finish
from octavo_engine.errors import ModelError
from octavo_engine.models.pooling_config import read_pooling
from octavo_engine.server.pooling.scoring import best_matches
from octavo_engine.state.pooling import PoolingParams
from octavo_engine.weights.source import resolve_model
from tests.engine.backends.test_pooling_models import CLOSE, build, embed, step_of, texts_of
from tests.engine.models.tiny_poolers import (
    DECODER,
    DISTIL,
    ROBERTA,
    SHAPE,
    VOCABULARY,
    TinyPooler,
    saved,
    tiny_embedder,
)

EMBED = PoolingParams(task="embed")


def write(folder: Path, files: dict[str, Any]) -> None:
    for name, content in files.items():
        file = folder / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps(content))


def module(number: int, kind: str, path: str = "") -> dict[str, Any]:
    return {"idx": number, "name": str(number), "path": path, "type": kind}


def splade(kind: str, fields: dict[str, Any]) -> TinyPooler:
    tiny = saved(kind, fields, "max")
    sparse = "sentence_transformers.sparse_encoder.models."
    modules = [
        module(0, sparse + "MLMTransformer"),
        module(1, sparse + "SpladePooling", "1_SpladePooling"),
    ]
    pooling = {
        "pooling_strategy": "max",
        "activation_function": "relu",
        "word_embedding_dimension": VOCABULARY,
    }
    write(tiny.folder, {"modules.json": modules, "1_SpladePooling/config.json": pooling})
    return tiny


@pytest.mark.parametrize("device", ["torch", "cpu"])
@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("BertForMaskedLM", SHAPE),
        ("RobertaForMaskedLM", ROBERTA),
        ("DistilBertForMaskedLM", DISTIL),
    ],
)
def test_sparse_vectors_are_those_of_the_formula(kind: str, fields: dict, device: str) -> None:
    tiny = splade(kind, fields)
    backend = build(tiny, device=device)
    assert backend.config.tasks == ("embed",)
    assert backend.config.num_columns == VOCABULARY
    texts = texts_of((1, 16, 50))
    rows = finish(embed(backend, texts), EMBED, backend.config)
    for ids, row in zip(texts, rows, strict=True):
        with torch.inference_mode():
            logits = tiny.model(torch.tensor([ids])).logits[0]
        expected = torch.log1p(torch.relu(logits)).max(0).values.numpy()
        assert (expected > 0.1).any()
        assert len(ids) > 1 or (expected == 0).any()
        np.testing.assert_allclose(row, expected, **CLOSE)


def colbert() -> tuple[TinyPooler, torch.Tensor]:
    tiny = saved("BertModel", SHAPE, "cls")
    weight = torch.randn((32, 64), generator=torch.Generator().manual_seed(1)) / 8
    modules = [
        module(0, "sentence_transformers.models.Transformer"),
        module(1, "pylate.models.Dense.Dense", "1_Dense"),
    ]
    dense = {
        "in_features": 64,
        "out_features": 32,
        "bias": False,
        "activation_function": "torch.nn.modules.linear.Identity",
    }
    own = {
        "similarity_fn_name": "MaxSim",
        "query_prefix": "[Q] ",
        "document_prefix": "[D] ",
    }
    write(
        tiny.folder,
        {
            "modules.json": modules,
            "1_Dense/config.json": dense,
            "config_sentence_transformers.json": own,
        },
    )
    save_file({"linear.weight": weight}, tiny.folder / "1_Dense" / "model.safetensors")
    return tiny, weight


@pytest.mark.parametrize("device", ["torch", "cpu"])
def test_colbert_gives_each_token_a_vector_of_length_one(device: str) -> None:
    tiny, weight = colbert()
    backend = build(tiny, device=device)
    config = backend.config
    assert config.tasks == ("token_embed",)
    assert config.prompts == {"query": "[Q] ", "document": "[D] "}
    texts = texts_of((7, 30))
    rows = finish(
        backend.token_rows(step_of(backend, texts)), PoolingParams(task="token_embed"), config
    )
    expected = torch.cat([tiny.hidden(ids) @ weight.T for ids in texts])
    expected = torch.nn.functional.normalize(expected, dim=1)
    np.testing.assert_allclose(rows, expected.numpy(), **CLOSE)


def test_texts_of_token_vectors_fit_by_their_best_matches() -> None:
    query = np.array([[1, 0], [0, 1]], np.float32)
    first = np.array([[1, 0], [0.6, 0.8], [-1, 0]], np.float32)
    second = np.array([[-1, 0]], np.float32)
    assert best_matches([query], [first, second]) == pytest.approx([1.8, -1.0])
    assert best_matches([query, second], [second, first]) == pytest.approx([-1.0, 1.0])


@pytest.mark.parametrize("device", ["torch", "cpu"])
@pytest.mark.parametrize("of_steps", [False, True], ids=["of answers", "of steps"])
def test_rewards_are_those_of_two_layers_behind_the_body(of_steps: bool, device: str) -> None:
    tiny = saved("Qwen2Model", DECODER, "last")
    count = 2 if of_steps else 1
    torch.manual_seed(3)
    head = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, count))
    weights = {
        f"model.{name}": t for name, t in load_file(tiny.folder / "model.safetensors").items()
    }
    weights |= {f"score.{name}": tensor for name, tensor in head.state_dict().items()}
    save_file(weights, tiny.folder / "model.safetensors")
    config = json.loads((tiny.folder / "config.json").read_text())
    kind = "Process" if of_steps else ""
    config["architectures"] = [f"Qwen2For{kind}RewardModel"]
    (tiny.folder / "config.json").write_text(json.dumps(config))

    backend = build(tiny, device=device)
    assert backend.config.tasks == (("token_classify",) if of_steps else ("classify", "score"))
    texts = texts_of((9, 40))
    step = step_of(backend, texts)
    with torch.inference_mode():
        expected = [head(tiny.hidden(ids)) for ids in texts]
    params = PoolingParams(task=backend.config.tasks[0])
    if of_steps:
        rows = finish(backend.token_rows(step), params, backend.config)
        truth = torch.cat(expected).softmax(-1)
    else:
        rows = finish(backend.pool(step), params, backend.config)
        truth = torch.stack([rewards[-1] for rewards in expected])
    np.testing.assert_allclose(rows, truth.detach().numpy(), **CLOSE)


# Of GTE: its makers' names, where matrices lie one below the other.
_PUBLISHED = (
    ("post_attention_layernorm.", "attn_ln."),
    ("post_mlp_layernorm.", "mlp_ln."),
    ("self_attn.o_proj.", "attention.o_proj."),
)


def test_gte_is_read_as_its_makers_publish_it() -> None:
    tiny = tiny_embedder("gte")
    own = tiny.model.state_dict()
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in own.items():
        stored = name.replace("layers.", "encoder.layer.", 1)
        for ours, theirs in _PUBLISHED:
            stored = stored.replace(ours, theirs)
        layer = name.partition(".self_attn.")[0]
        if ".self_attn.q_proj." in name:
            kind = name.rpartition(".")[2]
            parts = [own[f"{layer}.self_attn.{part}_proj.{kind}"] for part in "qkv"]
            stored = stored.replace("self_attn.q_proj", "attention.qkv_proj")
            tensor = torch.cat(parts)
        elif ".mlp.up_proj." in name:
            gate = own[name.replace("up_proj", "gate_proj")]
            stored, tensor = stored.replace("up_proj", "up_gate_proj"), torch.cat([tensor, gate])
        elif any(part in name for part in ("k_proj", "v_proj", "gate_proj")):
            continue
        tensors[f"new.{stored}"] = tensor.contiguous()
    config = json.loads((tiny.folder / "config.json").read_text())
    rope = config.pop("rope_parameters")
    config |= {
        "architectures": ["NewModel"],
        "model_type": "new",
        "position_embedding_type": "rope",
        "rope_theta": rope["rope_theta"],
        "rope_scaling": None,
    }
    folder = Path(tempfile.mkdtemp(prefix="tiny-"))
    write(folder, {"config.json": config})
    save_file(tensors, folder / "model.safetensors")
    texts = texts_of((5, 40))
    backend = build(dataclasses.replace(tiny, folder=folder))
    step = make_step([(ids, ()) for ids in texts], is_last=False)
    expected = np.concatenate([tiny.hidden(ids).numpy() for ids in texts])
    np.testing.assert_allclose(backend.token_rows(step), expected, **CLOSE)


def test_the_rope_of_gte_by_ntk() -> None:
    config = {"architectures": ["NewModel"], **SHAPE, "rope_theta": 1e4}
    scaled = read_pooling({**config, "rope_scaling": {"type": "ntk", "factor": 2.0}}, None)
    assert scaled is not None
    rope = scaled.page.layers[0].rope
    assert rope is not None
    assert (rope.kind, rope.theta) == ("linear", 2e4)
    assert rope.factor == pytest.approx(2.0 ** (2 / 16))
    with pytest.raises(ModelError, match="rope_scaling must be null, or of type ntk"):
        read_pooling({**config, "rope_scaling": {"type": "yarn", "factor": 2.0}}, None)


@pytest.mark.parametrize(
    ("architecture", "hint"),
    [
        ("XLMRobertaLoRA", "Jina v3"),
        ("JinaEmbeddingsV3Model", "Jina v3"),
        ("JinaBertForMaskedLM", "biased by distance"),
        ("HF_ColBERT", "PyLate"),
    ],
)
def test_what_is_refused_by_name(architecture: str, hint: str) -> None:
    with pytest.raises(ModelError, match=f"{architecture!r} is not supported: .*{hint}"):
        read_pooling({"architectures": [architecture], **SHAPE}, None)


@pytest.mark.parametrize(
    ("files", "hint"),
    [
        ({"1_SpladePooling/config.json": {"pooling_strategy": "sum"}}, "must be max"),
        ({"1_SpladePooling/config.json": {"activation_function": "log1p_relu"}}, "must be relu"),
    ],
)
def test_other_sparse_poolings_are_refused(files: dict[str, Any], hint: str) -> None:
    tiny = splade("BertForMaskedLM", SHAPE)
    write(tiny.folder, files)
    loaded = resolve_model(str(tiny.folder))
    with pytest.raises(ModelError, match=hint):
        read_pooling(loaded.config, loaded.path)
