"""What the step loop drives: an engine that generates, or one that pools."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from octavo_engine.core.process.heartbeat import Heartbeat
    from octavo_engine.errors import RequestError
    from octavo_engine.profile import StepProfile
    from octavo_engine.state.labels import Labels
    from octavo_engine.state.outputs import SequenceOutput, StepOutput
    from octavo_engine.state.pooling import PoolingRequest
    from octavo_engine.state.request import EngineRequest


class CoreEngine(Protocol):
    """Requests in, steps on demand, outputs out. One thread owns it; nothing in it waits."""

    last_step_was_empty: bool
    profile: StepProfile | None  # while steps are recorded; see `record`

    @property
    def heartbeat(self) -> Heartbeat: ...

    @property
    def has_work(self) -> bool: ...

    def add(self, request: EngineRequest) -> None:
        """Take a sequence in. Raises RequestError."""

    def add_pooling(self, requests: Sequence[PoolingRequest]) -> None:
        """Take texts in, all of them or none. Raises RequestError."""

    def load_adapter(self, load_id: str, path: str, *, is_pinned: bool = False) -> None:
        """Read a LoRA adapter into memory. Raises RequestError. What comes of it is in a step's
        output, or among the refused."""

    def unload_adapter(self, digest: str) -> None:
        """Forget an adapter that no name stands for any more."""

    def abort(self, request_id: str, *, has_left: bool = False) -> SequenceOutput | None:
        """End a request now. Unknown or finished: None. See `Scheduler.abort`."""

    def suspend(self, request_id: str, *, on: bool) -> None:
        """Its output is not read for now, or is read again. Unknown or finished: nothing."""

    def step(self) -> StepOutput:
        """Compute one batch."""

    def report(self, outputs: list[SequenceOutput]) -> StepOutput:
        """All there is to report after a command when there was no step."""

    def take_refused(self) -> list[tuple[str, RequestError]]:
        """Requests that were taken in and cannot be served after all; each is handed out once."""

    def record(self, profile: StepProfile | None) -> None:
        """Report every step to `profile` from now on; None: no more."""

    def label(self, request_id: str, labels: Labels) -> None: ...
    def watch(self, *, on: bool) -> None: ...
    def reset_prefix_cache(self) -> bool: ...
    def sleep(self, *, on: bool, level: int = 1) -> None:
        """Let go of the KV cache's memory, and on a device with memory of its own of the weights':
        level 1 keeps them on the host, level 2 reads them again when it is woken."""

    def close(self) -> None: ...


@runtime_checkable
class ServesBlocks(Protocol):
    """An engine whose KV blocks others may get, also while it has no work."""

    def wake_with(self, wake: Callable[[], None]) -> None:
        """Have it called, on any thread, when `serve_blocks` or a step has something to do."""

    def serve_blocks(self) -> None:
        """Copy what others wait for."""
