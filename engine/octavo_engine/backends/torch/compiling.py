"""What Triton compiles: who is notified, and the steps that make it compile all it can at once."""

from __future__ import annotations

import importlib
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from octavo_engine.backends.backend import BackendStep
from octavo_engine.backends.torch.adapter_tiles import FEW_TOKENS
from octavo_engine.config import BLOCK_SIZE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from octavo_engine.backends.backend import BackendLimits, CompileListener

# Beyond each of these numbers of rows products are cut in another way (`triton/gemv.py`,
# `triton/splits.py`, `triton/grouped.py`).
ROW_CLASSES = (1, 16, 32, 64, 128)


class WarmUpStep(NamedTuple):
    """So many sequences of as many tokens each. `is_long`: as if others had whole contexts."""

    num_seqs: int
    num_tokens: int
    is_long: bool
    has_adapters: bool = False


def warm_up_steps(
    limits: BackendLimits, *other_tokens: int, few_tokens: int = 0
) -> Iterator[WarmUpStep]:
    """A step for each way in which kernels are cut. `other_tokens`: of so many on a model's kernels
    are cut in yet another way; 0: they are not. Up to `few_tokens` of a sequence are attended as
    single ones are, so steps like prompts have more."""
    few_rows = [1, *(rows + 1 for rows in ROW_CLASSES)]
    for num_seqs in few_rows:
        if num_seqs <= limits.max_seqs and num_seqs <= limits.max_tokens:
            yield WarmUpStep(num_seqs, 1, is_long=False)
    yield WarmUpStep(1, 1, is_long=True)  # few programs: a long walk is split
    most = min(limits.max_tokens, limits.max_model_len)
    as_prompt = max(2, few_tokens + 1)
    for num_tokens in sorted({*few_rows[1:], *other_tokens, as_prompt} - {0}):
        if num_tokens <= most:
            yield WarmUpStep(1, num_tokens, is_long=False)
    if as_prompt <= most:
        yield WarmUpStep(1, as_prompt, is_long=True)


def adapted_steps(limits: BackendLimits) -> Iterator[WarmUpStep]:
    """A step for each way in which the products of adapters are cut."""
    yield WarmUpStep(1, 1, is_long=False, has_adapters=True)
    many = FEW_TOKENS + 1
    if limits.max_seqs >= many:
        yield WarmUpStep(many, 1, is_long=False, has_adapters=True)
    elif min(limits.max_tokens, limits.max_model_len) >= many:
        yield WarmUpStep(1, many, is_long=False, has_adapters=True)
    elif limits.max_tokens >= many:  # of several short sequences
        yield WarmUpStep(-(-many // limits.max_model_len), limits.max_model_len, False, True)


def step_of(shape: WarmUpStep, num_groups: int = 1) -> BackendStep:
    """Of so many groups of layers. Its tokens are written nowhere, and what they read is of no
    matter."""
    seqs, count = shape.num_seqs, shape.num_tokens
    starts = np.arange(seqs + 1, dtype=np.int32) * count
    positions = np.tile(np.arange(count, dtype=np.int32), seqs)
    width = -(-count // BLOCK_SIZE)
    return BackendStep(
        token_ids=np.zeros(seqs * count, np.int32),
        positions=positions,
        slots=np.full((num_groups, seqs * count), -1, np.int32),
        seq_starts=starts,
        seq_lens=np.full(seqs, count, np.int32),
        rows=np.zeros(seqs, np.int32),
        block_tables=np.zeros((num_groups, 1, width), np.int32),
        logit_rows=starts[1:] - 1,
        copies=np.zeros((0, 3), np.int32),
        adapters=np.zeros(seqs, np.int32) if shape.has_adapters else None,
    )


@contextmanager
def compiling_side_by_side() -> Iterator[bool]:
    """Kernels that are launched meanwhile are not run but compiled, as many at once as there are
    processors, and have been when this ends. False: this Triton cannot."""
    try:
        mode = importlib.import_module("triton.runtime._async_compile").AsyncCompileMode
        kernel = importlib.import_module("triton.runtime.jit").JITFunction
    except (ImportError, AttributeError):  # since 3.5
        yield False
        return
    run = kernel.run

    def compile_only(self: Any, *args: Any, warmup: bool, **kwargs: Any) -> Any:
        return run(self, *args, warmup=True, **kwargs)

    kernel.run = compile_only
    try:
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool, mode(pool):
            yield True
    finally:
        kernel.run = run


class CompileHooks:
    """Triton's own, which are the process's; what was there before is called too."""

    def __init__(self, listener: CompileListener) -> None:
        self._listener = listener
        self._owner, self._names = _find_hooks()
        self._before = [getattr(self._owner, name) for name in self._names]
        for name, hook in zip(self._names, (self._begins, self._ends), strict=True):
            setattr(self._owner, name, hook)

    def remove(self) -> None:
        for name, before in zip(self._names, self._before, strict=True):
            setattr(self._owner, name, before)

    def _begins(self, *args: Any, **kwargs: Any) -> Any:
        self._listener.compile_begins()
        before = self._before[0]
        return None if before is None else before(*args, **kwargs)

    def _ends(self, *args: Any, **kwargs: Any) -> Any:
        self._listener.compile_ends()
        before = self._before[1]
        return None if before is None else before(*args, **kwargs)


def _find_hooks() -> tuple[Any, tuple[str, str]]:
    """They have moved in Triton 3.4."""
    try:
        runtime = importlib.import_module("triton.knobs").runtime
    except ImportError:
        owner = importlib.import_module("triton.runtime.jit").JITFunction
        return owner, ("cache_hook", "compiled_hook")
    return runtime, ("jit_cache_hook", "jit_post_compile_hook")
