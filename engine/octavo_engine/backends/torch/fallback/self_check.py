"""Whether a model computed in chunks of a paged cache is the model that transformers computes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from octavo_engine.backends.backend import BackendLimits, BackendStep
from octavo_engine.backends.torch.fallback.layers import PAGED
from octavo_engine.config import BLOCK_SIZE
from octavo_engine.errors import ModelError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from octavo_engine.caches import CacheLayout

_LENGTH = 24
_CUTS = (0, 10, 22, 23, 24)  # in the second chunk the other text begins, in the third it goes on
_OTHER = (0, 0, 5, 6, 6)
# Of the logits' own size, at the median token: routed experts may fall otherwise for a few.
_TOLERANCE = {torch.float32: 2e-3}
_TOLERANCE_16_BIT = 0.1


class Checkable(Protocol):
    """A backend that shows its logits."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def cache_layout(self) -> CacheLayout: ...
    def prepare(self, limits: BackendLimits, num_blocks: int) -> None: ...
    def logits(self, step: BackendStep) -> NDArray[np.float32]: ...


def check_against_eager(backend: Checkable, model: Any) -> None:
    """Raises ModelError for a model that remembers more than its keys and values, or reads
    positions from elsewhere: its text in chunks beside another is not its text as a whole."""
    rng = np.random.default_rng(0)
    texts = [rng.integers(0, backend.vocab_size, _LENGTH, dtype=np.int32) for _ in range(2)]
    groups = len(backend.cache_layout.groups)
    backend.prepare(BackendLimits(
        max_tokens=_LENGTH, max_seqs=2, max_logit_rows=_LENGTH, max_model_len=_LENGTH
    ), 5 * groups)  # fmt: skip
    found = []
    for begin, end, other, other_end in zip(_CUTS, _CUTS[1:], _OTHER, _OTHER[1:], strict=False):
        step = _step(texts, ((begin, end), (other, other_end)), groups)
        found.append(backend.logits(step)[: end - begin])
    truth = _eager(model, texts[0])
    ours = np.concatenate(found)
    size = float(np.abs(truth - truth.mean(-1, keepdims=True)).max()) or 1.0
    error = float(np.median(np.abs(ours - truth).max(axis=-1)[_CUTS[1] :])) / size
    if not error <= _TOLERANCE.get(model.dtype, _TOLERANCE_16_BIT):
        raise ModelError(
            f"{type(model).__name__} computed in chunks over a paged KV cache differs from what "
            f"transformers computes at once by {error:.2g} of the logits' size: it remembers more "
            "than keys and values, or takes positions from elsewhere, and the transformers "
            "fallback cannot serve it"
        )


def _eager(model: Any, text: NDArray[np.int32]) -> NDArray[np.float32]:
    model.set_attn_implementation("eager")
    try:
        with torch.inference_mode():
            ids = torch.from_numpy(text).long()[None].to(model.device)
            logits = model(input_ids=ids, use_cache=False).logits[0]
            array: NDArray[np.float32] = logits.float().cpu().numpy()
            return array
    finally:
        model.set_attn_implementation(PAGED)


def _step(
    texts: list[NDArray[np.int32]], spans: tuple[tuple[int, int], ...], groups: int
) -> BackendStep:
    """Blocks of group g of the first text are 5 g and 5 g + 2, those of the second 5 g + 1, + 3."""
    rows = [row for row, (begin, end) in enumerate(spans) if end > begin]
    positions = [np.arange(*spans[row], dtype=np.int32) for row in rows]
    tables = np.array(
        [[[5 * g, 5 * g + 2], [5 * g + 1, 5 * g + 3]] for g in range(groups)], np.int32
    )
    slots = np.concatenate(
        [
            tables[:, row][:, at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE
            for row, at in zip(rows, positions, strict=True)
        ],
        axis=1,
    )
    token_ids = [texts[row][at] for row, at in zip(rows, positions, strict=True)]
    counts = [len(at) for at in positions]
    return BackendStep(
        token_ids=np.concatenate(token_ids),
        positions=np.concatenate(positions),
        slots=slots.astype(np.int32),
        seq_starts=np.cumsum([0, *counts]).astype(np.int32),
        seq_lens=np.array([spans[row][1] for row in rows], np.int32),
        rows=np.array(rows, np.int32),
        block_tables=tables,
        logit_rows=np.arange(sum(counts), dtype=np.int32),
        copies=np.zeros((0, 3), np.int32),
    )
