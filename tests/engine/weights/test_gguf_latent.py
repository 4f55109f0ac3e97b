"""GGUF files of DeepSeek's architecture, written with the gguf package as converters write them,
now and before latent attention had fields of its own: their logits are those of transformers."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import pytest

from octavo_engine.backends.native.backend import NativeBackend
from octavo_engine.backends.torch.backend import TorchBackend
from octavo_engine.errors import ModelError
from octavo_engine.models.config import ModelConfig
from octavo_engine.weights.gguf import GGUFFile
from octavo_engine.weights.gguf_config import gguf_config
from octavo_engine.weights.open import open_checkpoint
from octavo_engine.weights.source import resolve_model
from tests.engine.backends.driver import Driver, random_tokens, run_alone
from tests.engine.backends.tolerance import FLOAT32, INT8_AGAINST_FLOAT32, error
from tests.engine.models.latents import LATENTS
from tests.engine.models.tiny import make_model

if TYPE_CHECKING:
    from pathlib import Path

    from tests.engine.models.tiny import TinyModel

SOFTMAX, SIGMOID = gguf.ExpertGatingFuncType.SOFTMAX, gguf.ExpertGatingFuncType.SIGMOID
MAX_MODEL_LEN = 256


def of_one_magnitude(name: str, **changes: Any) -> TinyModel:
    """As all published models: a file has room for one of the two numbers, and for no biases."""
    kind, fields = LATENTS[name]
    rope = fields.get("rope_parameters")
    if rope is not None:
        fields = fields | {"rope_parameters": rope | {"mscale": 0.9}}
    return make_model(name, kind, fields | {"attention_bias": False} | changes)


def write(
    path: Path,
    model: TinyModel,
    *,
    is_old: bool = False,
    quantized: bool = False,
    fields: dict[str, Any] | None = None,
    without: tuple[str, ...] = (),
) -> Path:
    """`fields` replace or add to the metadata, and None leaves one out."""
    writer = gguf.GGUFWriter(str(path), "deepseek2")
    adders: dict[type, Any] = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
    }
    for key, value in (metadata(model.config, is_old=is_old) | (fields or {})).items():
        if value is not None:
            adders[type(value)](f"deepseek2.{key}", value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.DEEPSEEK2, model.config["num_hidden_layers"])
    for name, array in converted(model, is_old=is_old).items():
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert stored is not None, name
        if stored.endswith(without):
            continue
        if quantized and array.ndim > 1 and array.shape[-1] % 32 == 0 and "gate_inp" not in stored:
            packed = gguf.quants.quantize(array, gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(stored, packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(stored, np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def metadata(hf: dict[str, Any], *, is_old: bool) -> dict[str, Any]:
    nope, rope, value = hf["qk_nope_head_dim"], hf["qk_rope_head_dim"], hf["v_head_dim"]
    is_sigmoid = hf["architectures"] == ["DeepseekV3ForCausalLM"]
    found: dict[str, Any] = {
        "block_count": hf["num_hidden_layers"],
        "context_length": hf["max_position_embeddings"],
        "embedding_length": hf["hidden_size"],
        "feed_forward_length": hf["intermediate_size"],
        "attention.head_count": hf["num_attention_heads"],
        "attention.head_count_kv": hf["num_attention_heads"] if is_old else 1,
        "attention.layer_norm_rms_epsilon": hf["rms_norm_eps"],
        "attention.q_lora_rank": hf["q_lora_rank"],
        "attention.kv_lora_rank": hf["kv_lora_rank"],
        "attention.key_length": nope + rope if is_old else hf["kv_lora_rank"] + rope,
        "attention.value_length": value if is_old else hf["kv_lora_rank"],
        "rope.dimension_count": rope,
        "rope.freq_base": 1e4,
        "leading_dense_block_count": hf["first_k_dense_replace"],
        "expert_count": hf["n_routed_experts"],
        "expert_used_count": hf["num_experts_per_tok"],
        "expert_shared_count": hf["n_shared_experts"],
        "expert_feed_forward_length": hf["moe_intermediate_size"],
        "expert_weights_scale": float(hf["routed_scaling_factor"]),
        "expert_weights_norm": bool(hf["norm_topk_prob"]),
    }
    if not is_old:
        found |= {
            "attention.key_length_mla": nope + rope,
            "attention.value_length_mla": value,
            "expert_gating_func": int(SIGMOID if is_sigmoid else SOFTMAX),
        }
    if hf.get("n_group") and not is_old:
        found |= {
            "expert_group_count": hf["n_group"],
            "expert_group_used_count": hf["topk_group"],
        }
    scaling = hf["rope_parameters"]
    if scaling["rope_type"] == "yarn":
        found |= {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": float(scaling["factor"]),
            "rope.scaling.original_context_length": scaling["original_max_position_embeddings"],
            "rope.scaling.yarn_log_multiplier": 0.1 * scaling["mscale_all_dim"],
        }
    return found


def converted(model: TinyModel, *, is_old: bool) -> dict[str, np.ndarray]:
    """What a converter does to tensors: experts in one, and kv_b in two, keys transposed."""
    hf = model.config
    result: dict[str, np.ndarray] = {}
    experts: dict[str, list[np.ndarray]] = {}
    for name, tensor in model.tensors.items():
        array = tensor.detach().float().numpy()
        if match := re.match(r"(.*\.experts)\.\d+(\..*)", name):
            experts.setdefault(match[1] + match[2], []).append(array)
        elif name.endswith("e_score_correction_bias"):
            result[name.replace("_bias", ".bias")] = array
        elif name.endswith("kv_b_proj.weight") and not is_old:
            heads = array.reshape(hf["num_attention_heads"], -1, hf["kv_lora_rank"])
            keys, values = np.split(heads, [hf["qk_nope_head_dim"]], axis=1)
            result[name.replace("kv_b", "k_b")] = keys.swapaxes(1, 2)
            result[name.replace("kv_b", "v_b")] = values
        else:
            result[name] = array
    return result | {name: np.stack(parts) for name, parts in experts.items()}


def open_backend(path: Path, kind: Any = TorchBackend) -> Any:
    files = resolve_model(str(path))
    config = ModelConfig.from_hf(files.config)
    more = {"dtype": "f32"} if kind is NativeBackend else {}
    return kind(config, open_checkpoint(files), max_model_len=MAX_MODEL_LEN, **more)


CASES = [
    ("deepseek-v2-lite", False),
    ("deepseek-v2-lite", True),
    ("deepseek-v2", False),
    ("deepseek-v3", False),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "is_old"), CASES)
@pytest.mark.parametrize("kind", [TorchBackend, NativeBackend])
def test_a_file_gives_the_logits_of_transformers(
    tmp_path: Path, name: str, is_old: bool, kind: Any
) -> None:
    model = of_one_magnitude(name)
    backend = open_backend(write(tmp_path / "m.gguf", model, is_old=is_old), kind)
    token_ids = random_tokens(180, seed=3)  # beyond yarn's original context
    logits = run_alone(backend, token_ids, chunks=[31, 1])
    np.testing.assert_allclose(logits, model.logits(token_ids), **FLOAT32)


@pytest.mark.slow
def test_an_old_file_of_sigmoid_experts_is_known_by_its_bias(tmp_path: Path) -> None:
    model = of_one_magnitude("deepseek-v3", n_group=1, topk_group=1, rope_parameters=None)
    path = write(tmp_path / "m.gguf", model, is_old=True)
    assert resolve_model(str(path)).config["architectures"] == ["DeepseekV3ForCausalLM"]
    token_ids = random_tokens(60, seed=4)
    logits = run_alone(open_backend(path), token_ids)
    np.testing.assert_allclose(logits, model.logits(token_ids), **FLOAT32)


def test_both_layouts_of_a_quantised_file_give_the_same(tmp_path: Path) -> None:
    """Eight bits of either, by both backends: not far from the model."""
    sizes = {"qk_nope_head_dim": 32, "v_head_dim": 32}
    model = of_one_magnitude("deepseek-v2-lite", rope_parameters=None, **sizes)
    token_ids = random_tokens(40, seed=5)
    expected = model.logits(token_ids)
    for is_old in (False, True):
        path = write(tmp_path / f"{is_old}.gguf", model, is_old=is_old, quantized=True)
        for kind in (TorchBackend, NativeBackend):
            logits = run_alone(open_backend(path, kind), token_ids)
            assert 1e-4 < error(logits, expected) < INT8_AGAINST_FLOAT32, (is_old, kind)


def test_bits_do_not_depend_on_chunks(tmp_path: Path) -> None:
    model = of_one_magnitude("deepseek-v3")
    path = write(tmp_path / "m.gguf", model)
    token_ids = random_tokens(70, seed=6)
    alone = run_alone(open_backend(path, NativeBackend), token_ids, chunks=[70])
    driver = Driver(open_backend(path, NativeBackend))
    first, other = driver.add(0, token_ids), driver.add(1, random_tokens(33, seed=7))
    driver.step([(first, 17), (other, 33)])
    driver.step([(first, 53)])
    np.testing.assert_array_equal(np.array(first.logits), alone)


def test_settings_of_yarn_and_groups(tmp_path: Path) -> None:
    model = of_one_magnitude("deepseek-v3")
    betas = {"rope.scaling.yarn_beta_fast": 1.0, "rope.scaling.yarn_beta_slow": 1.0}
    config = gguf_config(GGUFFile(write(tmp_path / "m.gguf", model, fields=betas)))
    assert config["rope_scaling"] == {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "beta_fast": 1.0,
        "beta_slow": 1.0,
        "mscale": 0.9,
        "mscale_all_dim": 0.9,
    }
    assert (config["n_group"], config["topk_group"]) == (4, 2)
    assert (config["qk_nope_head_dim"], config["v_head_dim"]) == (24, 20)


@pytest.mark.parametrize(("experts", "groups"), [(160, (8, 3)), (256, (8, 4)), (64, (1, 1))])
def test_groups_of_files_that_have_no_field_for_them(
    tmp_path: Path, experts: int, groups: tuple[int, int]
) -> None:
    path = write(tmp_path / "m.gguf", of_one_magnitude("deepseek-v3"), is_old=True)
    file = GGUFFile(path)
    file.metadata["deepseek2.expert_count"] = experts
    config = gguf_config(file)
    assert (config["n_group"], config["topk_group"]) == groups


@pytest.mark.parametrize(
    ("name", "fields", "without", "message"),
    [
        ("deepseek-v3", {}, ("exp_probs_b.bias",), "gating_func 2 without a bias"),
        ("deepseek-v3", {"expert_gating_func": 1}, (), "gating_func 1 with a bias"),
        ("deepseek-v2", {"expert_weights_norm": True}, (), "expert_weights_norm true"),
        ("deepseek-v2", {"expert_count": None}, (), "deepseek2.expert_count is missing"),
        ("deepseek-v2", {"attention.temperature_scale": 0.1}, (), "scaled by position"),
        ("deepseek-v2", {"attention.key_length_mla": 16}, (), "16, must be above"),
    ],
)
def test_what_no_page_computes_is_named(
    tmp_path: Path, name: str, fields: dict[str, Any], without: tuple[str, ...], message: str
) -> None:
    path = write(tmp_path / "m.gguf", of_one_magnitude(name), fields=fields, without=without)
    with pytest.raises(ModelError, match=message):
        resolve_model(str(path))


@pytest.mark.parametrize("kind", [TorchBackend, NativeBackend])
def test_half_of_a_split_matrix_is_missing(tmp_path: Path, kind: Any) -> None:
    model = of_one_magnitude("deepseek-v2")
    path = write(tmp_path / "m.gguf", model, without=("0.attn_v_b.weight",))
    with pytest.raises(ModelError, match=r"lacks 1 tensor .*layers\.0\.self_attn\.v_b_proj"):
        open_backend(path, kind)
