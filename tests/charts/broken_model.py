"""A tiny model on disk of whose weights one row was damaged: it is no numbers."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models

if TYPE_CHECKING:
    from pathlib import Path

HIDDEN, HEADS, INNER, VOCABULARY = 64, 4, 96, 64
DAMAGED = VOCABULARY - 1
_CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": HIDDEN,
    "intermediate_size": INNER, "num_hidden_layers": 1, "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS, "vocab_size": VOCABULARY, "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "bos_token_id": 1, "eos_token_id": 2,
    "hidden_act": "silu", "tie_word_embeddings": False,
}  # fmt: skip


def write_broken_model(folder: Path) -> Path:
    """It loads and answers, until a prompt has the token `DAMAGED`: then its logits are NaN."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    layer = "model.layers.0."
    shapes = {
        "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
        **{f"{layer}self_attn.{name}_proj.weight": (HIDDEN, HIDDEN) for name in "qkvo"},
        f"{layer}mlp.gate_proj.weight": (INNER, HIDDEN),
        f"{layer}mlp.up_proj.weight": (INNER, HIDDEN),
        f"{layer}mlp.down_proj.weight": (HIDDEN, INNER),
        f"{layer}input_layernorm.weight": (HIDDEN,),
        f"{layer}post_attention_layernorm.weight": (HIDDEN,),
        "model.norm.weight": (HIDDEN,),
        "lm_head.weight": (VOCABULARY, HIDDEN),
    }
    tensors = {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    tensors["model.embed_tokens.weight"][DAMAGED] = np.nan
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(_CONFIG))
    words = {f"w{number}": number for number in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder
