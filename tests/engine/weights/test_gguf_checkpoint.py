"""A GGUF as Hugging Face would have it: names, rows, norms and config."""

from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo_engine.errors import ModelError
from octavo_engine.weights.gguf import GGUFFile
from octavo_engine.weights.gguf_checkpoint import GGUFCheckpoint
from octavo_engine.weights.gguf_config import gguf_config, gguf_generation_config
from octavo_engine.weights.gguf_names import ARCHITECTURES, hugging_face_name, unpermuted_rows
from octavo_engine.weights.open import open_checkpoint
from octavo_engine.weights.source import resolve_model

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, VOCAB, FFN = 32, 4, 2, 8, 11, 24


# Of falcon it depends on the other norm; phi2 had its projections fused in its first files.
NOT_READ = {"falcon": ("blk.0.attn_norm_2",), "phi2": ("blk.0.attn_qkv",)}

MORE_NUMBERS = {
    "deepseek2": {
        "attention.kv_lora_rank": 16,
        "attention.key_length": 12,
        "attention.value_length": 8,
        "expert_count": 4,
        "expert_used_count": 2,
        "expert_feed_forward_length": 8,
    }
}


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """What the converter does to q and k of the llama family."""
    split = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return np.ascontiguousarray(split.swapaxes(1, 2)).reshape(weight.shape)


def ramp(*shape: int) -> np.ndarray:
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


def write_model(path: Path, arch: str, *, layers=1, numbers=None, texts=None, extra=None) -> Path:
    writer = gguf.GGUFWriter(str(path), arch)
    writer.add_block_count(layers)
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-6)
    for name, value in (numbers or {}).items():
        add = writer.add_uint32 if isinstance(value, int) else writer.add_float32
        add(f"{arch}.{name}", value)
    for name, value in (texts or {}).items():
        writer.add_string(f"{arch}.{name}", value)
    tensors = {
        "token_embd.weight": ramp(VOCAB, HIDDEN),
        "output_norm.weight": ramp(HIDDEN),
        "blk.0.attn_q.weight": permuted(ramp(HIDDEN, HIDDEN), HEADS),
        "blk.0.attn_k.weight": permuted(ramp(KV_HEADS * HEAD_DIM, HIDDEN), KV_HEADS),
    }
    for name, array in (tensors | (extra or {})).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def config_of(tmp_path: Path, arch: str, **more) -> dict:
    return gguf_config(GGUFFile(write_model(tmp_path / "m.gguf", arch, **more)))


