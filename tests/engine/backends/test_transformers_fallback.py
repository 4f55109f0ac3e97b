"""Models without a page here, computed by transformers: as its own generate has it, however cut."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
import transformers

from octavo_engine.backends.torch.fallback.backend import TransformersBackend
from octavo_engine.backends.torch.fallback.layers import _window_of
from octavo_engine.backends.torch.fallback.model import read_shape
from octavo_engine.config import EngineConfig, SchedulerConfig
from octavo_engine.core.engine import Engine
from octavo_engine.core.offline.llm import LLM
from octavo_engine.errors import ConfigError, ModelError
from octavo_engine.models.families import FAMILIES
from octavo_engine.models.implementation import implementation_of
from octavo_engine.state.sampling_params import SamplingParams
from tests.engine.backends.driver import Driver, random_tokens, run_alone
from tests.engine.models.tiny import SHAPE

pytestmark = pytest.mark.slow
CLOSE: Any = {"rtol": 1e-4, "atol": 1e-4}
WINDOW = 24
MLA = {
    "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
    "v_head_dim": 12, "num_key_value_heads": 4, "n_routed_experts": 4, "n_group": 1,
    "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}  # fmt: skip
# Class without its ending, its config beyond SHAPE, and the windows of its layers' groups.
MODELS: dict[str, tuple[str, dict[str, Any], tuple[int | None, ...]]] = {
    "helium": ("Helium", {"head_dim": 16}, (None,)),
    "cwm": ("Cwm", {"head_dim": 16, "sliding_window": WINDOW}, (None, WINDOW)),
    "ministral": ("Ministral", {"head_dim": 16, "sliding_window": WINDOW}, (WINDOW,)),
    "sinks-and-windows": (
        "GptOss",
        {"head_dim": 16, "sliding_window": WINDOW, "num_local_experts": 4,
         "num_experts_per_tok": 2},
        (None, WINDOW),
    ),
    "latent": ("DeepseekV3", MLA, (None,)),
    "two-calls-a-layer": ("DiffLlama", {}, (None,)),
    "shared-layers": ("HrmText", {}, (None,)),
    "soft-cap": ("VaultGemma", {"head_dim": 16, "attn_logit_softcapping": 2.0,
                                "sliding_window": WINDOW}, (None, WINDOW)),
    "learned-positions": ("Ernie", {"is_decoder": True}, (None,)),
}  # fmt: skip


@functools.cache
def truth_model(name: str) -> Any:
    ending, more, _ = MODELS[name]
    settings = getattr(transformers, f"{ending}Config")(**SHAPE | more)
    torch.manual_seed(3)
    model = getattr(transformers, f"{ending}ForCausalLM")(settings).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.15)
    return model


@functools.cache
def folder_of(name: str) -> Path:
    holder = tempfile.TemporaryDirectory()
    _HOLDERS.append(holder)
    folder = Path(holder.name)
    truth_model(name).save_pretrained(folder)
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())  # as many as the vocabulary
    words = tokenizers.Tokenizer(
        tokenizers.models.BPE({letter: i for i, letter in enumerate(alphabet)}, [])
    )
    words.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = tokenizers.decoders.ByteLevel()
    words.save(str(folder / "tokenizer.json"))
    return folder


_HOLDERS: list[tempfile.TemporaryDirectory[str]] = []


def backend_of(name: str, **settings: Any) -> TransformersBackend:
    folder = folder_of(name)
    config = EngineConfig(model=str(folder), **{"dtype": "float32"} | settings)
    return TransformersBackend(config, folder, json.loads((folder / "config.json").read_text()))


def truth(name: str, ids: list[int]) -> Any:
    with torch.inference_mode():
        return truth_model(name)(input_ids=torch.tensor([ids]), use_cache=False).logits[0].numpy()


@pytest.mark.parametrize("name", MODELS)
def test_chunks_and_single_tokens_equal_transformers_on_the_whole(name: str) -> None:
    backend = backend_of(name)
    assert backend.cache_layout.windows == MODELS[name][2]
    ids = random_tokens(90, seed=5)
    logits = run_alone(backend, ids, chunks=[7, 16, 25, 1, 1, 30, 1, 1], frees=True)
    expected = truth(name, ids)
    assert np.abs(expected).max() > 0.3
    np.testing.assert_allclose(logits, expected, **CLOSE)


@pytest.mark.parametrize("name", ["helium", "cwm", "latent"])
def test_a_batch_of_prompts_and_single_tokens_equals_transformers(name: str) -> None:
    driver = Driver(backend_of(name), frees=True)
    texts = [random_tokens(n, seed=n) for n in (60, 33, 70, 41, 18)]
    requests = [driver.add(row, text) for row, text in enumerate(texts)]
    driver.step([(requests[0], 59), (requests[1], 5), (requests[3], 40)])
    driver.step([(requests[1], 27), (requests[2], 69), (requests[4], 17)])
    driver.step([(request, 1) for request in requests])  # single tokens of all lengths together
    for request, text in zip(requests, texts, strict=True):
        np.testing.assert_allclose(np.array(request.logits), truth(name, text), **CLOSE)


def test_shared_and_copied_blocks_are_read_like_own_ones() -> None:
    driver = Driver(backend_of("helium"))
    first = driver.add(0, random_tokens(40))
    driver.step([(first, 40)])
    second = driver.add(1, [*first.token_ids[:38], 9, 8, 7], prefix=first)
    assert second.num_computed == 32
    copy = driver.take_block()
    second.blocks.append(copy)
    second.num_computed = 38
    driver.step([(second, 3)], copies=[(first.blocks[2], copy, 6)])
    np.testing.assert_allclose(second.logits, truth("helium", second.token_ids)[38:], **CLOSE)


@functools.cache
def greedy(name: str, prompt: tuple[int, ...], count: int) -> Any:
    with torch.inference_mode():
        made = truth_model(name).generate(
            torch.tensor([list(prompt)]),
            attention_mask=torch.ones((1, len(prompt)), dtype=torch.long),
            max_new_tokens=count,
            do_sample=False,
            eos_token_id=None,
        )
    return made[0, len(prompt) :].tolist()


BLOCKS = {"helium": 14, "cwm": 22}  # too few for four sequences, enough for any one


@pytest.mark.parametrize("name", BLOCKS)
def test_the_whole_engine_equals_generate(name: str) -> None:
    """In one batch, with prompts in chunks, prefix hits and too little memory for all at once."""
    common = random_tokens(20, seed=1)
    prompts = [common + random_tokens(n, seed=n) for n in (1, 15, 9, 30)]
    config = EngineConfig(
        model=str(folder_of(name)),
        model_impl="transformers",
        dtype="float32",
        max_model_len=128,
        kv_cache_memory_bytes=BLOCKS[name] * backend_of(name).kv_bytes_per_block,
        scheduler=SchedulerConfig(max_num_batched_tokens=24, max_num_seqs=4),
    )
    with LLM.from_config(config) as llm:
        assert llm.info.implementation == "transformers"
        assert llm.info.backend == "transformers/cpu/float32"
        params = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
        for _ in range(2):  # the second time from the prefix cache
            outputs = llm.generate(prompts, params)
            for prompt, output in zip(prompts, outputs, strict=True):
                assert list(output.outputs[0].token_ids) == greedy(name, tuple(prompt), 64)
        assert isinstance(llm._engine, Engine)
        stats = llm._engine.stats()
        assert stats.prefix_hits > 0
        assert name != "helium" or stats.preemptions > 0  # with windows, admission knows its needs


def test_a_grammar_and_the_tokenizer_are_those_of_other_models() -> None:
    from octavo import structured_output

    config = EngineConfig(
        model=str(folder_of("helium")),
        model_impl="transformers",
        dtype="float32",
        max_model_len=64,
    )
    with LLM.from_config(config) as llm:
        grammar = structured_output(choice=["yes", "no"])
        params = SamplingParams(temperature=0.0, max_tokens=4, grammar=grammar)
        assert llm.generate("A coin?", params)[0].outputs[0].text in ("yes", "no")


def test_dummy_weights_need_no_files() -> None:
    backend = backend_of("helium", load_format="dummy", dtype="bfloat16")
    assert backend.name == "transformers/cpu/bfloat16"
    assert np.isfinite(run_alone(backend, random_tokens(40))).all()


def refused(folder: Path, ending: str, **more: Any) -> str:
    settings = getattr(transformers, f"{ending}Config")(**SHAPE | more)
    settings.architectures = [f"{ending}ForCausalLM"]
    settings.save_pretrained(folder)
    config = EngineConfig(model=str(folder), load_format="dummy", dtype="float32")
    with pytest.raises((ModelError, ConfigError)) as refusal:
        TransformersBackend(config, folder, json.loads((folder / "config.json").read_text()))
    return str(refusal.value)


def test_what_carries_a_state_is_refused_by_name(tmp_path: Path) -> None:
    assert "MambaForCausalLM carries a state" in refused(tmp_path, "Mamba")


def test_other_attention_is_refused_by_name(tmp_path: Path) -> None:
    text = refused(tmp_path, "XGLM", d_model=64, num_layers=2, attention_heads=4, ffn_dim=64)
    assert "the attention of XGLMForCausalLM does not go through" in text


def test_layers_of_other_types_are_refused_by_name(tmp_path: Path) -> None:
    text = refused(tmp_path, "Lfm2", layer_types=["conv", "full_attention"])
    assert "layers of the type conv" in text


def test_biases_in_masks_are_refused(tmp_path: Path) -> None:
    assert "DogeForCausalLM: the model adds biases" in refused(tmp_path, "Doge")


def test_positions_from_elsewhere_are_found_by_the_self_check(tmp_path: Path) -> None:
    """Its positions begin behind the padding token's, and only its own code knows."""
    text = refused(tmp_path, "Camembert", is_decoder=True)
    assert "CamembertForCausalLM computed in chunks over a paged KV cache differs" in text


