"""Shapes to measure without a checkpoint: by name, or any config.json; weights are random."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from octavo_engine.errors import ConfigError, ModelError
from octavo_engine.models.config import ModelConfig

_COMMON: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "max_position_embeddings": 16384,
    "torch_dtype": "bfloat16",
}


def _shape(
    hidden: int, inner: int, layers: int, heads: tuple[int, int], vocab: int, *, tied: bool
) -> dict[str, Any]:
    return _COMMON | {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "vocab_size": vocab,
        "tie_word_embeddings": tied,
    }


SHAPES = {
    "tiny": _shape(128, 256, 2, (4, 2), 1024, tied=True),  # to try the command
    "135m": _shape(576, 1536, 30, (9, 3), 49152, tied=True),  # SmolLM2-135M
    "360m": _shape(960, 2560, 32, (15, 5), 49152, tied=True),  # SmolLM2-360M
    "0.5b": _shape(896, 4864, 24, (14, 2), 151936, tied=True),  # Qwen2.5-0.5B
    "1.5b": _shape(1536, 8960, 28, (12, 2), 151936, tied=True),  # Qwen2.5-1.5B
    "3b": _shape(3072, 8192, 28, (24, 8), 128256, tied=True),  # Llama-3.2-3B
    "8b": _shape(4096, 14336, 32, (32, 8), 128256, tied=False),  # Llama-3.1-8B
}


def write_shape(shape: str, folder: Path) -> None:
    """The config.json of a shape, by name or by path, into `folder`. Raises ConfigError."""
    config = SHAPES.get(shape) or _read(shape)
    try:
        ModelConfig.from_hf(config)
    except ModelError as error:
        raise ConfigError(f"--shape {shape}: {error}") from error
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def _read(shape: str) -> dict[str, Any]:
    path = Path(shape)
    if path.is_dir():
        path /= "config.json"
    if path.suffix != ".json":
        raise ConfigError(
            f"--shape {shape} is not known; give one of {', '.join(SHAPES)}, or a config.json"
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--shape {shape}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--shape {shape} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"--shape {shape} must hold an object, as config.json does")
    return config