@pytest.mark.parametrize("arch", sorted(ARCHITECTURES))
def test_every_name_the_format_has_for_the_architecture_is_known(arch):
    """The gguf package's tables say which tensors a converter may write, and for which names."""
    number = next(n for n, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names = gguf.get_tensor_name_map(number, 1)
    for kind in gguf.MODEL_TENSORS[number]:
        stored = gguf.TENSOR_NAMES[kind].format(bid=0)
        if stored.startswith("rope_") or "rot_embd" in stored or "exps" in stored:
            continue
        if stored.endswith(("exp_probs_b", "ffn_gate_inp", "ffn_gate.0", "ffn_up.0", "ffn_down.0")):
            continue
        if arch == "phi3" and stored in ("blk.0.attn_q", "blk.0.attn_k", "blk.0.attn_v"):
            continue
        if ".{xid}" in stored or stored in NOT_READ.get(arch, ()):
            continue
        ours = hugging_face_name(stored + ".weight", ARCHITECTURES[arch])
        assert ours is not None, stored
        if arch == "phi3" and "gate_up" in ours:
            continue  # fused; the package maps it as well, under the plain name
        if stored == "token_embd_norm":
            continue  # which the package knows by BLOOM's own name only
        assert names.get_name(ours.removesuffix(".weight")) == stored


def test_rows_of_q_and_k_are_mapped_back(tmp_path):
    checkpoint = GGUFCheckpoint(GGUFFile(write_model(tmp_path / "m.gguf", "llama")))
    for part, rows in (("q", HIDDEN), ("k", KV_HEADS * HEAD_DIM)):
        stored = checkpoint.read(f"model.layers.0.self_attn.{part}_proj.weight", (rows, HIDDEN))
        values = stored.data.view(np.float32).reshape(rows, HIDDEN)
        assert stored.row_map is not None
        assert np.array_equal(values[stored.row_map], ramp(rows, HIDDEN))
        assert not np.array_equal(values, ramp(rows, HIDDEN))


@pytest.mark.parametrize("arch", ["qwen2", "qwen3", "gemma3", "phi3"])
def test_other_families_keep_their_rows(tmp_path, arch):
    checkpoint = GGUFCheckpoint(GGUFFile(write_model(tmp_path / "m.gguf", arch)))
    name = "model.layers.0.self_attn.q_proj.weight"
    assert checkpoint.read(name, (HIDDEN, HIDDEN)).row_map is None


def test_row_map_of_one_head():
    assert unpermuted_rows(8, 1).tolist() == [0, 2, 4, 6, 1, 3, 5, 7]
    assert unpermuted_rows(8, 2).tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_norms_of_gemma_carry_their_offset(tmp_path):
    checkpoint = GGUFCheckpoint(GGUFFile(write_model(tmp_path / "m.gguf", "gemma2")))
    assert checkpoint.read("model.norm.weight", (HIDDEN,)).offset == -1.0
    assert checkpoint.read("model.embed_tokens.weight", (VOCAB, HIDDEN)).offset == 0.0
    llama = GGUFCheckpoint(GGUFFile(write_model(tmp_path / "l.gguf", "llama")))
    assert llama.read("model.norm.weight", (HIDDEN,)).offset == 0.0


def test_wrong_shape_missing_and_unreadable_tensors_are_named(tmp_path):
    extra = {"output.weight": np.ones((VOCAB, HIDDEN), np.float64)}
    checkpoint = GGUFCheckpoint(GGUFFile(write_model(tmp_path / "m.gguf", "llama", extra=extra)))
    with pytest.raises(ModelError, match=r"model.norm.weight \(output_norm.weight\) in .*m.gguf"):
        checkpoint.read("model.norm.weight", (3,))
    with pytest.raises(ModelError, match=r"tensor nothing.weight is missing from .*m.gguf"):
        checkpoint.read("nothing.weight", (3,))
    with pytest.raises(ModelError, match=r"lm_head.weight .* has type F64; readable are F32"):
        checkpoint.read("lm_head.weight", (VOCAB, HIDDEN))


def test_config_of_llama(tmp_path):
    config = config_of(tmp_path, "llama")
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (HEADS, KV_HEADS)
    assert (config["head_dim"], config["vocab_size"]) == (HEAD_DIM, VOCAB)
    assert config["tie_word_embeddings"] is True
    assert config["rms_norm_eps"] == pytest.approx(1e-6)
    assert "rope_scaling" not in config


def test_output_weight_unties_the_embedding(tmp_path):
    extra = {"output.weight": ramp(VOCAB, HIDDEN)}
    assert config_of(tmp_path, "llama", extra=extra)["tie_word_embeddings"] is False


def test_sliding_window_makes_a_llama_a_mistral(tmp_path):
    config = config_of(tmp_path, "llama", numbers={"attention.sliding_window": 64})
    assert config["architectures"] == ["MistralForCausalLM"]
    assert config["sliding_window"] == 64


def test_llama_3_frequencies_become_divisors_for_any_length(tmp_path):
    extra = {"rope_freqs.weight": np.array([1, 2, 4, 8], np.float32)}
    scaling = config_of(tmp_path, "llama", extra=extra)["rope_scaling"]
    assert scaling["rope_type"] == "longrope"
    assert scaling["long_factor"] == scaling["short_factor"] == [1.0, 2.0, 4.0, 8.0]
    assert scaling["attention_factor"] == 1.0


def test_phi3_rope(tmp_path):
    config = config_of(
        tmp_path,
        "phi3",
        numbers={
            "rope.dimension_count": 4,
            "rope.scaling.original_context_length": 128,
            "rope.scaling.attn_factor": 1.25,
        },
        extra={
            "rope_factors_long.weight": np.array([3, 4], np.float32),
            "rope_factors_short.weight": np.array([1, 2], np.float32),
        },
    )
    assert config["partial_rotary_factor"] == 0.5
    assert config["original_max_position_embeddings"] == 128
    assert config["rope_scaling"] == {
        "rope_type": "longrope",
        "long_factor": [3.0, 4.0],
        "short_factor": [1.0, 2.0],
        "original_max_position_embeddings": 128,
        "attention_factor": 1.25,
    }


def test_linear_scaling(tmp_path):
    numbers = {"rope.scaling.factor": 4.0}
    config = config_of(tmp_path, "qwen2", numbers=numbers, texts={"rope.scaling.type": "linear"})
    assert config["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}


def test_gemma_particulars(tmp_path):
    numbers = {
        "attention.key_length": 16,
        "attention.sliding_window": 64,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    }
    config = config_of(tmp_path, "gemma2", layers=4, numbers=numbers)
    assert config["head_dim"] == config["query_pre_attn_scalar"] == 16
    assert (config["attn_logit_softcapping"], config["final_logit_softcapping"]) == (50.0, 30.0)
    assert config["layer_types"] == ["sliding_attention", "full_attention"] * 2
    gemma3 = config_of(tmp_path, "gemma3", layers=6)
    assert gemma3["layer_types"] == ["sliding_attention"] * 5 + ["full_attention"]
    assert gemma3["rope_local_base_freq"] == 10000.0
    assert gemma3["architectures"] == ["Gemma3ForCausalLM"]


def test_granite_multipliers(tmp_path):
    numbers = {
        "attention.scale": 0.25,
        "embedding_scale": 12.0,
        "residual_scale": 0.5,
        "logit_scale": 8.0,
    }
    config = config_of(tmp_path, "granite", numbers=numbers)
    names = ("attention_multiplier", "embedding_multiplier", "residual_multiplier",
             "logits_scaling")  # fmt: skip
    assert [config[name] for name in names] == [0.25, 12.0, 0.5, 8.0]


def test_smollm3_leaves_every_fourth_layer_without_rope(tmp_path):
    assert config_of(tmp_path, "smollm3", layers=5)["no_rope_layers"] == [1, 1, 1, 0, 1]


def test_unknown_architecture_lists_the_known(tmp_path):
    with pytest.raises(ModelError, match=r"architecture 'mamba'; supported are llama, smollm3"):
        config_of(tmp_path, "mamba")


def test_missing_and_absurd_settings_are_named(tmp_path):
    writer = gguf.GGUFWriter(str(tmp_path / "m.gguf"), "llama")
    writer.add_embedding_length(0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match=r"llama.embedding_length must be a whole number from 1"):
        gguf_config(GGUFFile(tmp_path / "m.gguf"))


def test_end_tokens_come_from_ids_and_from_the_names_of_control_tokens(tmp_path):
    writer = gguf.GGUFWriter(str(tmp_path / "m.gguf"), "llama")
    writer.add_token_list(["<eos>", "a", "<end_of_turn>", "<|im_end|>"])
    writer.add_token_types([3, 1, 3, 1])  # the last one is text that looks like a control token
    writer.add_eos_token_id(0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GGUFFile(tmp_path / "m.gguf")
    assert gguf_generation_config(file) == {"eos_token_id": [0, 2]}


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"block_count": 10**9}, "block_count must be a whole number from 1 to 10000"),
        ({"attention.head_count": 0}, "head_count must be a whole number from 1"),
        ({"attention.head_count_kv": 0}, "head_count_kv must be a whole number from 1"),
        ({"attention.head_count": 64}, "heads of size 0"),
        ({"attention.layer_norm_rms_epsilon": float("nan")}, "rms_epsilon is not a number"),
    ],
)
def test_absurd_numbers_are_named(tmp_path, numbers, message):
    file = GGUFFile(write_model(tmp_path / "m.gguf", "llama"))
    file.metadata.update({f"llama.{name}": value for name, value in numbers.items()})
    with pytest.raises(ModelError, match=message):
        gguf_config(file)


