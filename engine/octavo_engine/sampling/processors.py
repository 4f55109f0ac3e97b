"""Custom logits processors: installed under the entry point group `octavo.logits_processors`.

A request names them. They run in Python on that request's row of float32 logits, in place, before
everything else the sampler does; log-probabilities are then those of the processed logits.
"""

from __future__ import annotations

import logging
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from octavo_engine.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from importlib.metadata import EntryPoint

    from numpy.typing import NDArray

GROUP = "octavo.logits_processors"

logger = logging.getLogger(__name__)


class LogitsProcessor(Protocol):
    """Changes the logits of the token that follows `token_ids` (prompt and output), in place."""

    def __call__(self, token_ids: NDArray[np.int32], logits: NDArray[np.float32], /) -> None: ...


class ProcessedRow(NamedTuple):
    """A row of a step's logits, the processors it is for, and the tokens so far."""

    logits_row: int
    processors: Sequence[LogitsProcessor]
    token_ids: NDArray[np.int32]


class ProcessorRegistry:
    """The processors that are installed; each is imported when first requested."""

    def __init__(self, installed: Iterable[EntryPoint] | None = None) -> None:
        self._installed: Mapping[str, EntryPoint] | None = (
            None if installed is None else {point.name: point for point in installed}
        )
        self._loaded: dict[str, LogitsProcessor] = {}

    def resolve(self, names: Sequence[str]) -> tuple[LogitsProcessor, ...]:
        """The processors of those names. Raises InvalidRequest that lists what is installed."""
        return tuple(self._resolve(name) for name in names)

    def _resolve(self, name: str) -> LogitsProcessor:
        if (known := self._loaded.get(name)) is not None:
            return known
        if self._installed is None:
            self._installed = {point.name: point for point in entry_points(group=GROUP)}
        point = self._installed.get(name)
        if point is None:
            names = ", ".join(sorted(self._installed)) or "none"
            raise InvalidRequest(
                f"there is no logits processor {name!r}; installed: {names}",
                param="logits_processors",
            )
        try:
            processor: LogitsProcessor = point.load()
        except Exception as error:  # the plug-in's own code: anything may happen
            raise InvalidRequest(
                f"logits processor {name!r} ({point.value}) cannot be imported: {error!r}",
                param="logits_processors",
            ) from error
        self._loaded[name] = processor
        return processor


def apply_processors(rows: Iterable[ProcessedRow], logits: NDArray[np.float32]) -> None:
    """Run each row's processors. One that raises fails its own request: its row becomes NaN."""
    for row in rows:
        try:
            for processor in row.processors:
                processor(row.token_ids, logits[row.logits_row])
        except Exception:  # the plug-in's own code: anything may happen
            logger.exception("A logits processor failed; its request ends with an error")
            logits[row.logits_row] = np.nan


def failing_processor(token_ids: NDArray[np.int32], logits: NDArray[np.float32], /) -> None:
    """Stands where a processor could not be had: the request fails instead of ignoring the
    parameter."""
    logits[:] = np.nan
