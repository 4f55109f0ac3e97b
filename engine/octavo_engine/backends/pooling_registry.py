"""From settings to the backend of a model that pools; imports each backend when it is wanted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo_engine.backends.registry import check_activation_bits
from octavo_engine.errors import ConfigError
from octavo_engine.models.config import ModelConfig
from octavo_engine.models.decoder_names import under_our_names
from octavo_engine.models.encoder_names import decoder_rename, encoder_rename
from octavo_engine.models.pooling_config import LibraryBody
from octavo_engine.weights.open import open_checkpoint
from octavo_engine.weights.safetensors import SafetensorsCheckpoint
from octavo_engine.weights.views import Joined, Renamed

if TYPE_CHECKING:
    from collections.abc import Callable

    from octavo_engine.backends.native.graph import Dtype
    from octavo_engine.backends.pooling import PoolingBackend
    from octavo_engine.config import EngineConfig
    from octavo_engine.models.pooling_config import PoolingConfig
    from octavo_engine.weights.checkpoint import Checkpoint
    from octavo_engine.weights.source import ModelFiles


def build_pooling_backend(
    config: EngineConfig,
    pooling: PoolingConfig,
    files: ModelFiles,
    *,
    max_model_len: int,
    progress: Callable[[int, int], None] | None = None,
) -> PoolingBackend:
    """Reads the weights. Raises ModelError and ConfigError."""
    check_pooling_device(config)
    if isinstance(pooling.body, LibraryBody):
        from octavo_engine.backends.torch.fallback.texts import TransformersTexts

        stored = open_checkpoint(files, load_format=config.load_format, seed=config.seed)
        if config.load_format != "dummy":
            stored = Joined(stored, _modules(pooling, files))
        return TransformersTexts(config, pooling, files, stored)
    checkpoint = _open(config, pooling, files)
    match config.device:
        case "auto" | "cpu":
            from octavo_engine.backends.native.pooling import NativePoolingBackend

            return NativePoolingBackend(
                pooling,
                checkpoint,
                max_model_len=max_model_len,
                dtype=_native_dtype(config, pooling),
                quantization=config.quantization,
                activation_bits=config.activation_bits,
                num_threads=config.num_threads,
                progress=progress,
            )
        case "torch":
            return _build_torch(
                config, pooling, checkpoint, max_model_len=max_model_len, progress=progress
            )
        case "cuda":
            return _cuda_builder()(
                config, pooling, checkpoint, max_model_len=max_model_len, progress=progress
            )
    raise AssertionError(config.device)


def check_pooling_device(config: EngineConfig) -> None:
    """Raises ConfigError where the device that is named does not do what the settings say."""
    check_activation_bits(config)
    if config.device not in ("auto", "cpu", "torch", "cuda"):
        raise ConfigError(
            f"--device {config.device} does not serve models for embeddings and scores; use cpu or "
            "cuda"
        )
    if config.quantization in ("int8", "int4") and config.device not in ("auto", "cpu"):
        raise ConfigError(f"--quantization {config.quantization} is computed by --device cpu only")


def _native_dtype(config: EngineConfig, pooling: PoolingConfig) -> Dtype:
    """As requested; else as the file has it, whose makers measured it so."""
    match config.dtype:
        case "float16":
            raise ConfigError(
                "--dtype float16 is not available on this device; use bfloat16, float32 or auto"
            )
        case "bfloat16":
            return "bf16"
        case "float32":
            return "f32"
    return "f32" if pooling.torch_dtype == "float32" else "bf16"


def _build_torch(
    config: EngineConfig,
    pooling: PoolingConfig,
    checkpoint: Checkpoint,
    *,
    max_model_len: int,
    progress: Callable[[int, int], None] | None,
) -> PoolingBackend:
    try:
        import torch
    except ImportError as error:
        raise ConfigError("--device torch needs torch: pip install torch") from error
    from octavo_engine.backends.torch.pooling import TorchPoolingBackend
    from octavo_engine.backends.torch.precision import Precision

    storage = {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(config.dtype)
    return TorchPoolingBackend(
        pooling,
        checkpoint,
        max_model_len=max_model_len,
        precision=Precision(storage=storage),
        progress=progress,
    )


def _cuda_builder() -> Callable[..., PoolingBackend]:
    try:
        from octavo_engine.backends.torch.build_pooling import build_cuda_pooling
    except ImportError as error:
        raise ConfigError("--device cuda needs torch: pip install torch triton") from error
    return build_cuda_pooling


def _open(config: EngineConfig, pooling: PoolingConfig, files: ModelFiles) -> Checkpoint:
    """The body's weights under our names, and those of the modules behind it."""
    checkpoint = open_checkpoint(files, load_format=config.load_format, seed=config.seed)
    if config.load_format == "dummy":
        return checkpoint  # has whatever is requested
    body = pooling.page
    if isinstance(body, ModelConfig):
        is_llama = body.family.naming == "llama"
        renamed = under_our_names(
            body, Renamed(checkpoint, decoder_rename) if is_llama else checkpoint
        )
    else:
        renamed = Renamed(checkpoint, encoder_rename(body.family))
    if pooling.is_classifier or pooling.is_sparse:
        return renamed
    return Joined(renamed, _modules(pooling, files))


def _modules(pooling: PoolingConfig, files: ModelFiles) -> dict[str, Checkpoint]:
    """The dense layers that sentence-transformers keeps in folders of their own."""
    folders = [layer.name.removesuffix(".linear") for layer in pooling.dense]
    return {name: SafetensorsCheckpoint.open(files.path / name) for name in folders}
