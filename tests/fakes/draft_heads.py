"""Random heads with layers of their own for tiny models, as published, and what they say in plain
torch over whole texts."""

from __future__ import annotations

import copy
import dataclasses
import json
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import nn

from octavo_engine.backends.draft_head_files import (
    HeadWeights,
    draft_token_ids,
    eagle_places,
    prediction_config,
    prediction_places,
    read_eagle,
    read_eagle3,
)
from octavo_engine.backends.draft_part import DraftHeadPart
from octavo_engine.models.config import ModelConfig
from octavo_engine.models.decoder_names import under_our_names
from tests.engine.models.recurrent import RECURRENT
from tests.engine.models.tiny import MemoryCheckpoint, TinyModel, make_model, tiny_model

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

SIZE = 64


@dataclasses.dataclass(frozen=True, eq=False)
class FakeHead:
    """One head, its files and its layer as transformers computes it."""

    kind: str
    model: TinyModel
    config: dict[str, Any]  # config.json
    tensors: dict[str, Tensor]  # as published
    layer: Any
    rope: Any  # from states and positions to cos and sin

    def part(self) -> DraftHeadPart:
        model = ModelConfig.from_hf(self.model.config)
        if self.kind == "mtp":
            stored = under_our_names(model, MemoryCheckpoint(self.tensors))
            places = prediction_places(stored.names(), model)
            return DraftHeadPart(prediction_config(model), HeadWeights(stored, places))
        checkpoint = MemoryCheckpoint(
            {name: tensor for name, tensor in self.tensors.items() if name not in ("d2t", "t2d")}
        )
        is_third = self.kind == "eagle3"
        head = (read_eagle3 if is_third else read_eagle)(self.config, list(self.tensors), model)
        ids = None
        if "d2t" in self.tensors:
            ids = draft_token_ids(self.tensors["d2t"].numpy(), head)
        places = eagle_places(checkpoint.names(), is_third=is_third)
        return DraftHeadPart(head, HeadWeights(checkpoint, places), ids)

    def write(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        stored = {name: tensor.contiguous() for name, tensor in self.tensors.items()}
        save_file(stored, folder / "model.safetensors")

    def logits(self, token_ids: list[int], proposed: list[int]) -> list[Tensor]:
        """Of each proposed token, over the model's vocabulary, behind those before it."""
        with torch.inference_mode():
            ids = torch.tensor([token_ids[:-1]])
            output = self.model.reference.model(input_ids=ids, output_hidden_states=True)
            states = self._given(output)
            tokens, found = list(token_ids[1:]), []
            for token in proposed:
                state, logits = self._pass(torch.tensor(tokens), states)
                found.append(logits)
                tokens.append(token)
                states = torch.cat([states, state[-1:]])
            return found

    def _given(self, output: Any) -> Tensor:
        if self.kind != "eagle3":
            hidden: Tensor = output.last_hidden_state[0].float()
            return hidden
        kept = self.config["eagle_aux_hidden_state_layer_ids"]
        whole = torch.cat([output.hidden_states[index][0] for index in kept], dim=-1).float()
        return nn.functional.linear(whole, self.tensors["fc.weight"])

    def _pass(self, tokens: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """The head's states of all positions, and the logits of the last."""
        reference = self.model.reference
        embedding = reference.model.embed_tokens.weight[tokens].float()
        if "mtp.fc.weight" in self.tensors:
            return self._qwen3_next(embedding, states)
        if self.kind == "mtp":
            prefix = f"model.layers.{self.model.config['num_hidden_layers']}"
            embedding = self._norm(embedding, f"{prefix}.enorm.weight")
            states = self._norm(states, f"{prefix}.hnorm.weight")
            x = torch.cat([embedding, states], dim=-1) @ self.tensors[f"{prefix}.eh_proj.weight"].T
            x = self._layer(x)
            return x, self._head(self._norm(x, f"{prefix}.shared_head.norm.weight")[-1])
        if self.kind == "eagle":
            bias = self.tensors.get("fc.bias")
            both = torch.cat([embedding, states], dim=-1)
            x = self._layer(nn.functional.linear(both, self.tensors["fc.weight"], bias))
            return x, self._head(x[-1])
        x = self._third(embedding, states)
        out = self._norm(x, "norm.weight")[-1] @ self.tensors["lm_head.weight"].T
        known = torch.full((len(reference.model.embed_tokens.weight),), -torch.inf)
        known[torch.arange(len(out)) + self.tensors["d2t"]] = out
        return x, known

    def _qwen3_next(self, embedding: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """Its norms have weights around zero, and its state goes on as it is normed."""
        embedding = self._norm(embedding, "mtp.pre_fc_norm_embedding.weight", offset=1.0)
        states = self._norm(states, "mtp.pre_fc_norm_hidden.weight", offset=1.0)
        x = torch.cat([embedding, states], dim=-1) @ self.tensors["mtp.fc.weight"].T
        x = self._norm(self._layer(x), "mtp.norm.weight", offset=1.0)
        return x, self._head(x[-1])

    def _third(self, embedding: Tensor, states: Tensor) -> Tensor:
        layer = self.layer
        normed = self._norm(states, "midlayer.hidden_norm.weight")
        both = torch.cat([layer.input_layernorm(embedding), normed], dim=-1)
        residual = normed if self.config.get("norm_before_residual") else states
        attended = layer.self_attn(
            hidden_states=both[None],
            position_embeddings=self.rope(both[None, :, :SIZE], torch.arange(len(both))[None]),
            attention_mask=_mask(len(both)),
        )[0][0]
        x = residual + attended
        result: Tensor = x + layer.mlp(layer.post_attention_layernorm(x))
        return result

    def _layer(self, x: Tensor) -> Tensor:
        positions = torch.arange(len(x))[None]
        found = self.layer(
            x[None],
            attention_mask=_mask(len(x)),
            position_ids=positions,
            position_embeddings=self.rope(x[None], positions),
        )
        result: Tensor = (found[0] if isinstance(found, tuple) else found)[0]
        return result

    def _norm(self, x: Tensor, name: str, offset: float = 0.0) -> Tensor:
        eps = self.model.config["rms_norm_eps"]
        return nn.functional.rms_norm(x, (x.shape[-1],), self.tensors[name] + offset, eps)

    def _head(self, x: Tensor) -> Tensor:
        logits: Tensor = self.model.reference.lm_head(x)
        return logits


def _mask(length: int) -> Tensor:
    return torch.full((length, length), -torch.inf).triu(1)[None, None]


def _random(seed: int) -> Callable[..., Tensor]:
    """In bf16 numbers."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        drawn = torch.randn(shape, generator=generator).mul(shape[-1] ** -0.5)
        return drawn.bfloat16().float()

    return random


def _norms(random: Callable[..., Tensor]) -> Tensor:
    return 1 + random(SIZE).bfloat16().float()


def _llama(seed: int) -> TinyModel:
    """Of it the layer becomes the head's."""
    return make_model(f"head {seed}", "Llama", {"num_hidden_layers": 1, "num_attention_heads": 4})


def eagle(model: TinyModel, seed: int = 0, *, bias: bool = False) -> FakeHead:
    random, own = _random(seed), _llama(seed)
    layer = copy.deepcopy(own.reference.model.layers[0])
    layer.input_layernorm = nn.Identity()
    tensors = {
        name.removeprefix("model."): tensor
        for name, tensor in own.tensors.items()
        if ".layers." in name and "input_layernorm" not in name
    }
    tensors["fc.weight"] = random(SIZE, 2 * SIZE)
    if bias:
        tensors["fc.bias"] = random(SIZE)
    return FakeHead("eagle", model, own.config, tensors, layer, own.reference.model.rotary_emb)


def eagle3(
    model: TinyModel, seed: int = 0, *, kept: tuple[int, ...] = (3, 1, 2), **changes: Any
) -> FakeHead:
    random, own = _random(seed), _llama(seed)
    layer = copy.deepcopy(own.reference.model.layers[0])
    tensors = {
        name.replace("model.layers.0.", "midlayer."): tensor
        for name, tensor in own.tensors.items()
        if ".layers." in name
    }
    for part in "qkv":
        linear = getattr(layer.self_attn, f"{part}_proj")
        weight = random(linear.out_features, 2 * SIZE)
        setattr(layer.self_attn, f"{part}_proj", nn.Linear(2 * SIZE, len(weight), bias=False))
        getattr(layer.self_attn, f"{part}_proj").weight = nn.Parameter(weight)
        tensors[f"midlayer.self_attn.{part}_proj.weight"] = weight
    known = torch.randperm(256, generator=torch.Generator().manual_seed(seed))[:100].sort().values
    tensors |= {
        "fc.weight": random(SIZE, len(kept) * SIZE),
        "midlayer.hidden_norm.weight": _norms(random),
        "norm.weight": _norms(random),
        "lm_head.weight": random(100, SIZE) * 4,
        "d2t": known - torch.arange(100),
        "t2d": torch.zeros(256, dtype=torch.bool).index_fill(0, known, True),
    }
    config = own.config | {
        "draft_vocab_size": 100, "eagle_aux_hidden_state_layer_ids": list(kept), **changes,
    }  # fmt: skip
    return FakeHead("eagle3", model, config, tensors, layer, own.reference.model.rotary_emb)


class _Cut(NamedTuple):
    reference: Any  # of a model, without its last layer
    layer: Any


def _cut(whole: TinyModel) -> _Cut:
    reference = copy.deepcopy(whole.reference)
    layer = reference.model.layers[-1]
    layer.self_attn.layer_idx = 0
    reference.model.layers = reference.model.layers[:-1]
    reference.config.num_hidden_layers = len(reference.model.layers)
    return _Cut(reference, layer)


def prediction_layer(name: str, seed: int = 0) -> FakeHead:
    """A tiny model of that name without its last layer, which predicts instead."""
    whole, random = tiny_model(name), _random(seed)
    count = whole.config["num_hidden_layers"] - 1
    reference, layer = _cut(whole)
    prefix = f"model.layers.{count}"
    own = {name: tensor for name, tensor in whole.tensors.items() if name.startswith(f"{prefix}.")}
    tensors = own | {
        f"{prefix}.enorm.weight": _norms(random),
        f"{prefix}.hnorm.weight": _norms(random),
        f"{prefix}.eh_proj.weight": random(SIZE, 2 * SIZE),
        f"{prefix}.shared_head.norm.weight": _norms(random),
        f"{prefix}.shared_head.head.weight": random(256, SIZE),
        f"{prefix}.embed_tokens.weight": random(256, SIZE),
    }
    config = whole.config | {"num_hidden_layers": count, "num_nextn_predict_layers": 1}
    for per_layer in ("layer_types", "mlp_layer_types"):
        if isinstance(config.get(per_layer), list):
            config[per_layer] = config[per_layer][:count]
    rest = {name: tensor for name, tensor in whole.tensors.items() if name not in own}
    model = TinyModel(f"{name} cut", reference, config, rest)
    return FakeHead("mtp", model, config, rest | tensors, layer, reference.model.rotary_emb)


def qwen3_next_layer(seed: int = 0) -> FakeHead:
    """A tiny Qwen3-Next without its last layer, which has attention and predicts instead."""
    kinds = ["linear_attention", "full_attention"]
    kind, fields = RECURRENT["qwen3-next"]
    own_kinds = {"layer_types": [*kinds, "full_attention"], "mlp_only_layers": [1]}
    whole = make_model("qwen3-next with a prediction layer", kind, {**fields, **own_kinds})
    cut, random = _cut(whole), _random(seed)
    prefix = "model.layers.2."
    own = {name: tensor for name, tensor in whole.tensors.items() if name.startswith(prefix)}
    tensors = {f"mtp.layers.0.{name.removeprefix(prefix)}": own[name] for name in own} | {
        "mtp.pre_fc_norm_embedding.weight": random(SIZE),
        "mtp.pre_fc_norm_hidden.weight": random(SIZE),
        "mtp.fc.weight": random(SIZE, 2 * SIZE),
        "mtp.norm.weight": random(SIZE),
    }
    config = whole.config | {"num_hidden_layers": 2, "layer_types": kinds}
    rest = {name: tensor for name, tensor in whole.tensors.items() if name not in own}
    model = TinyModel("qwen3-next cut", cut.reference, config, rest)
    rope = cut.reference.model.rotary_emb
    return FakeHead("mtp", model, config, rest | tensors, cut.layer, rope)