def test_a_rope_that_depends_on_the_batch_is_refused(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    text = refused(tmp_path, "Helium", rope_parameters=rope, original_max_position_embeddings=64)
    assert "--max-model-len must be at most" in text or "rope changes" in text


@pytest.mark.parametrize("window", [1, 7, 4096])
def test_a_window_is_read_from_a_mask(window: int) -> None:
    from transformers.masking_utils import (
        causal_mask_function,
        chunked_causal_mask_function,
        sliding_window_causal_mask_function,
    )

    assert _window_of(sliding_window_causal_mask_function(window)) == window
    assert _window_of(causal_mask_function) is None
    with pytest.raises(ModelError, match=r"cut at fixed places|no window"):
        _window_of(chunked_causal_mask_function(window + 100, torch.zeros(1, dtype=torch.long)))


def test_auto_takes_our_page_where_there_is_one() -> None:
    auto = EngineConfig()
    assert "LlamaForCausalLM" in FAMILIES
    assert implementation_of(auto, {"architectures": ["LlamaForCausalLM"]}) == "octavo"
    assert implementation_of(auto, {"architectures": ["BertModel"]}) == "octavo"
    assert implementation_of(auto, {"architectures": ["DogeForCausalLM"]}) == "transformers"
    wanted = EngineConfig(model_impl="transformers")
    assert implementation_of(wanted, {"architectures": ["LlamaForCausalLM"]}) == "transformers"
    own = EngineConfig(model_impl="octavo")
    assert implementation_of(own, {"architectures": ["DogeForCausalLM"]}) == "octavo"


def test_a_missing_package_is_named_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelError, match="pip install torch transformers"):
        implementation_of(EngineConfig(), {"architectures": ["DogeForCausalLM"]})


