"""Tiny random models of every family: transformers' classes, and their weights as a checkpoint."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import tempfile
from typing import TYPE_CHECKING, Any

import torch

from octavo_engine.errors import ModelError
from octavo_engine.models.config import ModelConfig
from octavo_engine.models.decoder_names import under_our_names
from octavo_engine.weights.checkpoint import StoredTensor
from tests.engine.models.chunked import CHUNKED
from tests.engine.models.classics import ARCHITECTURES, CLASSES, CLASSICS, TWINS
from tests.engine.models.latents import LATENTS
from tests.engine.models.recurrent import RECURRENT
from tests.engine.models.sinks import SINKS
from tests.engine.models.streams import STREAMS

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy as np
    from numpy.typing import NDArray

    from octavo_engine.weights.checkpoint import Checkpoint

VOCABULARY = 256
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "attn_implementation": "eager",
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0 + 0.05 * i for i in range(6)],
    "long_factor": [1.0 + 0.6 * i for i in range(6)],
    "partial_rotary_factor": 0.75,
    "original_max_position_embeddings": 32,
}
GEMMA3_ROPES = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}

# Name → transformers' class without its ending, and what the config says beyond SHAPE. head_dim is
# 16 unless given.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-tied-biased": (
        "Llama",
        {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, "head_dim": 32},
    ),
    "llama3": ("Llama", {"rope_parameters": LLAMA3}),
    "llama-linear": (
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}},
    ),
    "llama-yarn": ("Llama", {"rope_parameters": YARN}),
    "smollm2": ("Llama", {"tie_word_embeddings": True, "num_attention_heads": 4}),
    "smollm3": ("SmolLM3", {"num_hidden_layers": 4, "no_rope_layer_interval": 4}),
    "smollm3-window": (
        "SmolLM3",
        {
            "num_hidden_layers": 4,
            "no_rope_layer_interval": 2,
            "use_sliding_window": True,
            "sliding_window": 24,
        },
    ),
    "mistral": ("Mistral", {"sliding_window": 24}),
    "mistral-full": ("Mistral", {"sliding_window": None, "head_dim": 32}),
    "ministral": ("Ministral", {"sliding_window": 24, "head_dim": 32}),
    "ministral-mixed": (
        "Ministral",
        {
            "head_dim": 16,
            "sliding_window": 24,
            "layer_types": ["full_attention", "sliding_attention"],
        },
    ),
    "cwm": (
        "Cwm",
        {
            "num_hidden_layers": 3,
            "head_dim": 16,
            "sliding_window": 24,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            "rope_parameters": LLAMA3,
        },
    ),
    "hyperclovax": (
        "HyperCLOVAX",
        {
            "head_dim": 16,
            "embedding_multiplier": 10.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.7,
            "logits_scaling": 0.125,
            "rope_parameters": YARN,
        },
    ),
    "helium": ("Helium", {"head_dim": 16, "attention_bias": True}),
    "qwen2": ("Qwen2", {}),
    "qwen2-window": (
        "Qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": 24,
            "max_window_layers": 1,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "qwen3-tied-yarn": (
        "Qwen3",
        {"head_dim": 16, "tie_word_embeddings": True, "rope_parameters": YARN},
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3-moe": (
        "Qwen3Moe",
        {
            "head_dim": 16,
            "num_hidden_layers": 3,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 48,
            "mlp_only_layers": [1],
        },
    ),
    "qwen3-moe-shares": (
        "Qwen3Moe",
        {
            "head_dim": 16,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
            "tie_word_embeddings": True,
        },
    ),
    "qwen2-moe": (
        "Qwen2Moe",
        {
            "num_hidden_layers": 3,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 96,
            "mlp_only_layers": [1],
        },
    ),
    "phi3": ("Phi3", {}),
    "phi3-longrope": (
        "Phi3",
        {
            "rope_parameters": LONGROPE,
            "original_max_position_embeddings": 32,  # Phi-3 says it outside its rope
            "sliding_window": 40,
        },
    ),
    "granite": (
        "Granite",
        {
            "embedding_multiplier": 12.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.22,
            "logits_scaling": 8.0,
            "tie_word_embeddings": True,
        },
    ),
    "gemma2": (
        "Gemma2",
        {
            "num_hidden_layers": 4,
            "head_dim": 32,
            "query_pre_attn_scalar": 24,
            "sliding_window": 24,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 8.0,
        },
    ),
    "gemma3": (
        "Gemma3Text",
        {
            "num_hidden_layers": 3,
            "sliding_window_pattern": 3,
            "head_dim": 32,
            "query_pre_attn_scalar": 24,
            "sliding_window": 24,
            "rope_parameters": GEMMA3_ROPES,
        },
    ),
    **CLASSICS,
    **RECURRENT,
    **LATENTS,
    **SINKS,
    **CHUNKED,
    **STREAMS,
    **{name: (twin.kind, twin.fields) for name, twin in TWINS.items()},
}
MIXTURES = [name for name, (kind, _) in FAMILIES.items() if kind in (
    "Mixtral", "Qwen2Moe", "Qwen3Moe", "Olmoe", "FlexOlmo", "Dbrx", "GraniteMoe",
    "GraniteMoeShared", "Qwen3Next", "Qwen3_5MoeText", "DeepseekV2",
    "DeepseekV3", "Dots1", "SolarOpen", "Lfm2Moe", "Glm4Moe", "Glm4MoeLite", "GptOss", "Llama4Text",
) or name in ("granite4-moe", "jamba")]  # fmt: skip


# What devices compute; the rest they refuse.
NOT_ON_DEVICES = STREAMS
ON_DEVICES = [name for name in FAMILIES if name not in NOT_ON_DEVICES]


# Of blocks without residuals: with larger weights they amplify what is rounded away.
_AMPLIFIES = re.compile(
    r"\.[qk]_proj\.|_adapter_list\.|\.in_proj\.|\.out_proj\.|gate_up_proj\.|\.linear\."
)


class MemoryCheckpoint:
    """A state dict as a checkpoint; a dtype of "BF16" or "F16" stores it rounded."""

    def __init__(self, tensors: dict[str, torch.Tensor], dtype: str = "F32") -> None:
        self._tensors = {name: _store(name, tensor, dtype) for name, tensor in tensors.items()}

    def names(self) -> Iterable[str]:
        return list(self._tensors)

    def read(self, name: str, shape: tuple[int, ...]) -> StoredTensor:
        stored = self._tensors[name]
        if stored.shape != shape:
            raise ModelError(f"memory: {name} has shape {stored.shape}, not {shape}")
        return stored

    @property
    def total_bytes(self) -> int:
        return sum(stored.data.nbytes for stored in self._tensors.values())


@dataclasses.dataclass(frozen=True, eq=False)
class TinyModel:
    """One model, known to transformers and to us."""

    name: str
    reference: Any  # transformers' model
    config: dict[str, Any]  # config.json
    tensors: dict[str, torch.Tensor]

    def checkpoint(self, dtype: str = "F32") -> Checkpoint:
        """As the model's page asks for it."""
        stored = MemoryCheckpoint(self.tensors, dtype)
        return under_our_names(ModelConfig.from_hf(self.config), stored)

    def logits(self, token_ids: list[int]) -> NDArray[np.float32]:
        """What transformers says, [tokens, vocabulary]."""
        with torch.inference_mode():
            output = self.reference(input_ids=torch.tensor([token_ids]), use_cache=False)
        logits: NDArray[np.float32] = output.logits[0].float().numpy()
        return logits


