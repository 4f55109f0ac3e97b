"""LoRA adapters as PEFT saves them, written without it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors.numpy import save_file

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


def write_adapter(
    folder: Path,
    modules: Mapping[str, tuple[int, int]],
    *,
    rank: int = 4,
    alpha: float = 8.0,
    seed: int = 0,
    size: float = 0.3,
    **fields: Any,
) -> Path:
    """An adapter of random numbers for these modules, each of (in, out) columns."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for module, (columns, rows) in modules.items():
        own = fields.get("rank_pattern", {}).get(module.rpartition(".")[2], rank)
        name = f"base_model.model.{module}"
        down = rng.normal(0.0, columns**-0.5, (own, columns))
        tensors[f"{name}.lora_A.weight"] = down.astype(np.float32)
        tensors[f"{name}.lora_B.weight"] = rng.normal(0.0, size, (rows, own)).astype(np.float32)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA", "r": rank, "lora_alpha": alpha, "bias": "none",
        "target_modules": sorted({module.rpartition(".")[2] for module in modules}),
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config | fields))
    return folder
