"""Which GPU each rank has: rank 0 the first one that it sees, the others those behind it.

A rank's process sees no other one, so that it computes on "the first" as any engine does.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from octavo_engine.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from octavo_engine.config import EngineConfig

VISIBLE = "CUDA_VISIBLE_DEVICES"
# With any value all ranks compute on the first GPU: a trial of ranks where there is only one.
SHARES_GPU = "OCTAVO_RANKS_SHARE_GPU"


def shares_gpu() -> bool:
    return bool(os.environ.get(SHARES_GPU))


def check_devices(config: EngineConfig) -> None:
    """Raises ConfigError where there is not a GPU for each rank."""
    size = config.num_ranks
    if config.device != "cuda" or size == 1 or shares_gpu():
        return
    try:
        import torch
    except ImportError as error:
        raise ConfigError("--device cuda needs torch: pip install torch triton") from error
    count = torch.cuda.device_count()
    if count < size:
        raise ConfigError(
            f"{config.ranks_flag} needs a GPU for each rank, and torch sees {count}: lower it, or "
            f"let this process see more (nvidia-smi, {VISIBLE})"
        )


def environment_of(
    rank: int, config: EngineConfig, own: Mapping[str, str] = os.environ
) -> Mapping[str, str] | None:
    """Of a rank's process, which sees its own GPU only; None: that of this process."""
    if config.device != "cuda" or shares_gpu():
        return None
    visible = [name.strip() for name in own.get(VISIBLE, "").split(",") if name.strip()]
    return {**own, VISIBLE: visible[rank] if visible else str(rank)}
