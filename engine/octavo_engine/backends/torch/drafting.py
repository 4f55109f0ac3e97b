"""What a backend on a device says as one that drafts, whatever with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from octavo_engine.backends.backend import BackendStep
from octavo_engine.backends.torch.device_drafts import FIRST, MODEL, NEXT
from octavo_engine.backends.torch.transfers import send

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from octavo_engine.backends.torch.device_drafts import DeviceDrafts
    from octavo_engine.backends.torch.landing import Landed
    from octavo_engine.backends.torch.programs import Program
    from octavo_engine.sampling.batch import Sampled, SamplingBatch


class _Launches(Protocol):
    """What it takes of the backend."""

    _drafts: DeviceDrafts | None
    device: torch.device

    def _launch(self, program: Program, step: BackendStep, sampling: SamplingBatch) -> Landed: ...


class DraftsOnDevice:
    """As `LaunchesDrafts`, `LaunchesStateDrafts` and `LaunchesHeads`; states are the device's
    tensors."""

    _drafts: DeviceDrafts | None
    device: torch.device

    @property
    def has_draft(self) -> bool:
        return self._drafts is not None and self._drafts.has_model

    @property
    def has_draft_head(self) -> bool:
        return self._drafts is not None and self._drafts.has_head

    @property
    def num_heads(self) -> int:
        return 0 if self._drafts is None else self._drafts.num_heads

    @property
    def drafts_are_usual(self) -> bool:
        return self._drafts is None or self._drafts.are_usual()

    def draft(self: _Launches, step: BackendStep, sampling: SamplingBatch) -> Sampled:
        return launch(self, MODEL, step, sampling).wait()

    def launch_draft(self: _Launches, step: BackendStep, sampling: SamplingBatch) -> Landed:
        return launch(self, MODEL, step, sampling)

    def token_states(self: _Launches, tokens: NDArray[np.int32]) -> Tensor:
        return kept_rows(self, tokens)

    def hidden_rows(self: _Launches, logit_rows: NDArray[np.int32]) -> Tensor:
        return kept_rows(self, logit_rows)

    def join_states(self, states: Sequence[Tensor]) -> Tensor:
        return states[0] if len(states) == 1 else torch.cat(list(states))

    def pick_states(self: _Launches, states: Tensor, places: Sequence[int]) -> Tensor:
        if len(places) == len(states):  # they are in order: all of them
            return states
        return states.index_select(0, send(np.array(places), self.device))

    def draft_from(
        self: _Launches,
        step: BackendStep,
        states: Tensor,
        sampling: SamplingBatch,
        *,
        is_first: bool,
    ) -> tuple[Sampled, Tensor]:
        pending, own = launch_states(self, FIRST if is_first else NEXT, step, states, sampling)
        return pending.wait(), own

    def launch_draft_from(
        self: _Launches,
        step: BackendStep,
        states: Tensor,
        sampling: SamplingBatch,
        *,
        is_first: bool,
    ) -> tuple[Landed, Tensor]:
        return launch_states(self, FIRST if is_first else NEXT, step, states, sampling)

    def draft_head(
        self: _Launches,
        head: int,
        states: Tensor,
        tokens: NDArray[np.int32],
        sampling: SamplingBatch,
    ) -> tuple[Sampled, Tensor]:
        step = rows_step(tokens, sampling)
        pending, own = launch_states(self, head, step, states, sampling)
        return pending.wait(), own

    def launch_head(
        self: _Launches,
        head: int,
        states: Tensor,
        tokens: NDArray[np.int32] | None,
        sampling: SamplingBatch,
    ) -> tuple[Landed, Tensor]:
        """Without tokens they are those that the head before drew."""
        step = rows_step(tokens, sampling)
        return launch_states(self, head, step, states, sampling)


def launch(
    backend: _Launches, name: str | int, step: BackendStep, sampling: SamplingBatch
) -> Landed:
    assert backend._drafts is not None, "made without what drafts"
    with torch.inference_mode():
        return backend._launch(backend._drafts.program(name), step, sampling)


def launch_states(
    backend: _Launches,
    name: str | int,
    step: BackendStep,
    states: Tensor,
    sampling: SamplingBatch,
) -> tuple[Landed, Tensor]:
    """The states for the next pass, too: a row for each row of logits."""
    drafts = backend._drafts
    assert drafts is not None, "made without what drafts"
    with torch.inference_mode():
        drafts.give(name, states, len(step.token_ids))
        pending = backend._launch(drafts.program(name), step, sampling)
        if not drafts.leaves_states:
            return pending, states
        return pending, drafts.left_rows(len(step.logit_rows))


def kept_rows(backend: _Launches, places: NDArray[np.int32]) -> Tensor:
    assert backend._drafts is not None, "made without what drafts"
    with torch.inference_mode():
        return backend._drafts.kept_rows(send(places.astype(np.int64), backend.device))


def rows_step(tokens: NDArray[np.int32] | None, sampling: SamplingBatch) -> BackendStep:
    """Of rows by themselves, in which nothing attends: they have no context, so no block table is
    looked at."""
    count = len(sampling.rows)
    nothing = np.zeros(count, np.int32)
    ramp = np.arange(count + 1, dtype=np.int32)
    return BackendStep(
        token_ids=nothing if tokens is None else tokens,
        positions=nothing,
        slots=nothing[None] - 1,
        seq_starts=ramp,
        seq_lens=nothing,
        rows=sampling.rows,
        block_tables=np.zeros((1, 1, 0), np.int32),
        logit_rows=ramp[:-1],
        copies=np.zeros((0, 3), np.int32),
        awaited=sampling.rows if tokens is None else None,
    )
