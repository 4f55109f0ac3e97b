"""Backends of tests: settings and what else is said, by name."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypeVar

from octavo_engine.backends.torch.cuda import CudaBackend
from octavo_engine.backends.torch.cuda_settings import CudaSettings

if TYPE_CHECKING:
    from octavo_engine.models.config import ModelConfig
    from octavo_engine.weights.checkpoint import Checkpoint

SETTINGS = {field.name for field in fields(CudaSettings)}
B = TypeVar("B", bound=CudaBackend)


def open_cuda(
    config: ModelConfig, checkpoint: Checkpoint, *, max_model_len: int, **options: Any
) -> CudaBackend:
    return open_as(CudaBackend, config, checkpoint, max_model_len=max_model_len, **options)


def open_as(kind: type[B], config: ModelConfig, checkpoint: Checkpoint, **options: Any) -> B:
    settings = {name: options.pop(name) for name in list(options) if name in SETTINGS}
    return kind.open(config, checkpoint, CudaSettings(**settings), **options)
