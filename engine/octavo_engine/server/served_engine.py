"""What the API server needs of an engine; AsyncEngine is one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from octavo_engine.config import EngineConfig
    from octavo_engine.core.info import CoreHealth, ModelInfo
    from octavo_engine.core.kv_events.residency_feed import ResidencyFeed
    from octavo_engine.core.media.workers import PictureWorkers
    from octavo_engine.core.pooling.async_pooling import PoolingItem
    from octavo_engine.core.text.output_stream import OutputSink
    from octavo_engine.core.text.outputs import RequestOutput
    from octavo_engine.core.text.submission import Submission
    from octavo_engine.state.adapter import AdapterRef
    from octavo_engine.state.outputs import EngineStats
    from octavo_engine.state.pooling import PoolingParams
    from octavo_engine.tokenization.tokenizer import Tokenizer


class ServedEngine(Protocol):
    @property
    def config(self) -> EngineConfig: ...
    @property
    def info(self) -> ModelInfo:
        """Known once the model is loaded."""

    @property
    def tokenizer(self) -> Tokenizer: ...
    @property
    def pictures(self) -> PictureWorkers | None:
        """What prepares pictures; None where the model takes none."""

    @property
    def stats(self) -> EngineStats: ...
    @property
    def residency(self) -> ResidencyFeed: ...
    def health(self) -> CoreHealth: ...
    async def deliver(self, submission: Submission, sink: OutputSink[RequestOutput]) -> None:
        """Until the last output; cancelling it aborts."""

    async def pool(
        self,
        items: Sequence[PoolingItem],
        params: PoolingParams,
        *,
        request_id: str,
        deadline_s: float | None = None,
    ) -> list[NDArray[np.float32]]:
        """One array an item; cancelling it aborts."""

    async def load_adapter(self, name: str, path: str, *, is_pinned: bool = False) -> AdapterRef:
        """Read a LoRA adapter into memory. Raises a RequestError."""

    async def unload_adapter(self, digest: str) -> None:
        """Forget an adapter's content; what runs with it goes on."""

    def settle_seed(self, seed: int | None) -> int:
        """The seed that a request will use: this one, or a new one."""

    async def abort(self, request_id: str) -> bool:
        """End a generation with what it has; false if there is none of that id."""

    async def reset_prefix_cache(self) -> None: ...
    async def sleep(self, *, on: bool, level: int = 1) -> None:
        """Give memory back, or take it again; only while nothing runs."""

    async def start_profile(self) -> None:
        """Record every step from now on."""

    async def stop_profile(self, path: str) -> int:
        """Write what was recorded; how many events that is. Raises a RequestError."""

    async def ready(self) -> ModelInfo: ...
    async def drain(self, timeout_s: float) -> bool: ...
    async def stop(self) -> None: ...
