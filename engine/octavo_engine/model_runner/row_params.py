"""What the runner knows of the request in each row, beside its arrays: only unusual parameters."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from octavo_engine.errors import InvalidRequest
from octavo_engine.sampling.adjust import Adjustments
from octavo_engine.sampling.processors import ProcessorRegistry, failing_processor
from octavo_engine.sampling.transcript import TranscriptProcessor

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from octavo_engine.sampling.processors import LogitsProcessor
    from octavo_engine.state.request import EngineRequest

T = TypeVar("T")

logger = logging.getLogger(__name__)


class RowParams:
    """Rows that want more than the sampling table says. A plain request appears nowhere here.

    NOTE: rows are not reported when they fall vacant; an entry lives until its row is filled again,
    and is not looked at until then, since only rows of the batch are.
    """

    def __init__(self, processors: ProcessorRegistry | None = None) -> None:
        self.registry = processors or ProcessorRegistry()
        self.adjustments: dict[int, Adjustments] = {}
        self.processors: dict[int, tuple[LogitsProcessor, ...]] = {}
        self.logprobs: dict[int, int] = {}
        self.logprob_ids: dict[int, NDArray[np.int32]] = {}  # where the request names the tokens
        self.prompt_logprobs: dict[int, int] = {}

    def fill(self, row: int, request: EngineRequest) -> None:
        """Forget the row's former owner and note what its new one wants."""
        params = request.params
        _put(self.adjustments, row, Adjustments.of(request))
        _put(self.processors, row, self._resolve(request))
        _put(self.logprobs, row, params.logprobs)
        ids = params.logprob_token_ids
        _put(self.logprob_ids, row, np.array(ids, np.int32) if ids else None)
        _put(self.prompt_logprobs, row, params.prompt_logprobs)

    def _resolve(self, request: EngineRequest) -> tuple[LogitsProcessor, ...] | None:
        names = request.params.logits_processors
        rules = None if request.audio is None else request.audio.rules
        if not names and rules is None:
            return None
        of_audio: tuple[LogitsProcessor, ...] = ()
        if rules is not None:
            of_audio = (TranscriptProcessor(rules, len(request.prompt_token_ids)),)
        try:
            return (*of_audio, *self.registry.resolve(names))
        except InvalidRequest as error:  # refused at the door as a rule; here the step must go on
            logger.warning(
                "Request has no such logits processor",
                extra={"request_id": request.request_id, "error": error.message},
            )
            return (failing_processor,)


def _put(entries: dict[int, T], row: int, value: T | None) -> None:
    if value is None:
        entries.pop(row, None)
    else:
        entries[row] = value
