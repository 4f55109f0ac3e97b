"""What `LLM` drives: one engine core in this process, or several that have their own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from octavo_engine.core.build_core import build_core
from octavo_engine.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from octavo_engine.backends.backend import Backend
    from octavo_engine.config import EngineConfig
    from octavo_engine.core.info import ModelInfo
    from octavo_engine.errors import RequestError
    from octavo_engine.profile import StepProfile
    from octavo_engine.state.outputs import SequenceOutput, StepOutput
    from octavo_engine.state.pooling import PoolingRequest
    from octavo_engine.state.request import EngineRequest


class Recording(Protocol):
    """Steps that were recorded."""

    def write(self, path: str | Path) -> int:
        """How many events the file holds. Raises OctavoError."""


class OfflineEngine(Protocol):
    """The methods of `CoreEngine` that `LLM` calls."""

    @property
    def profile(self) -> Recording | None: ...
    @property
    def has_work(self) -> bool: ...
    def add(self, request: EngineRequest) -> None: ...
    def add_pooling(self, requests: Sequence[PoolingRequest]) -> None: ...
    def load_adapter(self, load_id: str, path: str, *, is_pinned: bool = False) -> None: ...
    def abort(self, request_id: str, *, has_left: bool = False) -> SequenceOutput | None: ...
    def step(self) -> StepOutput: ...
    def report(self, outputs: list[SequenceOutput]) -> StepOutput: ...
    def take_refused(self) -> list[tuple[str, RequestError]]: ...
    def record(self, profile: StepProfile | None) -> None: ...
    def reset_prefix_cache(self) -> bool: ...
    def sleep(self, *, on: bool, level: int = 1) -> None: ...
    def close(self) -> None: ...


def build_offline(
    config: EngineConfig,
    *,
    progress: Callable[[int, int], None] | None = None,
    backend: Backend | None = None,
) -> tuple[OfflineEngine, ModelInfo]:
    """Load. Raises ConfigError or ModelError; then nothing is left behind."""
    if config.data_parallel_size == 1:
        return build_core(config, progress=progress, backend=backend)
    if backend is not None:
        raise ConfigError(
            "data_parallel_size must be 1 with a backend that was made elsewhere: each core is a "
            f"process and makes its own; got {config.data_parallel_size}"
        )
    from octavo_engine.core.data_parallel.core_group import CoreGroup  # with asyncio, sockets, …

    return CoreGroup.build(config, progress=progress)
