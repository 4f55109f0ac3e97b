"""What is known of a model from its files, and the settings that travel to the core."""

import json
from pathlib import Path

import numpy as np
import pytest

from octavo_engine.config import EngineConfig, SimConfig
from octavo_engine.core.build import build_engine
from octavo_engine.core.identity import architecture_of, default_params, format_of, identify
from octavo_engine.core.model_files import load_model_tokenizer, localized, resolve
from octavo_engine.errors import ConfigError
from octavo_engine.weights.source import ModelFiles

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "max_position_embeddings": 96,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 3,
}


def make_files(folder: Path, *, generation=None, **config):
    (folder / "model.safetensors").write_bytes(b"x" * 10)
    return ModelFiles(str(folder), folder, "safetensors", {**LLAMA, **config}, generation or {})


def test_end_of_text_is_what_config_and_generation_config_say(tmp_path):
    files = make_files(tmp_path, generation={"eos_token_id": [3, 7]})
    identity = identify(EngineConfig(), files)
    assert (identity.own_max_model_len, identity.eos_token_ids) == (96, (3, 7))


def test_fields_of_config_json_are_replaced(tmp_path):
    files = make_files(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(files.config))
    plain = EngineConfig(model=str(tmp_path))
    given = {
        "architectures": ["MistralForCausalLM"],
        "max_position_embeddings": 32,
        "num_key_value_heads": 2,
    }
    config = plain.replace(hf_overrides=json.dumps(given))
    found = resolve(config)
    assert found is not None
    assert found.config == {**LLAMA, **given}
    assert architecture_of(found) == "MistralForCausalLM"
    assert identify(config, found).own_max_model_len == 32
    assert identify(config, found).digest != identify(plain, resolve(plain)).digest
    again = resolve(localized(config, found))
    assert again is not None
    assert again.config == found.config


@pytest.mark.parametrize("text", ["[]", "nothing"])
def test_overrides_that_are_no_object_are_refused_at_start(text):
    with pytest.raises(ConfigError, match="--hf-overrides"):
        EngineConfig(hf_overrides=text)


def test_the_digest_covers_files_shape_and_settings_that_change_numbers(tmp_path):
    config = EngineConfig()
    files = make_files(tmp_path)
    digests = [
        identify(config, files).digest,
        identify(config, make_files(tmp_path, rms_norm_eps=1e-6)).digest,
        identify(config.replace(dtype="float32"), files).digest,
        identify(config.replace(load_format="dummy"), files).digest,
        identify(config.replace(kv_cache_dtype="int8"), files).digest,
    ]
    (tmp_path / "model.safetensors").write_bytes(b"x" * 11)
    digests.append(identify(config, files).digest)
    assert len(set(digests)) == 6
    again = identify(config.replace(seed=5, max_model_len=50), files)
    assert again.digest == digests[-1]


def test_the_digest_covers_the_draft_model_whose_layers_share_the_blocks(tmp_path):
    files = make_files(tmp_path)
    digests = [identify(EngineConfig(), files).digest]
    for name, weights in (("one", b"1"), ("other", b"2"), ("copy", b"1")):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(LLAMA))
        (folder / "model.safetensors").write_bytes(weights * 1000)
        config = EngineConfig(speculative_config=json.dumps({"model": str(folder)}))
        digests.append(identify(config, files).digest)
    assert len(set(digests)) == 3
    assert digests[1] == digests[3]


def test_a_fine_tuned_model_is_another_one_and_the_same_files_are_the_same_anywhere(tmp_path):
    def digest_of(folder: str, data: bytes, name: str = "model.safetensors") -> bytes:
        path = tmp_path / folder
        path.mkdir()
        (path / name).write_bytes(data)
        (path / f"README of {folder}").write_text(folder)
        files = ModelFiles(str(path), path, "safetensors", LLAMA, {})
        return identify(EngineConfig(), files).digest

    weights = np.random.default_rng(0).integers(0, 256, 20_000_000, np.uint8)
    tuned = weights.copy()
    tuned[9_000_000:9_100_000] ^= 1  # one layer's projections: half a percent
    base = digest_of("base", weights.tobytes())
    assert digest_of("tuned", tuned.tobytes()) != base
    assert digest_of("elsewhere", weights.tobytes(), "renamed.safetensors") == base


def test_recommended_parameters_are_taken_where_they_are_numbers():
    found = default_params({
        "temperature": 0.6, "top_p": 1, "top_k": 20.0, "max_new_tokens": 50, "min_p": "x",
        "repetition_penalty": float("nan"), "do_sample": True,
    })  # fmt: skip
    assert found == {"temperature": 0.6, "top_p": 1.0, "top_k": 20, "max_tokens": 50}
    assert default_params({"do_sample": False}) == {"temperature": 0.0}


def test_a_model_that_was_found_need_not_be_fetched_again(tmp_path):
    config = EngineConfig(model="hf://org/name@main", revision="main")
    there = localized(config, make_files(tmp_path))
    assert (there.model, there.revision) == (str(tmp_path), None)
    assert there.names == ("hf://org/name@main",)


def test_the_simulator_has_no_files_and_speaks_bytes():
    config = EngineConfig(device="sim", sim=SimConfig(vocab_size=300))
    assert resolve(config) is None
    assert load_model_tokenizer(config, None).vocab_size == 300
    for flag, changed in (
        ("--tokenizer", config.replace(tokenizer="x")),
        ("--chat-template", config.replace(chat_template="{{ x }}")),
    ):
        with pytest.raises(ConfigError, match=f"{flag} has no effect with --device sim"):
            load_model_tokenizer(changed, None)


def test_one_line_says_the_sum(caplog):
    caplog.set_level("INFO")
    engine, info = build_engine(EngineConfig(device="sim", sim=SimConfig(kv_blocks=16)))
    engine.close()
    assert info.num_blocks == 16 and info.kv_bytes == 0
    (line,) = [r.getMessage() for r in caplog.records if "Loaded" in r.getMessage()]
    assert "16 KV blocks of 16 tokens, sequences of up to 256 tokens (cut from" in line


class TestFormat:
    """What the engine says of its weights."""

    def files(self, tmp_path, **config):
        kind = config.pop("kind", "safetensors")
        return ModelFiles("m", tmp_path, kind, config, {})

    @pytest.mark.parametrize(
        ("stored", "settings", "reported"),
        [
            ({"dtype": "bfloat16"}, {}, "safetensors bfloat16"),
            ({"torch_dtype": "float16"}, {}, "safetensors float16"),
            ({}, {}, "safetensors"),
            ({"torch_dtype": 7}, {"quantization": "int4"}, "safetensors, int4 in memory"),
            ({"kind": "gguf"}, {}, "gguf"),
            ({"quantization_config": {"quant_method": "gptq", "bits": 4}, "dtype": "float16"}, {},
             "safetensors gptq int4"),
            ({"quantization_config": {"quant_method": "compressed-tensors"}}, {},
             "safetensors compressed-tensors"),
            ({"dtype": "bfloat16"}, {"load_format": "dummy"}, "dummy"),
        ],
    )  # fmt: skip
    def test_it_names_how_weights_are_stored_and_kept(self, tmp_path, stored, settings, reported):
        config = EngineConfig(model="m", **settings)
        assert format_of(config, self.files(tmp_path, **stored)) == reported

    def test_the_architecture_is_the_class_that_the_config_names(self, tmp_path):
        assert architecture_of(self.files(tmp_path, architectures=["A", "B"])) == "A"
        assert architecture_of(self.files(tmp_path, architectures=[])) == ""
        assert architecture_of(None) == format_of(EngineConfig(model="m", device="sim"), None) == ""