@pytest.mark.parametrize(
    "settings",
    [{"quantization": "int8"}, {"enable_lora": True}, {"kv_cache_dtype": "int8"},
     {"device": "plugin"}, {"activation_bits": 8}, {"tensor_parallel_size": 2}],
)  # fmt: skip
def test_settings_that_only_our_pages_have_are_refused(settings: dict[str, Any]) -> None:
    config = EngineConfig(model_impl="transformers", **settings)
    with pytest.raises(ConfigError, match="not available for a model that transformers computes"):
        implementation_of(config, {"architectures": ["LlamaForCausalLM"]})


CODE = """
from transformers import LlamaConfig, LlamaForCausalLM

class HouseConfig(LlamaConfig):
    model_type = "house"

class HouseForCausalLM(LlamaForCausalLM):
    config_class = HouseConfig
"""


@pytest.fixture
def remote(tmp_path: Path) -> Path:
    """A model whose class is in its own repository."""
    settings = transformers.LlamaConfig(**SHAPE)
    transformers.LlamaForCausalLM(settings).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    names = {"AutoConfig": "house.HouseConfig", "AutoModelForCausalLM": "house.HouseForCausalLM"}
    fields = json.loads(file.read_text())
    fields |= {"model_type": "house", "architectures": ["HouseForCausalLM"], "auto_map": names}
    file.write_text(json.dumps(fields))
    (tmp_path / "house.py").write_text(CODE)
    return tmp_path


def test_code_of_a_repository_runs_only_where_that_is_wanted(
    remote: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "m"))
    fields = json.loads((remote / "config.json").read_text())
    with pytest.raises(ModelError, match=r"house\.HouseForCausalLM\); --trust-remote-code runs it"):
        TransformersBackend(EngineConfig(model=str(remote)), remote, fields)
    config = EngineConfig(model=str(remote), trust_remote_code=True, dtype="float32")
    backend = TransformersBackend(config, remote, fields)
    assert np.isfinite(run_alone(backend, random_tokens(30))).all()
    assert "runs code of the model's repository" in caplog.text
    assert "house.HouseForCausalLM" in caplog.text


def test_trust_in_code_is_refused_where_none_is_run() -> None:
    config = EngineConfig(trust_remote_code=True)
    with pytest.raises(ConfigError, match="--trust-remote-code is for models that transformers"):
        implementation_of(config, {"architectures": ["LlamaForCausalLM"]})


def test_a_class_that_transformers_has_not_is_not_guessed(tmp_path: Path) -> None:
    settings = transformers.GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=256)
    settings.architectures = ["MyCompanyForCausalLM"]
    settings.save_pretrained(tmp_path)
    config = EngineConfig(model=str(tmp_path), load_format="dummy")
    fields = json.loads((tmp_path / "config.json").read_text())
    with pytest.raises(ModelError, match="has no class 'MyCompanyForCausalLM'"):
        read_shape(config, tmp_path, fields)
