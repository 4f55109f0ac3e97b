"""Random MLP speculators for tiny models, as a part of a backend or as files in IBM's form."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from octavo_engine.backends.head_files import HeadsPart, SpeculatorNames
from octavo_engine.models.mlp_speculator import MlpSpeculatorConfig
from tests.engine.models.tiny import MemoryCheckpoint

if TYPE_CHECKING:
    from torch import Tensor


def speculator_config(**changes: Any) -> dict[str, Any]:
    return {
        "model_type": "mlp_speculator", "architectures": ["MLPSpeculatorPreTrainedModel"],
        "emb_dim": 64, "inner_dim": 48, "vocab_size": 256, "n_predict": 3, "tie_weights": False,
        "scale_input": False,
    } | changes  # fmt: skip


def speculator_weights(values: dict[str, Any], seed: int = 0) -> dict[str, Tensor]:
    """In bf16 numbers. Where they are tied, each head has a copy, as IBM's files do."""
    generator = torch.Generator().manual_seed(seed)
    inner, vocab = values["inner_dim"] or values["emb_dim"], values["vocab_size"]

    def random(*shape: int, scale: float = 1.0) -> Tensor:
        drawn = torch.randn(shape, generator=generator).mul(scale * shape[-1] ** -0.5)
        return drawn.bfloat16().float()

    weights: dict[str, Tensor] = {}
    for head in range(values["n_predict"]):
        columns = inner if head else values["emb_dim"]
        own = {
            "emb": random(vocab, inner),
            "proj": random(inner, columns),
            "head": random(vocab, inner, scale=4.0),
            "ln": (1 + random(inner)).bfloat16().float(),
        }
        bias = random(inner, scale=3.0)
        if values["tie_weights"] and head:
            own |= {name: weights[f"{name}.0.weight"] for name in ("emb", "head", "ln")}
            own["proj"] = weights.get("proj.1.weight", own["proj"])
            bias = weights["ln.0.bias"]
        weights |= {f"{name}.{head}.weight": tensor for name, tensor in own.items()}
        weights[f"ln.{head}.bias"] = bias
    return weights


def speculator_part(values: dict[str, Any], weights: dict[str, Tensor]) -> HeadsPart:
    config = MlpSpeculatorConfig.from_hf(values)
    names = SpeculatorNames(MemoryCheckpoint(weights), config, config.num_heads)
    return HeadsPart(config, names, config.num_heads)


def speculator_logits(
    values: dict[str, Any], weights: dict[str, Tensor], hidden: Tensor, tokens: list[int]
) -> list[Tensor]:
    """In plain torch, as the paper has it: of each head, behind the token that was sampled and
    those that were drafted."""
    inner = values["inner_dim"] or values["emb_dim"]
    of_state = 0.5 ** (0.5 / values["n_predict"])
    of_token = math.sqrt((1 - of_state**2) * (inner / 2))

    def normed(x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)

    state = normed(hidden) / math.sqrt(2) if values["scale_input"] else hidden
    found = []
    for head, token in enumerate(tokens):
        state = weights[f"proj.{head}.weight"] @ state
        state = state + of_token / of_state * weights[f"emb.{head}.weight"][token]
        state = weights[f"ln.{head}.weight"] * normed(state) + weights[f"ln.{head}.bias"]
        state = functional.gelu(state)
        found.append(weights[f"head.{head}.weight"] @ state)
    return found
