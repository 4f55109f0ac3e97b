"""What a served model would have computed behind each token, of its own weights."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.speculation.answers import MAX_LEN
from octavo_engine.backends.backend import BackendLimits, BackendStep
from octavo_engine.backends.dequantize import to_float32
from octavo_engine.backends.draft_files import open_weights
from octavo_engine.backends.draft_part import DraftHeadPart
from octavo_engine.backends.head_files import HeadsPart
from octavo_engine.backends.native.backend import NativeBackend
from octavo_engine.config import BLOCK_SIZE, EngineConfig
from octavo_engine.models.config import ModelConfig
from octavo_engine.models.draft_head import DraftHeadConfig
from octavo_engine.models.medusa import MedusaConfig
from octavo_engine.weights.dummy import DummyCheckpoint
from octavo_engine.weights.source import resolve_model

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from benchmarks.speculation.answers import Answer


class ModelStates:
    """A model, and what of its states is kept: the last ones, normed, or those behind so many
    layers side by side."""

    def __init__(
        self,
        model: str,
        *,
        kept_layers: Callable[[int], Sequence[int]] | None = None,
        num_threads: int | None = None,
        activation_bits: int = 16,
    ) -> None:
        """`kept_layers`: behind which layers, of so many."""
        settings = EngineConfig(model=model, device="cpu")
        files = resolve_model(model)
        self.config = ModelConfig.from_hf(files.config)
        self.checkpoint = open_weights(settings, self.config, files)
        kept = () if kept_layers is None else kept_layers(self.config.num_layers)
        # Heads that nothing asks: the backend keeps what they would read.
        self._backend = NativeBackend(
            self.config,
            self.checkpoint,
            max_model_len=MAX_LEN,
            num_threads=num_threads,
            activation_bits=activation_bits,
            heads=None if kept else _no_heads(self.config),
            draft_head=_no_draft_head(self.config, kept) if kept else None,
        )
        limits = BackendLimits(
            max_tokens=MAX_LEN, max_seqs=1, max_logit_rows=MAX_LEN, max_model_len=MAX_LEN
        )
        self._num_groups = len(self._backend.cache_layout.groups)
        self._backend.prepare(limits, self._num_groups * MAX_LEN // BLOCK_SIZE)

    def hidden(self, answer: Answer) -> NDArray[np.float32]:
        """Of each token that the model wrote the state that it was sampled from."""
        logits = self._run(answer)
        return self._backend.hidden_rows(np.arange(len(logits), dtype=np.int32))

    def layers(self, answer: Answer) -> NDArray[np.float32]:
        """The kept states of all tokens but the last."""
        self._run(answer, all_logits=False)
        return self._backend.token_states(np.arange(len(answer.token_ids) - 1, dtype=np.int32))

    def _run(self, answer: Answer, *, all_logits: bool = True) -> NDArray[np.float32]:
        """Logits at the places where the model wrote; or of the last one."""
        count = len(answer.token_ids) - 1
        positions = np.arange(count, dtype=np.int32)
        first = np.arange(self._num_groups, dtype=np.int32) * (MAX_LEN // BLOCK_SIZE)
        blocks = np.arange(MAX_LEN // BLOCK_SIZE, dtype=np.int32)
        step = BackendStep(
            token_ids=np.array(answer.token_ids[:-1], np.int32),
            positions=positions,
            slots=first[:, None] * BLOCK_SIZE + positions,
            seq_starts=np.array([0, count], np.int32),
            seq_lens=np.array([count], np.int32),
            rows=np.zeros(1, np.int32),
            block_tables=(first[:, None] + blocks)[:, None],
            logit_rows=positions[answer.num_prompt_tokens - 1 if all_logits else -1 :],
            copies=np.zeros((0, 3), np.int32),
        )
        return self._backend.logits(step)

    def read(self, name: str, *shape: int) -> NDArray[np.float32]:
        """A tensor of the model."""
        return to_float32(self.checkpoint.read(name, shape)).reshape(shape)

    def output_rows(self, token_ids: NDArray[np.int64]) -> NDArray[np.float32]:
        """Of the model's own output matrix."""
        name = "embed_tokens" if self.config.tie_word_embeddings else "lm_head"
        prefix = "model." if self.config.tie_word_embeddings else ""
        shape = (self.config.vocab_size, self.config.hidden_size)
        return self.read(f"{prefix}{name}.weight", *shape)[token_ids]

    def close(self) -> None:
        self._backend.close()


def _no_heads(config: ModelConfig) -> HeadsPart:
    sizes = {"hidden_size": config.hidden_size, "vocab_size": config.vocab_size}
    return HeadsPart(MedusaConfig.from_hf(sizes), DummyCheckpoint(), 0)


def _no_draft_head(config: ModelConfig, kept: Sequence[int]) -> DraftHeadPart:
    head = DraftHeadConfig(
        kind="eagle3",
        layers=dataclasses.replace(config, layers=config.layers[-1:]),
        model=config,
        kept=tuple(kept),
        num_tokens=config.vocab_size,
    )
    return DraftHeadPart(head, DummyCheckpoint())