@pytest.mark.parametrize("arch", ["llama", "gemma3", "phi3", "smollm3", "deepseek2"])
@settings(
    max_examples=60,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_mutated_headers_raise_model_errors_only(tmp_path, arch, data):
    valid = tmp_path / "valid"
    if not valid.exists():
        numbers = {"rope.scaling.factor": 2.0, "rope.dimension_count": 8}
        write_model(valid, arch, numbers=numbers | MORE_NUMBERS.get(arch, {}))
    mutated = bytearray(valid.read_bytes())
    for _ in range(data.draw(st.integers(1, 8))):
        place = data.draw(st.integers(0, 1500))
        mutated[place] = data.draw(st.sampled_from([0, 1, 4, 8, 9, 32, 127, 128, 255]))
    (tmp_path / "m.gguf").write_bytes(mutated)
    try:
        checkpoint = open_checkpoint(resolve_model(str(tmp_path / "m.gguf")))
        for name in checkpoint.names():
            checkpoint.read(name, (HIDDEN, HIDDEN))
    except ModelError:
        pass


def test_the_demo_model_opens_whole():
    files = resolve_model("demo://smollm2")
    assert files.kind == "gguf"
    assert files.config["vocab_size"] == 49152
    assert files.generation_config == {"eos_token_id": [2], "temperature": 0.2, "top_p": 0.5}
    checkpoint = open_checkpoint(files)
    assert len(set(checkpoint.names())) == 272
    down = checkpoint.read("model.layers.29.mlp.down_proj.weight", (576, 1536))
    assert (down.dtype, len(down.data)) == ("Q4_1", 576 * 1536 // 32 * 20)
    assert checkpoint.total_bytes > 90_000_000
