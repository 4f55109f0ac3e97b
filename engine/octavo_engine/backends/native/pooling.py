"""Models that pool on the CPU: whole texts without padding, a step as a few calls into csrc.

Keys and values live only as long as a layer's attention, so all layers share one, which is laid out
like a KV cache in which each text's blocks follow the ones of the text before.

A layer writes what the next one reads. Of a few hundred tokens that stays in a core's own cache,
of thousands it goes through memory that all cores share; weights are small beside either. So texts
go through all layers some at a time.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from octavo_engine import _native
from octavo_engine.backends.backend import BackendLimits
from octavo_engine.backends.native.backend import HEAD_DIM_MULTIPLE
from octavo_engine.backends.native.compiled import compile_forward
from octavo_engine.backends.native.loader import NativeLoader
from octavo_engine.backends.native.placement import make_team
from octavo_engine.config import BLOCK_SIZE
from octavo_engine.errors import ConfigError, ModelError
from octavo_engine.models.config import ModelConfig
from octavo_engine.models.pooled import PooledModel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from octavo_engine.backends.native.emit import CompiledProgram
    from octavo_engine.backends.native.graph import Dtype, Value
    from octavo_engine.backends.native.recorder import Recorder
    from octavo_engine.backends.pooling import PoolingStep
    from octavo_engine.config import Quantization
    from octavo_engine.models.pooling_config import PoolingConfig
    from octavo_engine.weights.checkpoint import Checkpoint


# Tokens that go through the layers at once: so many for each thread, but enough that weights, which
# are read once for them, cost little.
TOKENS_PER_THREAD = 256
MIN_TOKENS = 512


class _Loaded(NamedTuple):
    """What `close` lets go of: threads and weights."""

    team: _native.Team
    model: PooledModel


class NativePoolingBackend:
    """Packed weights, room for one layer's keys and values, and a program in csrc."""

    def __init__(
        self,
        config: PoolingConfig,
        checkpoint: Checkpoint,
        *,
        max_model_len: int,
        dtype: Dtype,
        quantization: Quantization = "auto",
        activation_bits: int = 16,
        num_threads: int | None = None,
        isa: str = "",
        is_fused: bool = True,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        if config.page.head_dim % HEAD_DIM_MULTIPLE:
            raise ModelError(
                f"config.json: heads must have a multiple of {HEAD_DIM_MULTIPLE} columns on this "
                f"device; they have {config.page.head_dim}; --device torch takes it"
            )
        self.config = config
        self.dtype = dtype
        self._max_model_len = max_model_len
        self._is_fused = is_fused  # tests compare both
        self._activation_bits = activation_bits
        team = make_team(num_threads, isa)
        self.isa = team.isa
        loader = NativeLoader(checkpoint, team, dtype, progress, quantization=quantization)
        self._loaded: _Loaded | None = _Loaded(team, PooledModel(config, loader, max_model_len))
        loader.finish()
        if activation_bits == 8:
            loader.check_integers()
        # Attention in the type of the products around it.
        is_wide = dtype == "f32" and activation_bits != 8
        self._kv_format = "f32" if is_wide else "bf16"
        self._tokens_at_once = max(TOKENS_PER_THREAD * team.num_threads, MIN_TOKENS)
        self._limits: BackendLimits | None = None
        self._pooled: CompiledProgram | None = None
        self._tokens: CompiledProgram | None = None  # once it was requested
        self._kv: _native.KVCache | None = None

    @property
    def name(self) -> str:
        return f"native/{self.isa}"

    def prepare(self, *, max_tokens: int, max_texts: int) -> None:
        max_tokens = min(max_tokens, max(self._tokens_at_once, self._max_model_len))
        self._limits = BackendLimits(
            max_tokens=max_tokens,
            max_seqs=max_texts,
            max_logit_rows=max_texts,
            max_model_len=self._max_model_len,
        )
        body = self.config.page
        num_kv_heads = body.num_kv_heads if isinstance(body, ModelConfig) else body.num_heads
        num_blocks = max_tokens // BLOCK_SIZE + max_texts  # each text's last one is partly filled
        self._pooled = self._compile(self._in_memory.model.forward)
        try:
            self._kv = _native.KVCache(
                num_blocks, [(0, 0, num_kv_heads, body.head_dim)], [0], self._kv_format
            )
        except MemoryError as error:
            raise ConfigError(
                f"no memory for steps of {max_tokens} tokens; lower --max-num-batched-tokens"
            ) from error

    def pool(self, step: PoolingStep) -> NDArray[np.float32]:
        assert self._pooled is not None, "prepare() comes first"
        return self._run(self._pooled, step, is_per_token=False)

    def token_rows(self, step: PoolingStep) -> NDArray[np.float32]:
        if self._tokens is None:
            self._tokens = self._compile(self._in_memory.model.forward_tokens)
        return self._run(self._tokens, step, is_per_token=True)

    def close(self) -> None:
        self._pooled = self._tokens = None
        self._kv = None
        self._loaded = None

    @property
    def _in_memory(self) -> _Loaded:
        assert self._loaded is not None, "the backend was closed"
        return self._loaded

    def _compile(self, forward: Callable[[Recorder], Value]) -> CompiledProgram:
        assert self._limits is not None, "prepare() comes first"
        try:
            return compile_forward(
                forward,
                self._in_memory.team,
                self._limits,
                is_fused=self._is_fused,
                activation_bits=self._activation_bits,
            )
        except MemoryError as error:
            raise ConfigError(
                f"no memory for steps of {self._limits.max_tokens} tokens; "
                "lower --max-num-batched-tokens"
            ) from error

    def _run(
        self, compiled: CompiledProgram, step: PoolingStep, *, is_per_token: bool
    ) -> NDArray[np.float32]:
        parts = []
        for part in parts_of(step, self._tokens_at_once):
            self._run_part(compiled, part)
            count = len(part.token_ids) if is_per_token else len(part.pooled_rows)
            parts.append(compiled.program.read(compiled.logits, count).copy())
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _run_part(self, compiled: CompiledProgram, step: PoolingStep) -> None:
        assert self._kv is not None
        places = _places(step)
        compiled.program.run(
            self._kv,
            step.token_ids,
            step.positions,
            places.slots,
            step.starts,
            places.lengths,
            places.rows,
            places.tables,
            step.pooled_rows,
            step.type_ids,
        )


def parts_of(step: PoolingStep, max_tokens: int) -> Iterator[PoolingStep]:
    """Neighbouring texts of so many tokens; a longer text goes alone."""
    starts = step.starts.tolist()
    first = 0
    for text in range(1, len(starts)):
        is_last = text == len(starts) - 1
        if not is_last and starts[text + 1] - starts[first] <= max_tokens:
            continue
        tokens = slice(starts[first], starts[text])
        yield replace(
            step,
            token_ids=step.token_ids[tokens],
            type_ids=step.type_ids[tokens],
            positions=step.positions[tokens],
            starts=step.starts[first : text + 1] - np.int32(starts[first]),
            pooled_rows=step.pooled_rows[first:text] - np.int32(starts[first]),
        )
        first = text


class _Places(NamedTuple):
    """Where the step's keys and values go."""

    slots: NDArray[np.int32]
    lengths: NDArray[np.int32]
    rows: NDArray[np.int32]
    tables: NDArray[np.int32]


def _places(step: PoolingStep) -> _Places:
    lengths = np.diff(step.starts)
    num_blocks = -(-lengths // BLOCK_SIZE)
    first_blocks = np.cumsum(num_blocks) - num_blocks
    slots = np.repeat(first_blocks * BLOCK_SIZE, lengths) + step.positions
    # Columns beyond a text's own blocks name the next text's, and are never read.
    last = int(num_blocks.sum()) - 1
    columns = np.arange(int(num_blocks.max(initial=1)))
    tables = np.minimum(first_blocks[:, None] + columns, last)
    return _Places(
        slots.astype(np.int32)[None],
        lengths.astype(np.int32),
        np.arange(len(lengths), dtype=np.int32),
        np.ascontiguousarray(tables, np.int32)[None],
    )
