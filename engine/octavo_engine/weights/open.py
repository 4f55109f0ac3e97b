"""Opens the weights of a resolved model, whatever their format."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo_engine.errors import ModelError
from octavo_engine.weights.dummy import DummyCheckpoint
from octavo_engine.weights.gguf_checkpoint import GGUFCheckpoint
from octavo_engine.weights.mxfp4 import Mxfp4Experts
from octavo_engine.weights.quantized import QuantizedCheckpoint, layout_of
from octavo_engine.weights.safetensors import SafetensorsCheckpoint

if TYPE_CHECKING:
    from octavo_engine.weights.checkpoint import Checkpoint
    from octavo_engine.weights.source import ModelFiles


def open_checkpoint(files: ModelFiles, *, load_format: str = "auto", seed: int = 0) -> Checkpoint:
    """The model's tensors; `dummy` makes them up. Headers are read now, tensors when packed."""
    if load_format == "dummy":
        return DummyCheckpoint(seed)
    if load_format not in ("auto", files.kind):
        raise ModelError(f"load format {load_format!r} does not fit {files.kind} files")
    if files.gguf is not None:
        return GGUFCheckpoint(files.gguf)
    checkpoint = SafetensorsCheckpoint.open(files.path)
    quantization = files.config.get("quantization_config")
    if quantization is None:
        return checkpoint
    if isinstance(quantization, dict) and quantization.get("quant_method") == "mxfp4":
        return Mxfp4Experts(checkpoint)
    return QuantizedCheckpoint(checkpoint, layout_of(quantization))
