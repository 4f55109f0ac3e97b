"""LoRA adapters of SmolLM2 for servers under measurement: as PEFT saves them, and as GGUF.

All linear layers at rank 16, in bf16, random and small. Many of them share the weights of a few:
they differ in `lora_alpha`, so each has a content of its own, and a thousand fit on a disk.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import numpy as np

from octavo_engine.weights.bfloat16 import to_bfloat16

if TYPE_CHECKING:
    from pathlib import Path

RANK = 16
NUM_WEIGHTS = 32  # files of weights; more adapters share them
SIZE = 0.02  # of B's numbers, such that answers change and stay in range
GGUF_NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}  # fmt: skip


def layer_shapes(config: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """(columns, outputs) of the linear layers of each layer of a Llama."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    head = config.get("head_dim") or hidden // config["num_attention_heads"]
    queries, keys = (config[f"num_{n}_heads"] * head for n in ("attention", "key_value"))
    return {
        "self_attn.q_proj": (hidden, queries), "self_attn.k_proj": (hidden, keys),
        "self_attn.v_proj": (hidden, keys), "self_attn.o_proj": (queries, hidden),
        "mlp.gate_proj": (hidden, inner), "mlp.up_proj": (hidden, inner),
        "mlp.down_proj": (inner, hidden),
    }  # fmt: skip


def num_weights(config: dict[str, Any]) -> int:
    """Of one adapter: what each token is multiplied with."""
    sizes = layer_shapes(config).values()
    return sum(RANK * (columns + rows) for columns, rows in sizes) * int(
        config["num_hidden_layers"]
    )


def adapter_name(number: int) -> str:
    return f"adapter-{number:04d}"


def write_adapters(folder: Path, config: dict[str, Any], count: int) -> None:
    """Folders adapter-0000 and so on. What is there already stays."""
    for number in range(count):
        own = folder / adapter_name(number)
        if (own / "adapter_config.json").exists():
            continue
        own.mkdir(parents=True, exist_ok=True)
        target = own / "adapter_model.safetensors"
        target.unlink(missing_ok=True)
        if number < NUM_WEIGHTS:
            _write_weights(target, config, seed=number)
        else:
            os.link(folder / adapter_name(number % NUM_WEIGHTS) / target.name, target)
        settings = {
            "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "bias": "none",
            "lora_alpha": _alpha(number),
            "target_modules": sorted(name.rpartition(".")[2] for name in GGUF_NAMES),
        }  # fmt: skip
        (own / "adapter_config.json").write_text(json.dumps(settings))  # last: all is there


def write_gguf_adapters(folder: Path, config: dict[str, Any], count: int) -> list[Path]:
    """The first `count` of them as llama.cpp reads them. What is there already stays."""
    files = [folder / f"{adapter_name(number)}.gguf" for number in range(count)]
    for number, file in enumerate(files):
        if not file.exists():
            _write_gguf(file, config, number)
    return files


def _alpha(number: int) -> float:
    return RANK * (1.0 + number // NUM_WEIGHTS / 1000)


def _tensors(config: dict[str, Any], seed: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """A and B of each linear layer, by its name below the model, in float32."""
    rng = np.random.default_rng(seed)
    found = {}
    for layer in range(config["num_hidden_layers"]):
        for name, (columns, rows) in layer_shapes(config).items():
            down = rng.standard_normal((RANK, columns), np.float32) * columns**-0.5
            up = rng.standard_normal((rows, RANK), np.float32) * SIZE
            found[f"layers.{layer}.{name}"] = down.astype(np.float32), up.astype(np.float32)
    return found


def _write_weights(target: Path, config: dict[str, Any], *, seed: int) -> None:
    """Safetensors with bf16, which numpy has no type for: written by hand."""
    header: dict[str, Any] = {}
    data = bytearray()
    for name, parts in _tensors(config, seed).items():
        for letter, part in zip("AB", parts, strict=True):
            begin = len(data)
            data += to_bfloat16(part).tobytes()
            header[f"base_model.model.model.{name}.lora_{letter}.weight"] = {
                "dtype": "BF16", "shape": list(part.shape), "data_offsets": [begin, len(data)],
            }  # fmt: skip
    text = json.dumps(header).encode()
    target.write_bytes(len(text).to_bytes(8, "little") + text + data)


def _write_gguf(file: Path, config: dict[str, Any], number: int) -> None:
    import gguf

    partial = file.with_suffix(".partial")
    writer = gguf.GGUFWriter(partial, "llama")
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", _alpha(number))
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for name, (down, up) in _tensors(config, number % NUM_WEIGHTS).items():
        _, layer, module = name.split(".", 2)
        kind = GGUF_NAMES[module]
        if kind in heads:  # as in the base model's file: halves of a head interleaved
            pairs = up.reshape(heads[kind], 2, -1, RANK)
            up = np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(up.shape)
        writer.add_tensor(f"blk.{layer}.{kind}.weight.lora_a", down)
        writer.add_tensor(f"blk.{layer}.{kind}.weight.lora_b", up)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.rename(file)  # last: it says that all is there
