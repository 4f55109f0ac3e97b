"""Heads that draft, on the CPU: a program for each, over hidden states that a step left."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from octavo_engine import _native
from octavo_engine.backends.backend import BackendLimits
from octavo_engine.backends.head_files import build_heads
from octavo_engine.backends.native.compiled import compile_forward
from octavo_engine.backends.native.loader import NativeLoader
from octavo_engine.ops import STATE

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from octavo_engine.backends.head_files import HeadsPart
    from octavo_engine.backends.native.emit import CompiledProgram
    from octavo_engine.backends.native.graph import Dtype


class NativeHeadSet:
    """Heads in csrc."""

    def __init__(self, part: HeadsPart, team: _native.Team, dtype: Dtype) -> None:
        self.part = part
        self._team = team
        loader = NativeLoader(part.checkpoint, team, dtype, quantization=part.quantization)
        self._heads = build_heads(part, loader)
        loader.finish()
        self._programs: list[CompiledProgram] = []
        # Nothing attends: memory that is never written is none.
        self._kv = _native.KVCache(1, [(0, 0, 1, 16)], [0], "f32")

    def prepare(self, max_rows: int, *, is_fused: bool, activation_bits: int) -> None:
        """Raises MemoryError."""
        limits = BackendLimits(
            max_tokens=max_rows, max_seqs=max_rows, max_logit_rows=1, max_model_len=1
        )

        def compiled(head: int) -> CompiledProgram:
            return compile_forward(
                lambda ops: self._heads.forward(ops, head),
                self._team,
                limits,
                is_fused=is_fused,
                activation_bits=activation_bits,
                keep=(STATE,),
            )

        self._programs = [compiled(head) for head in range(self._heads.num_heads)]

    def logits(
        self, head: int, states: NDArray[np.float32], tokens: NDArray[np.int32]
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Over the model's vocabulary, and the states of the next head; valid until the head runs
        again."""
        program, logits, _, kept, _ = self._programs[head]
        count = len(states)
        nothing, ramp = np.zeros(count, np.int32), np.arange(count + 1, dtype=np.int32)
        program.run(
            self._kv,
            tokens,
            nothing,
            nothing[None],
            ramp,
            np.ones(count, np.int32),
            nothing,
            np.zeros((1, 1, 1), np.int32),
            nothing[:0],
            input_rows=ramp[:-1],
            inputs=states,
        )
        following = program.read(kept[STATE], count) if STATE in kept else states
        return self.part.spread(program.read(logits, count)), following
