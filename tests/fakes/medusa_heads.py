"""Random Medusa heads for tiny models, as a part of a backend or as files in vLLM's form."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors.torch import save_file

from octavo_engine.backends.head_files import HeadNames, HeadsPart
from octavo_engine.backends.native.backend import NativeBackend
from octavo_engine.backends.torch.backend import TorchBackend
from octavo_engine.models.config import ModelConfig
from octavo_engine.models.medusa import MedusaConfig
from tests.engine.models.tiny import MemoryCheckpoint, TinyModel

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor


def head_config(**changes: Any) -> dict[str, Any]:
    return {
        "model_type": "medusa", "architectures": ["MedusaModel"], "hidden_size": 64,
        "vocab_size": 256, "num_heads": 3, "num_hidden_layers": 1,
    } | changes  # fmt: skip


def head_weights(values: dict[str, Any], seed: int = 0) -> dict[str, Tensor]:
    """Large enough that a head matters, in bf16 numbers."""
    generator = torch.Generator().manual_seed(seed)
    size, vocab = values["hidden_size"], values["vocab_size"]

    def random(*shape: int) -> Tensor:
        drawn = torch.randn(shape, generator=generator).mul(shape[-1] ** -0.5)
        return drawn.bfloat16().float()

    weights = {}
    for head in range(values["num_heads"]):
        for layer in range(values["num_hidden_layers"]):
            weights[f"blocks.{head}.layers.{layer}.weight"] = random(size, size)
            if values.get("medusa_fc_bias"):
                weights[f"blocks.{head}.layers.{layer}.bias"] = random(size)
        if head == 0 or not values.get("original_lm_head"):
            weights[f"lm_heads.{head}.weight"] = random(vocab, size) * 4
    if (truncated := values.get("truncated_vocab_size")) is not None:
        weights["token_map"] = torch.randperm(vocab, generator=generator)[:truncated]
    return weights


def write_heads(
    folder: Path, values: dict[str, Any], weights: dict[str, Tensor], *, prefix: str = ""
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values))
    stored = {prefix + name: tensor.contiguous() for name, tensor in weights.items()}
    save_file(stored, folder / "model.safetensors")


def part_of(values: dict[str, Any], weights: dict[str, Tensor]) -> HeadsPart:
    config = MedusaConfig.from_hf(values)
    tokens = weights.get("token_map")
    ids = None if tokens is None else tokens.numpy().astype(np.int32)
    stored = {
        name: tensor[tokens] if tokens is not None and name.startswith("lm_head") else tensor
        for name, tensor in weights.items()
        if name != "token_map"
    }
    checkpoint = HeadNames(MemoryCheckpoint(stored), config, config.num_heads, ids)
    return HeadsPart(config, checkpoint, config.num_heads, ids)


def reference_logits(
    values: dict[str, Any], weights: dict[str, Tensor], head: int, hidden: np.ndarray[Any, Any]
) -> np.ndarray[Any, Any]:
    """In plain torch, as the paper has it."""
    x: Tensor = torch.from_numpy(hidden)
    for layer in range(values["num_hidden_layers"]):
        name = f"blocks.{head}.layers.{layer}"
        bias = weights.get(f"{name}.bias")
        x = x + torch.nn.functional.silu(
            torch.nn.functional.linear(x, weights[f"{name}.weight"], bias)
        )
    output = weights["lm_heads.0.weight" if values.get("original_lm_head") else
                     f"lm_heads.{head}.weight"]  # fmt: skip
    logits: Tensor = x @ output.T * values.get("logit_scale", 1.0)
    if "token_map" in weights:
        known = torch.full_like(logits, -torch.inf)
        known[:, weights["token_map"]] = logits[:, weights["token_map"]]
        logits = known
    return np.asarray(logits)


def native(model: TinyModel, heads: HeadsPart | None, **changes: Any) -> NativeBackend:
    """The model with these heads, on one thread."""
    return NativeBackend(
        ModelConfig.from_hf(model.config),
        model.checkpoint(),
        max_model_len=160,
        num_threads=1,
        heads=heads,
        **changes,
    )


def reference(model: TinyModel, heads: HeadsPart | None) -> TorchBackend:
    return TorchBackend(
        ModelConfig.from_hf(model.config), model.checkpoint(), max_model_len=160, heads=heads
    )
