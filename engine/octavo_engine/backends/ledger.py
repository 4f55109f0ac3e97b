"""The account of a checkpoint's tensors while a model takes them: taken, missing, left over."""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING

from octavo_engine.errors import ModelError
from octavo_engine.weights.dummy import DummyCheckpoint

if TYPE_CHECKING:
    from collections.abc import Callable

    from octavo_engine.weights.checkpoint import Checkpoint, StoredTensor

logger = logging.getLogger(__name__)

MAX_NAMES_IN_ERROR = 20
# Computed, not learned, or of training only; some exporters store them all the same.
_HARMLESS = re.compile(
    r"rotary_emb\.inv_freq$|rope_freqs|\.masked_bias$|\.(?:attn|attention)\.bias$|num_batches"
    r"|^embeddings\.position_ids$|^pooler\.dense\.|^cls\.|^vocab_"
)


class WeightLedger:
    """Hands out stored tensors by name. Behind every Loader."""

    def __init__(
        self, checkpoint: Checkpoint, progress: Callable[[int, int], None] | None = None
    ) -> None:
        self._checkpoint = checkpoint
        self._progress = progress
        self._is_dummy = isinstance(checkpoint, DummyCheckpoint)  # has whatever is requested
        self._names = frozenset(checkpoint.names())
        self._taken: set[str] = set()
        self._missing: list[str] = []
        self._done_bytes = 0

    @property
    def is_complete(self) -> bool:
        """Whether nothing was missing so far; once something is, packing the rest is lost time."""
        return not self._missing

    def has(self, name: str) -> bool:
        """Whether the checkpoint holds a tensor of this name."""
        return name in self._names

    def take(self, name: str, shape: tuple[int, ...]) -> StoredTensor | None:
        """The tensor; None if there is none, which `finish` will report with all the others."""
        if name not in self._names and not self._is_dummy:
            self._missing.append(name)
            return None
        stored = self._checkpoint.read(name, shape)
        self._taken.add(name)
        return stored

    def leave(self, name: str) -> None:
        """The tensor is used, but not here."""
        if name not in self._names and not self._is_dummy:
            self._missing.append(name)
        self._taken.add(name)

    def account(self, stored: StoredTensor) -> None:
        """The tensor's bytes are in place."""
        self._done_bytes += stored.data.nbytes
        if self._progress is not None:
            self._progress(self._done_bytes, max(self._done_bytes, self._checkpoint.total_bytes))

    def finish(self) -> None:
        """Raises ModelError that lists what was missing; logs the tensors that were not taken."""
        if self._missing:
            raise ModelError(
                f"the checkpoint lacks {_counted(self._missing)} that config.json asks for: "
                f"{_listed(self._missing)}; is it the checkpoint of another model?"
            )
        unused = sorted(n for n in self._names - self._taken if not _HARMLESS.search(n))
        if unused:
            logger.warning(
                "Ignored %s of the checkpoint that the model does not use: %s",
                _counted(unused),
                _listed(unused),
            )
        if self._progress is not None:
            total = max(self._done_bytes, self._checkpoint.total_bytes)
            self._progress(total, total)


def _counted(names: list[str]) -> str:
    return f"{len(names)} tensor{'s' if len(names) != 1 else ''}"


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:MAX_NAMES_IN_ERROR])
    rest = len(names) - MAX_NAMES_IN_ERROR
    return f"{shown} and {rest} more" if rest > 0 else shown