@functools.cache
def tiny_model(name: str, **changes: Any) -> TinyModel:
    """The model of that name in FAMILIES, its weights a function of the name."""
    kind, fields = FAMILIES[name]
    model = make_model(name, kind, {**fields, **changes})
    twin = TWINS.get(name)
    if twin is None:
        return model
    with torch.no_grad():
        twin.prepare(model.reference)
    config = twin.config(model.config) | {"architectures": [twin.architecture]}
    return TinyModel(name, model.reference, config, twin.tensors(model.tensors, model.config))


def architecture_of(kind: str) -> str:
    """What config.json calls the model."""
    return ARCHITECTURES.get(kind, f"{kind.removesuffix('Text')}ForCausalLM")


def known_architectures() -> set[str]:
    """All that a tiny model is made of."""
    made = {architecture_of(kind) for name, (kind, _) in FAMILIES.items() if name not in TWINS}
    return made | {twin.architecture for twin in TWINS.values()}


def make_model(name: str, kind: str, fields: dict[str, Any]) -> TinyModel:
    import transformers

    config_class = getattr(transformers, f"{kind}Config")
    known = {field.name for field in dataclasses.fields(config_class)}
    sizes = {field: value for field, value in SHAPE.items() if field in known}
    config = config_class(**{**sizes, **fields})
    config._attn_implementation = fields.get("attn_implementation", "eager")
    architecture = architecture_of(kind)
    model = getattr(transformers, CLASSES.get(kind, architecture))(config).eval()
    generator = torch.Generator().manual_seed(sum(name.encode()))
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            gemma = kind.startswith(
                ("Gemma", "VaultGemma", "Nemotron", "Qwen3Next", "Qwen3_5")
            ) and kind not in ("NemotronH", "Gemma3nText")
            _fill(parameter_name, parameter, generator, gemma=gemma)
            if kind == "Zamba2" and _AMPLIFIES.search(parameter_name):
                parameter.mul_(0.3)
    for buffer_name, buffer in model.named_buffers():
        if buffer_name.endswith(("e_score_correction_bias", "expert_bias")):
            with torch.no_grad():
                _fill(buffer_name, buffer, generator, gemma=False)
    if kind in {own for own, _ in (CLASSICS | RECURRENT | SINKS | CHUNKED | STREAMS).values()}:
        return _saved(name, model, architecture)
    tensors = {
        stored: part
        for name, tensor in model.state_dict().items()
        if not (config.tie_word_embeddings and name == "lm_head.weight")
        for stored, part in _as_published(name, tensor, kind)
    }
    as_json = config.to_dict()
    as_json["architectures"] = [architecture]
    return TinyModel(name, model, as_json, tensors)


