"""What a model that pools is, read from config.json and sentence-transformers' files beside it."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch

from octavo_engine.backends.pooling import make_step
from octavo_engine.backends.pooling_registry import build_pooling_backend
from octavo_engine.config import EngineConfig
from octavo_engine.errors import ModelError
from octavo_engine.models.encoder_config import EncoderConfig
from octavo_engine.models.encoder_names import decoder_rename, encoder_rename
from octavo_engine.models.pooling_config import read_pooling
from octavo_engine.weights.source import resolve_model
from tests.engine.models.tiny_poolers import tiny_embedder, write_modules

BERT: dict[str, Any] = {
    "architectures": ["BertModel"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}
LLAMA = BERT | {"architectures": ["LlamaForCausalLM"], "rms_norm_eps": 1e-5}
SCORER = BERT | {"architectures": ["BertForSequenceClassification"]}


def test_a_model_that_generates_is_none(tmp_path):
    assert read_pooling(LLAMA, tmp_path) is None
    assert read_pooling(LLAMA, None) is None
    assert read_pooling({"architectures": ["UnknownForCausalLM"]}, tmp_path) is None


def test_modules_make_an_embedder_of_a_model_that_generates(tmp_path):
    write_modules(tmp_path, "last", normalize=False)
    config = read_pooling(LLAMA, tmp_path)
    assert config is not None
    assert (config.pooling, config.normalize, config.tasks) == (
        "last", False, ("embed", "token_embed"),
    )  # fmt: skip


def test_a_body_alone_has_its_kinds_usual_pooling():
    bert = read_pooling(BERT, None)
    llama = read_pooling(LLAMA | {"architectures": ["LlamaModel"]}, None)
    assert bert is not None and llama is not None
    assert (bert.pooling, llama.pooling) == ("mean", "last")
    assert bert.normalize and llama.normalize


def test_files_beside_the_model_are_read(tmp_path):
    write_modules(
        tmp_path,
        "cls",
        sentence_bert_config={"max_seq_length": 128},
        config_sentence_transformers={
            "prompts": {"query": "query: ", "passage": "passage: "},
            "default_prompt_name": "passage",
            "similarity_fn_name": "dot",
        },
    )
    config = read_pooling(BERT | {"matryoshka_dimensions": [32, 16, 999]}, tmp_path)
    assert config is not None
    assert (config.pooling, config.normalize, config.max_length) == ("cls", True, 128)
    assert config.prompts == {"query": "query: ", "passage": "passage: "}
    assert (config.default_prompt, config.similarity) == ("passage", "dot")
    assert config.dimensions == (16, 32)
    whole = read_pooling(BERT | {"is_matryoshka": True}, tmp_path)
    assert whole is not None and whole.dimensions == tuple(range(1, 65))


def test_roberta_loses_the_rows_of_its_table_before_the_first_position():
    roberta = BERT | {"architectures": ["XLMRobertaModel"], "pad_token_id": 1,
                      "max_position_embeddings": 514}  # fmt: skip
    config = read_pooling(roberta, None)
    assert config is not None and isinstance(config.body, EncoderConfig)
    assert (config.max_length, config.body.position_offset) == (512, 2)


@pytest.mark.parametrize(
    "fields, labels, activation, tasks",
    [
        ({"num_labels": 1}, ("LABEL_0",), "sigmoid", ("classify", "score")),
        ({"id2label": {"0": "x"}}, ("x",), "sigmoid", ("classify", "score")),
        ({"id2label": {"1": "b", "0": "a"}}, ("a", "b"), "softmax", ("classify",)),
        ({"problem_type": "multi_label_classification"}, ("LABEL_0", "LABEL_1"), "sigmoid",
         ("classify",)),
        ({"num_labels": 1, "sentence_transformers":
            {"activation_fn": "torch.nn.modules.linear.Identity"}}, ("LABEL_0",), "none",
         ("classify", "score")),
        ({"num_labels": 1, "sbert_ce_default_activation_function":
            "torch.nn.modules.activation.Sigmoid"}, ("LABEL_0",), "sigmoid",
         ("classify", "score")),
    ],
)  # fmt: skip
def test_a_classifier_has_labels_and_an_activation(fields, labels, activation, tasks):
    config = read_pooling(SCORER | fields, None)
    assert config is not None
    assert (config.labels, config.score_activation, config.tasks) == (labels, activation, tasks)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"hidden_size": 66}, "hidden_size must be a multiple of 4"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type must be absolute"),
        ({"hidden_act": "mish"}, "hidden_act must be one of"),
        ({"layer_norm_eps": 0}, "layer_norm_eps must be above 0"),
        ({"is_decoder": True}, "is_decoder must be false"),
        ({"num_hidden_layers": None}, "num_hidden_layers is missing"),
    ],
)
def test_a_broken_config_names_its_field(fields, message):
    with pytest.raises(ModelError, match=message):
        read_pooling(BERT | fields, None)
    with pytest.raises(ModelError, match="id2label must name the outputs 0, 1, 2"):
        read_pooling(SCORER | {"id2label": {"0": "a", "2": "b"}}, None)


def test_broken_files_are_named(tmp_path):
    file = tmp_path / "modules.json"
    for content, message in [
        ("{", "modules.json is not valid JSON"),
        ("[]", "must be a list of 1 to 16 modules"),
        ('[{"type": "a.CNN", "path": "1_CNN"}]', "modules of type CNN are not supported"),
        ('[{"type": "a.Normalize", "path": ""}]', "no module of type Pooling"),
        ('[{"type": "a.Pooling", "path": "../x"}]', "a path within the folder"),
        ('[{"type": "a.Pooling", "path": "1_Pooling"}]', r"1_Pooling.config\.json is missing"),
    ]:
        file.write_text(content)
        with pytest.raises(ModelError, match=message):
            read_pooling(BERT, tmp_path)
    write_modules(tmp_path, "mean")
    pooling = tmp_path / "1_Pooling" / "config.json"
    cases: list[tuple[dict[str, Any], str]] = [
        ({"pooling_mode_cls_token": True}, "exactly one pooling mode is supported; got cls, mean"),
        ({"pooling_mode_mean_tokens": False}, "exactly one pooling mode is supported; got none"),
        ({"include_prompt": False}, "include_prompt must be true"),
        ({"pooling_mode": "median"}, "pooling_mode must be one of"),
    ]
    for fields, message in cases:
        pooling.write_text(json.dumps({"pooling_mode_mean_tokens": True} | fields))
        with pytest.raises(ModelError, match=message):
            read_pooling(BERT, tmp_path)
    pooling.write_text(json.dumps({"pooling_mode": "lasttoken"}))
    config = read_pooling(BERT, tmp_path)
    assert config is not None and config.pooling == "last"


def test_an_unknown_body_with_modules_is_refused(tmp_path):
    write_modules(tmp_path, "mean")
    with pytest.raises(ModelError, match="'MPNetModel' is not supported for embeddings"):
        read_pooling(BERT | {"architectures": ["MPNetModel"]}, tmp_path)


def test_dense_modules_follow_the_pooling(tmp_path):
    tiny = tiny_embedder("bert")
    for file in tiny.folder.iterdir():
        if file.is_file():
            (tmp_path / file.name).write_bytes(file.read_bytes())
    write_modules(tmp_path, "mean")
    modules = json.loads((tmp_path / "modules.json").read_text())
    modules.insert(2, {"type": "sentence_transformers.models.Dense", "path": "2_Dense"})
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    dense = tmp_path / "2_Dense"
    dense.mkdir()
    fields = {"in_features": 64, "out_features": 24, "bias": True,
              "activation_function": "torch.nn.modules.activation.Tanh"}  # fmt: skip
    (dense / "config.json").write_text(json.dumps(fields))
    rng = np.random.default_rng(0)
    weight = rng.normal(0, 0.2, (24, 64)).astype(np.float32)
    bias = rng.normal(0, 0.2, 24).astype(np.float32)
    safetensors.numpy.save_file(
        {"linear.weight": weight, "linear.bias": bias}, str(dense / "model.safetensors")
    )
    files = resolve_model(str(tmp_path))
    config = read_pooling(files.config, files.path)
    assert config is not None and config.num_columns == 24
    ids = [5, 6, 7, 8]
    expected = np.tanh(tiny.embedding(ids) @ weight.T + bias)
    for device in ("torch", "cpu"):
        settings = EngineConfig(device=device, num_threads=1)
        backend = build_pooling_backend(settings, config, files, max_model_len=16)
        backend.prepare(max_tokens=16, max_texts=1)
        step = make_step([(ids, ())], is_last=False)
        np.testing.assert_allclose(backend.pool(step)[0], expected, atol=1e-5)
        assert backend.token_rows(step).shape == (4, 24)

    (dense / "config.json").write_text(json.dumps(fields | {"in_features": 32}))
    with pytest.raises(ModelError, match="in_features is 32, but 64 columns come in"):
        read_pooling(files.config, files.path)


def test_names_of_older_and_other_files():
    bert, nomic = encoder_rename("bert"), encoder_rename("nomic")
    distil = encoder_rename("distilbert")
    layer = "encoder.layer.3."
    assert bert("bert.embeddings.LayerNorm.gamma") == ["embeddings.LayerNorm.weight"]
    assert bert("classifier.weight") == ["classifier.weight"]
    assert nomic("encoder.layers.3.attn.Wqkv.weight") == [
        f"{layer}attention.self.{part}.weight" for part in ("query", "key", "value")
    ]
    assert nomic("layers.3.self_attn.k_proj.weight") == [f"{layer}attention.self.key.weight"]
    assert nomic("encoder.layers.3.mlp.fc12.weight") == [f"{layer}intermediate.gate.weight"]
    assert nomic("encoder.layers.3.norm2.bias") == [f"{layer}output.LayerNorm.bias"]
    assert distil("distilbert.transformer.layer.3.ffn.lin1.bias") == [
        f"{layer}intermediate.dense.bias"
    ]
    assert decoder_rename("layers.0.mlp.up_proj.weight") == ["model.layers.0.mlp.up_proj.weight"]
    assert decoder_rename("score.weight") == ["score.weight"]


def test_nomic_as_its_makers_stored_it(tmp_path):
    """q, k and v in one matrix, under names of its own: the same vectors as from today's names."""
    tiny = tiny_embedder("nomic")
    state = {name: values.clone() for name, values in tiny.model.state_dict().items()}
    old: dict[str, torch.Tensor] = {}
    for name, values in state.items():
        if ".self_attn.q_proj." in name:
            parts = [state[name.replace("q_proj", f"{p}_proj")] for p in "qkv"]
            old[name.replace("self_attn.q_proj", "attn.Wqkv")] = torch.cat(parts)
        elif "k_proj" not in name and "v_proj" not in name:
            for ours, theirs in [
                ("embeddings.LayerNorm", "emb_ln"), ("self_attn.o_proj", "attn.out_proj"),
                ("mlp.up_proj", "mlp.fc11"), ("mlp.gate_proj", "mlp.fc12"),
                ("mlp.down_proj", "mlp.fc2"), ("post_attention_layernorm", "norm1"),
                ("post_mlp_layernorm", "norm2"),
            ]:  # fmt: skip
                name = name.replace(ours, theirs)
            old[name] = values
    old = {f"encoder.{n}" if n.startswith("layers.") else n: v for n, v in old.items()}
    safetensors.numpy.save_file(
        {name: values.numpy() for name, values in old.items()},
        str(tmp_path / "model.safetensors"),
    )
    fields = {
        "architectures": ["NomicBertModel"], "n_embd": 64, "n_head": 4, "n_inner": 96, "n_layer": 2,
        "n_positions": 160, "layer_norm_epsilon": 1e-12, "vocab_size": 300, "type_vocab_size": 2,
        "rotary_emb_base": 1000, "rotary_emb_fraction": 1.0, "rotary_emb_interleaved": False,
        "activation_function": "swiglu", "qkv_proj_bias": False, "mlp_fc1_bias": False,
        "prenorm": False, "rotary_scaling_factor": None,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(fields))
    write_modules(tmp_path, "mean")
    files = resolve_model(str(tmp_path))
    config = read_pooling(files.config, files.path)
    assert config is not None
    backend = build_pooling_backend(
        EngineConfig(device="cpu", num_threads=1), config, files, max_model_len=160
    )
    backend.prepare(max_tokens=160, max_texts=1)
    ids = list(range(3, 43))
    row = backend.pool(make_step([(ids, ())], is_last=False))[0]
    np.testing.assert_allclose(row, tiny.embedding(ids), rtol=1e-4, atol=2e-5)
