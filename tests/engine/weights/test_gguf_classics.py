"""GGUF files of the classic families, written with the gguf package as converters write them: their
logits are those of transformers."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import pytest

from octavo_engine.backends.torch.backend import TorchBackend
from octavo_engine.errors import ModelError
from octavo_engine.models.config import ModelConfig
from octavo_engine.weights.open import open_checkpoint
from octavo_engine.weights.source import resolve_model
from tests.engine.backends.driver import random_tokens, run_alone
from tests.engine.backends.tolerance import FLOAT32
from tests.engine.models.tiny import tiny_model

if TYPE_CHECKING:
    from pathlib import Path

    from tests.engine.models.tiny import TinyModel

# The tiny model, its architecture in GGUF, and what a converter writes besides the common numbers.
FILES: list[tuple[str, str, dict[str, Any]]] = [
    ("gpt2", "gpt2", {}),
    ("bigcode", "starcoder", {}),
    ("starcoder2-unbiased", "starcoder2", {}),
    ("starcoder2-biased", "starcoder2", {}),
    ("neox", "gptneox", {"use_parallel_residual": True, "rope.dimension_count": 4}),
    ("neox-sequential", "gptneox", {"use_parallel_residual": False, "rope.dimension_count": 4}),
    ("falcon", "falcon", {}),
    ("falcon-new", "falcon", {}),
    ("bloom", "bloom", {}),
    ("phi", "phi2", {"rope.dimension_count": 8}),
    ("stablelm", "stablelm", {"rope.dimension_count": 4}),
    ("stablelm-parallel", "stablelm", {"rope.dimension_count": 4}),
    ("cohere", "command-r", {"logit_scale": 0.25}),
    ("olmo2", "olmo2", {}),
    ("internlm2", "internlm2", {}),
    ("gemma", "gemma", {}),
    ("qwen3-moe-shares", "qwen3moe", {}),
    ("olmoe", "olmoe", {}),
]
MADE_OTHERWISE = {"starcoder2-biased": ("starcoder2", {"sliding_window": None})}
# Rows that transformers holds head after head and converters sort into q, k and v.
BY_HEAD = ("gptneox", "falcon", "bloom")


def the_model(name: str) -> TinyModel:
    base, changes = MADE_OTHERWISE.get(name, (name, {}))
    return tiny_model(base, **changes)


def write(path: Path, model: TinyModel, arch: str, extra: dict[str, Any]) -> Path:
    config = ModelConfig.from_hf(model.config)
    writer = gguf.GGUFWriter(str(path), arch)
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    is_rms = arch in ("olmo2", "internlm2", "gemma", "qwen3moe", "olmoe")
    (writer.add_layer_norm_rms_eps if is_rms else writer.add_layer_norm_eps)(config.norm_eps)
    rope = config.layers[0].rope
    if rope is not None:
        writer.add_rope_freq_base(rope.theta)
    if arch in ("gemma", "qwen3moe"):
        writer.add_key_length(config.head_dim)
    if config.experts is not None:
        writer.add_expert_count(config.experts.num_experts)
        writer.add_expert_used_count(config.experts.top_k)
    if config.experts is not None and arch != "olmoe":
        writer.add_expert_feed_forward_length(config.experts.width)
    for name, value in extra.items():
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
        add[type(value)](f"{arch}.{name}", value)
    kind = next(k for k, known in gguf.MODEL_ARCH_NAMES.items() if known == arch)
    names = gguf.get_tensor_name_map(kind, config.num_layers)
    for name, array in converted(model, arch, config).items():
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert stored is not None, name
        writer.add_tensor(stored, np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def converted(model: TinyModel, arch: str, config: ModelConfig) -> dict[str, np.ndarray]:
    """What a converter does to tensors, written from its rules, not from ours."""
    heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
    result: dict[str, np.ndarray] = {}
    norms: dict[str, list[np.ndarray]] = {}  # and experts: what the file has in one tensor
    for name, tensor in model.tensors.items():
        array = tensor.detach().float().numpy()
        if arch == "gpt2" and re.search(r"\.(c_attn|c_fc|c_proj)\.weight$", name):
            array = array.T
        if arch == "bloom":
            name = name.removeprefix("transformer.")
        if arch in BY_HEAD and "query_key_value" in name:
            groups = array.reshape(kv_heads, heads // kv_heads + 2, dim, *array.shape[1:])
            q, k, v = groups[:, :-2], groups[:, -2], groups[:, -1]
            array = np.concatenate([p.reshape(-1, *array.shape[1:]) for p in (q, k, v)])
        if arch == "gemma" and name.endswith("norm.weight"):
            array = array + 1
        if match := re.match(r"(.*\.[qk]_layernorm)\.norms\.\d+(\.weight)", name):
            norms.setdefault(match[1] + match[2], []).append(array)
            continue
        if match := re.match(r"(.*\.experts)\.\d+(\..*)", name):
            norms.setdefault(match[1] + match[2], []).append(array)
            continue
        if arch == "internlm2" and "wqkv" in name:
            result |= split_and_turned(name, array, heads, kv_heads, dim)
            continue
        result[name] = array
    return result | {name: np.stack(parts) for name, parts in norms.items()}


def split_and_turned(
    name: str, array: np.ndarray, heads: int, kv_heads: int, dim: int
) -> dict[str, np.ndarray]:
    groups = array.reshape(kv_heads, heads // kv_heads + 2, dim, -1)
    parts = {"q": groups[:, :-2], "k": groups[:, -2], "v": groups[:, -1]}
    result = {}
    for part, rows in parts.items():
        flat = rows.reshape(-1, dim, array.shape[1])
        if part != "v":
            halves = flat.reshape(len(flat), 2, dim // 2, -1)
            flat = halves.swapaxes(1, 2).reshape(flat.shape)
        plain = name.replace("attention.wqkv", f"self_attn.{part}_proj")
        result[plain] = flat.reshape(-1, array.shape[1])
    return result


@pytest.mark.slow
@pytest.mark.parametrize(("name", "arch", "extra"), FILES, ids=[name for name, _, _ in FILES])
def test_a_file_gives_the_logits_of_transformers(
    tmp_path: Path, name: str, arch: str, extra: dict[str, Any]
) -> None:
    model = the_model(name)
    files = resolve_model(str(write(tmp_path / "m.gguf", model, arch, extra)))
    config = ModelConfig.from_hf(files.config)
    backend = TorchBackend(config, open_checkpoint(files), max_model_len=128)
    token_ids = random_tokens(60, seed=3)
    logits = run_alone(backend, token_ids, chunks=[31, 1])
    np.testing.assert_allclose(logits, model.logits(token_ids), **FLOAT32)


def test_norms_of_command_r_plus_are_refused(tmp_path: Path) -> None:
    model = tiny_model("cohere-plus")
    path = write(tmp_path / "m.gguf", model, "command-r", {"logit_scale": 0.5})
    with pytest.raises(ModelError, match="use the model's safetensors"):
        resolve_model(str(path))
