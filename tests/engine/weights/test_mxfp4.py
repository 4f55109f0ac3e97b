"""gpt-oss with experts in 4 bits, as safetensors and as GGUF: logits are those of transformers with
the numbers that transformers itself makes of them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from octavo_engine import _native
from octavo_engine.backends.dequantize import to_float32
from octavo_engine.backends.native.backend import NativeBackend
from octavo_engine.backends.native.loader import NativeLoader
from octavo_engine.backends.torch.backend import TorchBackend
from octavo_engine.core.offline.llm import LLM
from octavo_engine.errors import ModelError
from octavo_engine.models.config import ModelConfig
from octavo_engine.models.decoder_names import under_our_names
from octavo_engine.state.sampling_params import SamplingParams
from octavo_engine.weights.checkpoint import StoredTensor
from octavo_engine.weights.mxfp4 import as_gguf_blocks
from octavo_engine.weights.open import open_checkpoint
from octavo_engine.weights.source import resolve_model
from tests.engine.backends.driver import Driver, random_tokens, run_alone
from tests.engine.backends.tolerance import BF16_AGAINST_FLOAT32, FLOAT32
from tests.engine.models.sinks import SINKS
from tests.engine.models.tiny import TinyModel, make_model

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from octavo_engine.weights.checkpoint import Checkpoint

MAX_MODEL_LEN = 160
VOCABULARY = 49152  # of the tokenizer that is at hand


def packed_model(**changes: Any) -> tuple[TinyModel, dict[str, torch.Tensor]]:
    """transformers' model, and the tensors of its file, experts in 4 bits."""
    kind, fields = SINKS["gpt-oss"]
    model = make_model("gpt-oss", kind, {**fields, **changes})
    generator = torch.Generator().manual_seed(5)
    stored: dict[str, torch.Tensor] = {}
    for name, tensor in model.tensors.items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            stored[name] = tensor.contiguous()
            continue
        experts, columns, rows = tensor.shape
        size = (experts, rows, columns // 32)
        blocks = torch.randint(256, (*size, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(122, 126, size, generator=generator, dtype=torch.uint8)
        stored[f"{name}_blocks"], stored[f"{name}_scales"] = blocks, scales
        values = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        with torch.no_grad():
            model.reference.get_parameter(name).copy_(values)
    return model, stored


def write_folder(folder: Path, model: TinyModel, stored: dict[str, torch.Tensor]) -> Path:
    save_file(stored, folder / "model.safetensors")
    quantization = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"],
    }
    config = model.config | {"quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def of_two_matrices(name: str, array: NDArray[Any]) -> dict[str, NDArray[Any]]:
    """Gate and up in tensors of their own, as converters write them."""
    if "gate_up_proj" not in name:
        return {name: array}
    return {
        name.replace("gate_up_proj", "gate_proj"): array[:, 0::2],
        name.replace("gate_up_proj", "up_proj"): array[:, 1::2],
    }


def write_gguf(path: Path, model: TinyModel, stored: dict[str, torch.Tensor]) -> Path:
    config = model.config
    rope = config["rope_parameters"]
    writer = gguf.GGUFWriter(str(path), "gpt-oss")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_expert_feed_forward_length(config["intermediate_size"])
    writer.add_expert_count(config["num_local_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_sliding_window(config["sliding_window"])
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(rope["factor"])
    writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GPT_OSS, config["num_hidden_layers"])
    for name, tensor in stored.items():
        if name.endswith("_scales"):
            continue
        array = tensor.numpy()
        kind = None
        own = name.replace("_proj_bias", "_proj.bias")
        if name.endswith("_blocks"):
            own = name.replace("_proj_blocks", "_proj.weight")
            kind = gguf.GGMLQuantizationType.MXFP4
            scales = stored[name.replace("_blocks", "_scales")].numpy()
            # Of 32 numbers those of the first half in the low bits.
            codes = np.stack([array & 15, array >> 4], axis=-1).reshape(*array.shape[:-1], 32)
            nibbles = codes[..., :16] | codes[..., 16:] << 4
            array = np.concatenate([scales[..., None], nibbles], axis=-1)
            array = array.reshape(*array.shape[:2], -1)
        for part, values in of_two_matrices(own, array).items():
            requested = part + ".weight" if part.endswith("sinks") else part
            place = names.get_name(requested, try_suffixes=(".weight", ".bias"))
            assert place is not None, part
            writer.add_tensor(place, np.ascontiguousarray(values), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(params=["safetensors", "gguf"])
def case(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[TinyModel, Path]:
    model, stored = packed_model()
    if request.param == "gguf":
        return model, write_gguf(tmp_path / "model.gguf", model, stored)
    return model, write_folder(tmp_path, model, stored)


def opened(path: Path) -> tuple[ModelConfig, Checkpoint]:
    files = resolve_model(str(path))
    config = ModelConfig.from_hf(files.config)
    return config, under_our_names(config, open_checkpoint(files))


def test_the_reference_gives_the_logits_of_transformers(case: tuple[TinyModel, Path]) -> None:
    model, path = case
    config, checkpoint = opened(path)
    backend = TorchBackend(config, checkpoint, max_model_len=MAX_MODEL_LEN)
    token_ids = random_tokens(100, seed=3)
    logits = run_alone(backend, token_ids, chunks=[61, 1])
    np.testing.assert_allclose(logits, model.logits(token_ids), **FLOAT32)


def test_the_cpu_computes_in_four_bits(case: tuple[TinyModel, Path]) -> None:
    """The bits of an answer depend on its tokens alone."""
    model, path = case
    config, checkpoint = opened(path)
    backend = NativeBackend(config, checkpoint, max_model_len=MAX_MODEL_LEN, num_threads=2)
    prompts = [random_tokens(count, seed=count) for count in (90, 61)]
    alone = [run_alone(backend, prompt) for prompt in prompts]
    for prompt, logits in zip(prompts, alone, strict=True):
        truth = model.logits(prompt)
        errors = np.sqrt(np.mean((logits - truth) ** 2, axis=1) / np.var(truth))
        assert np.median(errors) < BF16_AGAINST_FLOAT32
    driver = Driver(backend)
    requests = [driver.add(row, prompt) for row, prompt in enumerate(prompts)]
    driver.step([(requests[0], 33)])
    driver.step([(requests[0], 1), (requests[1], 60)])
    driver.step([(requests[1], 1), (requests[0], 56)])
    for request, truth in zip(requests, alone, strict=True):
        np.testing.assert_array_equal(request.logits, truth)
    heir = driver.add(2, prompts[0][:64] + random_tokens(9), prefix=requests[0])
    assert heir.num_computed == 64
    driver.step([(heir, 9)])
    np.testing.assert_array_equal(
        heir.logits, run_alone(backend, prompts[0][:64] + random_tokens(9))[64:]
    )


def test_experts_take_the_memory_that_they_take_in_the_file(case: tuple[TinyModel, Path]) -> None:
    model, path = case
    _, checkpoint = opened(path)
    loader = NativeLoader(checkpoint, _native.Team(1), "bf16")
    hidden, width = model.config["hidden_size"], model.config["intermediate_size"]
    places = [f"model.layers.0.mlp.experts.{expert}" for expert in range(6)]
    names = [[f"{place}.gate_proj", f"{place}.up_proj"] for place in places]
    gate_up = loader.experts(names, hidden, [width, width], bias=True)
    down = loader.experts([[f"{place}.down_proj"] for place in places], width, [hidden], bias=True)
    loader.finish()
    for experts, values in ((gate_up, 2 * width * hidden), (down, hidden * width)):
        assert len(experts.weights) == 6
        for weight in experts.weights:
            assert weight.dtype == "mxfp4"
            assert weight.nbytes == values // 32 * 17


def test_float32_by_name_is_the_files_numbers(case: tuple[TinyModel, Path]) -> None:
    model, path = case
    config, checkpoint = opened(path)
    backend = NativeBackend(
        config, checkpoint, max_model_len=MAX_MODEL_LEN, dtype="f32", num_threads=2
    )
    token_ids = random_tokens(80, seed=4)
    np.testing.assert_allclose(
        run_alone(backend, token_ids, chunks=[50, 1]), model.logits(token_ids), **FLOAT32
    )


def test_blocks_in_both_orders_hold_the_same_numbers() -> None:
    rng = np.random.default_rng(1)
    values = rng.integers(256, size=(6, 4, 16), dtype=np.uint8)
    scales = rng.integers(100, 140, size=(6, 4), dtype=np.uint8)
    truth = convert_moe_packed_tensors(
        torch.from_numpy(values)[None], torch.from_numpy(scales)[None], dtype=torch.float32
    )
    stored = StoredTensor("w", "MXFP4", (6, 128), as_gguf_blocks(values, scales))
    np.testing.assert_array_equal(to_float32(stored), truth[0].T.numpy())


def broken(stored: dict[str, torch.Tensor], part: str, how: str) -> None:
    name = f"model.layers.1.mlp.experts.{part}"
    tensor = stored[name]
    match how:
        case "missing":
            del stored[name]
        case "int8":
            stored[name] = tensor.to(torch.int8)
        case "short":
            stored[name] = tensor[:, :, 1:].contiguous()
        case "few":
            stored[name] = tensor[:2].contiguous()
        case "nan":
            tensor[5, 3, 1] = 255


@pytest.mark.parametrize(
    ("part", "how", "problem"),
    [
        ("down_proj_scales", "missing", "down_proj_scales in .* is missing"),
        ("down_proj_blocks", "int8", r"is I8 \[6, 64, 3, 16\]; it must be U8 with 4 sizes"),
        ("gate_up_proj_blocks", "short", "blocks of 16 bytes, 1 for each of 96 rows"),
        ("down_proj_scales", "short", r"has shape \[6, 64, 2\] for blocks of \[6, 64, 3, 16\]"),
        ("down_proj_scales", "few", r"has shape \[2, 64, 3\] for blocks of"),
        ("gate_up_proj_scales", "nan", "has values that are not numbers"),
    ],
)
def test_a_broken_file_is_refused_by_name(
    tmp_path: Path, part: str, how: str, problem: str
) -> None:
    model, stored = packed_model()
    broken(stored, part, how)
    config, checkpoint = opened(write_folder(tmp_path, model, stored))
    with pytest.raises(ModelError, match=problem) as raised:
        TorchBackend(config, checkpoint, max_model_len=MAX_MODEL_LEN)
    assert part in str(raised.value)


@pytest.mark.slow
def test_a_folder_answers_as_transformers_does(tmp_path: Path) -> None:
    """Through the whole engine, the second time from the prefix cache."""
    model, stored = packed_model(vocab_size=VOCABULARY)
    write_folder(tmp_path, model, stored)
    prompts = [random_tokens(count, seed=count) for count in (70, 7, 61)]
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    truth = []
    for prompt in prompts:
        tokens = list(prompt)
        for _ in range(12):
            tokens.append(int(model.logits(tokens)[-1].argmax()))
        truth.append(tokens[len(prompt) :])
    with LLM(tmp_path, tokenizer="demo://smollm2", dtype="float32", max_model_len=96) as llm:
        for cached in (False, True):
            answers = llm.generate(prompts, params, use_tqdm=False)
            assert [list(answer.outputs[0].token_ids) for answer in answers] == truth
            assert (answers[0].num_cached_tokens >= 48) == cached


def test_halves_are_clamped_where_transformers_clamps_them(tmp_path: Path) -> None:
    model, stored = packed_model()
    with torch.no_grad():
        for name in [name for name in stored if name.endswith("gate_up_proj_bias")]:
            stored[name] = stored[name] * 100
            assert (stored[name].abs() > 7).float().mean() > 0.3
            model.reference.get_parameter(name).copy_(stored[name])
    config, checkpoint = opened(write_folder(tmp_path, model, stored))
    backend = NativeBackend(
        config, checkpoint, max_model_len=MAX_MODEL_LEN, dtype="f32", num_threads=2
    )
    token_ids = random_tokens(40, seed=4)
    np.testing.assert_allclose(run_alone(backend, token_ids), model.logits(token_ids), **FLOAT32)
