"""A head with layers of its own, on the CPU: a program for its first pass, one for the others."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import numpy as np

from octavo_engine.backends.draft_part import LaterLayers
from octavo_engine.backends.native.loader import NativeLoader
from octavo_engine.backends.spread import spread
from octavo_engine.models.draft_head import build_draft_head
from octavo_engine.ops import STATE

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from numpy.typing import NDArray

    from octavo_engine import _native
    from octavo_engine.backends.backend import BackendLimits, BackendStep
    from octavo_engine.backends.draft_part import DraftHeadPart
    from octavo_engine.backends.native.emit import CompiledProgram
    from octavo_engine.backends.native.graph import Dtype, Value
    from octavo_engine.backends.native.recorder import Recorder
    from octavo_engine.ops import DraftOps, Model

    Compile = Callable[
        [Callable[[Recorder], Value], BackendLimits, Collection[str]], CompiledProgram
    ]


class NativeDraftHead:
    """A DraftHead in csrc."""

    def __init__(
        self,
        part: DraftHeadPart,
        model: Model,
        team: _native.Team,
        dtype: Dtype,
        max_model_len: int,
    ) -> None:
        self.part = part
        loader = NativeLoader(part.checkpoint, team, dtype, quantization=part.quantization)
        self._head = build_draft_head(part.config, loader, model, max_model_len)
        loader.finish()
        self._programs: dict[bool, CompiledProgram] = {}

    def prepare(self, compile_: Compile, first: BackendLimits, others: BackendLimits) -> None:
        """For steps of these sizes. Raises MemoryError."""
        layer = len(self.part.config.model.caches())

        def ops_of(recorder: Recorder) -> DraftOps:
            return cast("DraftOps", LaterLayers(recorder, layer))

        self._programs = {
            True: compile_(lambda ops: self._head.first(ops_of(ops)), first, (STATE,)),
            False: compile_(lambda ops: self._head.next(ops_of(ops)), others, (STATE,)),
        }

    def run(
        self,
        kv: _native.KVCache,
        step: BackendStep,
        states: NDArray[np.float32],
        *,
        is_first: bool,
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Logits over the model's vocabulary, valid until the next run, and copies of the head's
        states."""
        program, logits, _, kept, _ = self._programs[is_first]
        program.run(
            kv,
            *step.native_arrays,
            input_rows=np.arange(len(states), dtype=np.int32),
            inputs=states,
        )
        count = len(step.logit_rows)
        own = program.read(logits, count)
        return (
            spread(own, self.part.token_ids, self.part.vocab_size),
            program.read(kept[STATE], count).copy(),
        )
