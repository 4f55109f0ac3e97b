"""From the engine's settings to the device backend: which dtype, and whether the device has it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

from octavo_engine.backends.torch.cuda import CudaBackend
from octavo_engine.backends.torch.cuda_settings import CudaSettings
from octavo_engine.backends.torch.platforms import find_platform
from octavo_engine.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from octavo_engine.backends.adapters import AdapterLimits
    from octavo_engine.backends.draft_sources import DraftSources
    from octavo_engine.backends.native.shard import RankPlace
    from octavo_engine.backends.torch.platforms import Platform
    from octavo_engine.config import DType, EngineConfig
    from octavo_engine.models.config import ModelConfig
    from octavo_engine.weights.checkpoint import Checkpoint

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
BFLOAT16_CAPABILITY = (8, 0)

logger = logging.getLogger(__name__)


def build_cuda(
    engine: EngineConfig,
    config: ModelConfig,
    checkpoint: Checkpoint,
    drafts: DraftSources,
    *,
    max_model_len: int,
    adapters: AdapterLimits | None = None,
    progress: Callable[[int, int], None] | None = None,
    place: RankPlace | None = None,
    shares_device: bool = False,
) -> CudaBackend:
    """The model on the first GPU, or a rank's part of it. Raises ConfigError and ModelError."""
    settings = CudaSettings(
        dtype=settle_dtype(engine.dtype, config.torch_dtype),
        kernels=engine.kernels,
        attention=engine.attention_backend,
        use_graphs=not engine.enforce_eager,
        batch_invariant=engine.batch_invariant,
        kv_cache_dtype=engine.kv_cache_dtype,
        has_tiers=engine.has_kv_tiers,
        num_drafts=_num_drafts(engine),
    )
    return CudaBackend.open(
        config,
        checkpoint,
        settings,
        max_model_len=max_model_len,
        keep_quantized=engine.quantization != "none",
        adapters=adapters,
        drafts=drafts if drafts.is_any else None,
        progress=progress,
        place=place,
        shares_device=shares_device,
    )


def _num_drafts(engine: EngineConfig) -> int:
    """Tokens that a step verifies of a sequence at most."""
    return 0 if engine.speculation is None else engine.speculation.num_speculative_tokens


def build_plugin(
    engine: EngineConfig,
    config: ModelConfig,
    checkpoint: Checkpoint,
    drafts: DraftSources,
    *,
    max_model_len: int,
    adapters: AdapterLimits | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> CudaBackend:
    """The model on --platform, by plain kernels. Raises ConfigError and ModelError."""
    assert not drafts.is_any, "refused by `check_draft_device`"
    platform = find_platform(engine.platform)
    logger.warning("Computing on %s by plain torch, which has not been tested there", platform.name)
    settings = CudaSettings(
        dtype=_platform_dtype(platform, engine.dtype, config.torch_dtype),
        kernels="plain",
        use_graphs=False,
        batch_invariant=engine.batch_invariant,
        label=platform.name,
        memory_of=platform.memory,
    )
    return CudaBackend.open(
        config,
        checkpoint,
        settings,
        max_model_len=max_model_len,
        device=str(platform.device()),
        keep_quantized=engine.quantization != "none",
        adapters=adapters,
        progress=progress,
    )


def _platform_dtype(platform: Platform, requested: DType, stored: str) -> torch.dtype:
    wanted = [_DTYPES[requested]] if requested != "auto" else [
        torch.float16 if stored == "float16" else torch.bfloat16, torch.bfloat16, torch.float32
    ]  # fmt: skip
    for dtype in wanted:
        if platform.supports(dtype):
            return dtype
    raise ConfigError(f"--dtype {requested} is not available on {platform.name}; use auto")


def settle_dtype(requested: DType, stored: str) -> torch.dtype:
    """What was requested; else the model's own, in 16 bits, which is what matrix units are for."""
    if requested != "auto":
        return _DTYPES[requested]
    dtype = torch.float16 if stored == "float16" else torch.bfloat16
    is_old = (
        torch.cuda.is_available()
        and torch.version.hip is None
        and torch.cuda.get_device_capability() < BFLOAT16_CAPABILITY
    )
    if dtype == torch.bfloat16 and is_old:
        logger.warning("This GPU has no bfloat16: weights are converted to float16")
        return torch.float16
    return dtype
