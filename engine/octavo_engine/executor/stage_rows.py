"""The rows that go from one stage to the next, through memory that both map."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from octavo_engine import _native
from octavo_engine.backends.native.stages import StagePlace, parse_layers
from octavo_engine.executor.commands import stage_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from octavo_engine.backends.backend import BackendStep
    from octavo_engine.config import EngineConfig


MEASURED = "measured"  # --pipeline-layer-partition: by the time that layers take


class StepRefused(ValueError):
    """A stage before this one refused the step, and logged why."""


def place_of(config: EngineConfig, rank: int) -> StagePlace:
    """Of a rank of a pipeline. Raises ConfigError."""
    size = config.pipeline_parallel_size
    layers = parse_layers(config.pipeline_layer_partition, size)
    return StagePlace(stage_of(rank, size), size, layers, has_host=config.nnodes > 1)


class StageRows:
    """One stage's two ends: `files[i]` is memory between stage i and the next one."""

    def __init__(
        self, place: StagePlace, files: Sequence[int], max_bytes: int, columns: int
    ) -> None:
        self._columns = columns
        self._incoming = self._outgoing = None
        self._arrived: bytes | None = None
        if not place.is_first:
            self._incoming = _native.Ring(1, 2, files[place.stage - 1], max_bytes)
        if not place.is_last:
            self._outgoing = _native.Ring(0, 2, files[place.stage], max_bytes)

    def arrived(self, patience_s: float = math.inf) -> bool:
        """Whether what the stage before left of the next step came within that time; of the first
        stage nothing needs to."""
        if self._incoming is not None and self._arrived is None:
            self._arrived = self._incoming.take_within(patience_s)
        return self._incoming is None or self._arrived is not None

    def put_into(self, step: BackendStep) -> None:
        """Give the step the rows that arrived. Raises StepRefused."""
        data, self._arrived = self._arrived, None
        if data is None:
            return  # of the first stage
        num_tokens = len(step.token_ids)
        if len(data) != 4 * num_tokens * self._columns:
            raise StepRefused(
                f"{len(data)} bytes came from the stage before for {num_tokens} tokens"
            )
        step.inputs = np.frombuffer(data, np.float32).reshape(num_tokens, self._columns)
        step.input_rows = np.arange(num_tokens, dtype=np.int32)

    def drop(self) -> None:
        """What arrived is of a step that was given up."""
        self._arrived = None

    def give(self, rows: NDArray[np.float32] | None) -> None:
        """To the next stage; None: the step was refused. Waits until there is room."""
        assert self._outgoing is not None, "the last stage gives nothing"
        self._outgoing.put(b"" if rows is None else rows.tobytes(), math.inf)