def _saved(name: str, model: Any, architecture: str) -> TinyModel:
    """As transformers itself writes the model's files."""
    import json
    from pathlib import Path

    from safetensors.torch import load_file

    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        config = json.loads((Path(folder) / "config.json").read_text())
        tensors = load_file(Path(folder) / "model.safetensors")
    return TinyModel(name, model, config | {"architectures": [architecture]}, tensors)


def _as_published(name: str, tensor: torch.Tensor, kind: str) -> list[tuple[str, torch.Tensor]]:
    """Each expert's matrices by themselves; transformers holds all of a layer's as one."""
    if kind == "Mixtral":
        name = name.replace(".mlp.", ".block_sparse_moe.")
    gate, up, down = (
        ("w1", "w3", "w2") if kind == "Mixtral" else ("gate_proj", "up_proj", "down_proj")
    )
    if name.endswith(".experts.gate_up_proj"):
        parts = {gate: tensor.chunk(2, dim=1)[0], up: tensor.chunk(2, dim=1)[1]}
    elif name.endswith(".experts.down_proj"):
        parts = {down: tensor}
    else:
        return [(name, tensor)]
    prefix = name.rpartition(".")[0]
    return [
        (f"{prefix}.{expert}.{part}.weight", own[expert].contiguous())
        for part, own in parts.items()
        for expert in range(len(tensor))
    ]


def _fill(name: str, parameter: torch.Tensor, generator: torch.Generator, *, gemma: bool) -> None:
    """Values that matter: with transformers' own, most of a model would have little effect."""
    values = torch.randn(parameter.shape, generator=generator)
    if parameter.ndim >= 2:
        parameter.copy_(values * (1.2 / math.sqrt(parameter.shape[-1])))
    elif name.endswith(".weight"):
        parameter.copy_((0.0 if gemma else 1.0) + 0.2 * values)
    else:
        parameter.copy_(0.2 * values)


def _store(name: str, tensor: torch.Tensor, dtype: str) -> StoredTensor:
    torch_dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[dtype]
    stored = tensor.detach().to(torch_dtype).contiguous()
    data = stored.view(torch.uint8).numpy().reshape(-1)
    return StoredTensor(name, dtype, tuple(tensor.shape), data)
