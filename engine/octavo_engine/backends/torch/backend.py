"""The torch backend: a model executed at once, operation by operation."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import numpy as np
import torch

from octavo_engine.backends.adapters import in_float32, match_sites
from octavo_engine.backends.alignment import aligned_attention
from octavo_engine.backends.backend import BackendStep
from octavo_engine.backends.draft_part import LaterLayers, forward_later, layout_with
from octavo_engine.backends.encoder_step import encoder_step
from octavo_engine.backends.head_files import build_heads
from octavo_engine.backends.native.shard import Shard, own_cache, own_layout
from octavo_engine.backends.sampled import sample_rows
from octavo_engine.backends.spread import spread
from octavo_engine.backends.torch.loader import TorchLoader
from octavo_engine.backends.torch.media import TorchMediaEncoder
from octavo_engine.backends.torch.precision import Precision
from octavo_engine.backends.torch.rank_group import RankGroup
from octavo_engine.backends.torch.recurrent import ReferenceRecurrentOps, TorchStates
from octavo_engine.backends.torch.reference import (
    CrossStep,
    PagedKV,
    ReferenceDraftOps,
    ReferenceOps,
    TorchPart,
    block_values,
)
from octavo_engine.backends.torch.streams import ReferenceStreamOps
from octavo_engine.models.draft_head import build_draft_head
from octavo_engine.models.registry import build_model
from octavo_engine.ops import HIDDEN, STATE, cross_queries

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from octavo_engine import _native
    from octavo_engine.backends.adapters import AdapterLimits, AdapterSite, SitePart
    from octavo_engine.backends.backend import BackendLimits
    from octavo_engine.backends.draft_part import DraftHeadPart, DraftPart
    from octavo_engine.backends.head_files import Heads, HeadsPart
    from octavo_engine.backends.media import MediaEncoder
    from octavo_engine.backends.native.shard import RankPlace
    from octavo_engine.backends.torch.reference import TorchAdapter
    from octavo_engine.models.config import ModelConfig
    from octavo_engine.models.draft_head import DraftHead
    from octavo_engine.models.vision_config import MediaConfig
    from octavo_engine.ops import CrossOps, DraftOps, EncoderDecoder, Model
    from octavo_engine.sampling.batch import Sampled, SamplingBatch
    from octavo_engine.weights.adapter import AdapterFiles
    from octavo_engine.weights.checkpoint import Checkpoint


class TorchBackend:
    """Weights and KV cache as torch tensors.

    With a `place` it is one of several ranks, each with its part of the weights and of the KV
    heads; all must be prepared for the same, and compute the same steps together.
    """

    def __init__(
        self,
        config: ModelConfig,
        checkpoint: Checkpoint,
        *,
        max_model_len: int,
        precision: Precision | None = None,
        num_threads: int | None = None,
        adapters: AdapterLimits | None = None,
        progress: Callable[[int, int], None] | None = None,
        draft: DraftPart | None = None,
        heads: HeadsPart | None = None,
        draft_head: DraftHeadPart | None = None,
        place: RankPlace | None = None,
    ) -> None:
        self.config = config
        self._shard = Shard() if place is None else place.shard
        self.ranks = (
            None if place is None else RankGroup(place, torch.device("cpu"), shares_device=True)
        )
        self.cache_layout = layout_with(config, draft, draft_head)
        self.precision = precision or Precision()
        self._num_threads = num_threads
        loader = TorchLoader(checkpoint, self.precision, progress, self.ranks)
        self._model: Model | None = build_model(config, loader, max_model_len)
        loader.finish()
        self._draft_model: Model | None = None
        if draft is not None:
            draft_loader = TorchLoader(draft.checkpoint, self.precision)
            self._draft_model = build_model(draft.config, draft_loader, max_model_len)
            draft_loader.finish()
        self._heads_part = heads
        self._heads: Heads | None = None
        if heads is not None:
            head_loader = TorchLoader(heads.checkpoint, self.precision)
            self._heads = build_heads(heads, head_loader)
            head_loader.finish()
        self._hidden: Tensor | None = None  # of the last step's rows of logits
        self._draft_head_part = draft_head
        self._draft_head: DraftHead | None = None
        if draft_head is not None:
            head_loader = TorchLoader(draft_head.checkpoint, self.precision)
            self._draft_head = build_draft_head(
                draft_head.config, head_loader, self._model, max_model_len
            )
            head_loader.finish()
        self._token_states: Tensor | None = None  # of the last step's tokens
        self._sites = loader.sites
        self._adapters: dict[int, TorchAdapter] = {}  # by slot
        self.media: MediaEncoder | None = None
        self._kv: PagedKV | None = None
        self._states: TorchStates | None = None
        self._team: _native.Team | None = None
        self._memory: Tensor | None = None  # of audio: see CrossStep
        self._aligned_heads: tuple[tuple[int, int], ...] = ()
        self._cross_queries: dict[int, Tensor] = {}  # of the last step, by layer

    @property
    def name(self) -> str:
        return f"torch/{self.precision.storage or self.precision.dtype}".replace("torch.", "")

    @property
    def isa(self) -> str:
        return "torch"

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def kv_bytes_per_block(self) -> int:
        """Of all ranks together."""
        itemsize, heads = self.precision.dtype.itemsize, self.config.num_heads
        return self.cache_layout.page_bytes(
            lambda spec: sum(
                block_values(own_cache(spec, heads, shard)) * itemsize
                for shard in self._shard.all()
            )
        )

    def kv_memory(self, limits: BackendLimits, fraction: float | None) -> int | None:
        return None

    def prepare(self, limits: BackendLimits, num_blocks: int) -> None:
        if self.ranks is not None:
            self.ranks.connect()
        layout = own_layout(self.cache_layout, self.config.num_heads, self._shard)
        self._kv = PagedKV(layout, num_blocks, self.precision.dtype)
        if self.cache_layout.states:
            self._states = TorchStates(
                self.cache_layout, limits.num_state_slots, self.precision.dtype
            )

    def load_media(self, config: MediaConfig, checkpoint: Checkpoint) -> None:
        self.media = TorchMediaEncoder(config, checkpoint, self.precision)

    def execute(self, step: BackendStep, sampling: SamplingBatch) -> Sampled:
        return self._sample(self.logits(step), sampling)

    def follow(self, step: BackendStep) -> None:
        """As `RankBackend`."""
        self.logits(step)

    @property
    def has_draft(self) -> bool:
        return self._draft_model is not None

    def draft(self, step: BackendStep, sampling: SamplingBatch) -> Sampled:
        assert self._draft_model is not None and self._kv is not None, "made without a draft"
        with torch.inference_mode():
            ops = ReferenceOps(step, self._kv, self.precision)
            logits = forward_later(self._draft_model, ops, len(self.config.caches()))
        return self._sample(np.ascontiguousarray(logits.float().numpy()), sampling)

    @property
    def has_draft_head(self) -> bool:
        return self._draft_head is not None

    def token_states(self, tokens: NDArray[np.int32]) -> NDArray[np.float32]:
        assert self._token_states is not None, "no step was computed"
        return self._token_states[torch.from_numpy(tokens).long()].float().numpy()

    def draft_from(
        self,
        step: BackendStep,
        states: NDArray[np.float32],
        sampling: SamplingBatch,
        *,
        is_first: bool,
    ) -> tuple[Sampled, NDArray[np.float32]]:
        head, part = self._draft_head, self._draft_head_part
        assert head is not None and part is not None and self._kv is not None, "made without a head"
        with torch.inference_mode():
            reference = ReferenceDraftOps(step, self._kv, self.precision, states)
            ops = cast("DraftOps", LaterLayers(reference, len(self.config.caches())))
            logits = head.first(ops) if is_first else head.next(ops)
            own = reference.kept[STATE].float().numpy()
        found = np.ascontiguousarray(logits.float().numpy())
        return self._sample(spread(found, part.token_ids, part.vocab_size), sampling), own

    @property
    def num_heads(self) -> int:
        return 0 if self._heads is None else self._heads.num_heads

    def hidden_rows(self, logit_rows: NDArray[np.int32]) -> NDArray[np.float32]:
        assert self._hidden is not None, "no step was computed"
        return self._hidden[torch.from_numpy(logit_rows).long()].float().numpy()

    def draft_head(
        self,
        head: int,
        states: NDArray[np.float32],
        tokens: NDArray[np.int32],
        sampling: SamplingBatch,
    ) -> tuple[Sampled, NDArray[np.float32]]:
        assert self._heads is not None and self._heads_part is not None, "made without heads"
        assert self._kv is not None, "prepare() comes first"
        with torch.inference_mode():
            ops = ReferenceDraftOps(_rows_step(tokens), self._kv, self.precision, states)
            logits = self._heads.forward(cast("DraftOps", ops), head)
            following = ops.kept[STATE].float().numpy() if STATE in ops.kept else states
        whole = self._heads_part.spread(np.ascontiguousarray(logits.float().numpy()))
        return self._sample(whole, sampling), following

    def _sample(self, logits: NDArray[np.float32], sampling: SamplingBatch) -> Sampled:
        from octavo_engine import _native

        if self._team is None:
            self._team = _native.Team(self._num_threads or _native.available_cores())
        return sample_rows(self._team, logits, sampling)

    def logits(self, step: BackendStep) -> NDArray[np.float32]:
        """Compute the step; the logits of the wanted rows, [S, vocabulary]."""
        assert self._model is not None and self._kv is not None, "prepare() comes first"
        with torch.inference_mode():
            for source, target, num_tokens in step.copies.tolist():
                self._kv.copy(source, target, num_tokens)
            cross = None
            if self._memory is not None and step.audio_slots is not None:
                cross = CrossStep(self._memory, step.audio_slots.tolist())
                ops = ReferenceOps(step, self._kv, self.precision, self._adapters, cross)
                layers = {layer for layer, _ in self._aligned_heads}
                ops.wanted = [cross_queries(layer) for layer in layers]
            else:
                ops = self._ops(step, self._kv)
            if not len(step.token_ids):
                return np.empty((0, self.vocab_size), np.float32)
            head = self._draft_head_part
            if head is not None:
                ops.wanted = head.config.kept_names
            logits = self._model.forward(ops)
            self._hidden = ops.kept.get(HIDDEN)
            self._cross_queries = {
                layer: ops.kept[cross_queries(layer)]
                for layer, _ in self._aligned_heads
                if cross is not None
            }
            if head is not None:
                self._token_states = torch.cat([ops.kept[name] for name in ops.wanted], dim=-1)
            return np.ascontiguousarray(logits.float().numpy())

    def _ops(self, step: BackendStep, kv: PagedKV) -> ReferenceOps:
        if self._states is None or step.states is None:
            return ReferenceStreamOps(step, kv, self.precision, self._adapters, ranks=self.ranks)
        self._states.copy(step.states.copies.tolist())
        return ReferenceRecurrentOps(step, kv, self._states, self.precision, self._adapters)

    def pack_adapter(self, files: AdapterFiles) -> TorchAdapter:
        found = match_sites(files, self.config, self._sites)
        return {
            number: [self._part(self._sites[number], part) for part in parts]
            for number, parts in in_float32(found).items()
        }

    def _part(self, site: AdapterSite, part: SitePart) -> TorchPart:
        first = sum(site.sizes[: part.part])
        down, up = (
            self.precision.stored(torch.from_numpy(half.copy()).to(self.precision.dtype))
            for half in (part.down, part.up)
        )
        return TorchPart(slice(first, first + site.sizes[part.part]), down, up, part.scale)

    def set_adapter(self, slot: int, packed: TorchAdapter | None) -> None:
        self._adapters.pop(slot, None)
        if packed is not None:
            self._adapters[slot] = packed

    @property
    def feature_shape(self) -> tuple[int, int] | None:
        speech = self.config.speech
        return None if speech is None else (speech.num_rows, speech.feature_columns)

    @property
    def audio_slot_bytes(self) -> int:
        speech = self.config.speech
        if speech is None:
            return 0
        values = 2 * self.config.num_layers * speech.num_rows * self.config.hidden_size
        return values * self.precision.dtype.itemsize

    def prepare_audio(self, num_slots: int) -> None:
        config, speech = self.config, self.config.speech
        assert speech is not None, "the model reads audio"
        shape = (config.num_layers, 2, num_slots, speech.num_rows)
        self._memory = torch.zeros(
            (*shape, config.num_heads, config.head_dim), dtype=self.precision.dtype
        )

    def encode_audio(
        self, slot: int, features: NDArray[np.float32], part: int, num_parts: int
    ) -> None:
        if part < num_parts - 1:
            return  # all of it is done at once
        assert self._kv is not None and self._memory is not None
        values = torch.from_numpy(features.copy()).to(self.precision.dtype)
        cross = CrossStep(self._memory, [slot], values)
        with torch.inference_mode():
            ops = ReferenceOps(encoder_step(len(features)), self._kv, self.precision, cross=cross)
            cast("EncoderDecoder", self._model).encode(cast("CrossOps", ops))

    def align_by(self, heads: Sequence[tuple[int, int]]) -> None:
        self._aligned_heads = tuple(heads)

    def audio_attention(
        self, slot: int, tokens: NDArray[np.int32], num_rows: int
    ) -> NDArray[np.float32]:
        assert self._memory is not None, "prepare_audio() comes first"
        memory, kept = self._memory, self._cross_queries

        def keys(layer: int) -> NDArray[np.float32]:
            rows = memory[layer, 0, slot, :num_rows].transpose(0, 1).float().numpy()
            return np.ascontiguousarray(rows)

        return aligned_attention(
            self._aligned_heads, lambda layer: kept[layer].float().numpy()[tokens], keys,
            self.config.attention_scale,
        )  # fmt: skip

    def poison_blocks(self, block_ids: list[int]) -> None:
        assert self._kv is not None, "prepare() comes first"
        self._kv.poison(block_ids)

    def poison_states(self, slots: list[int]) -> None:
        assert self._states is not None, "prepare() comes first"
        self._states.poison(slots)

    def save_blocks(self, block_ids: Sequence[int]) -> list[NDArray[np.uint8]]:
        assert self._kv is not None, "prepare() comes first"
        return [self._kv.save(block_id) for block_id in block_ids]

    def load_blocks(self, block_ids: Sequence[int], pages: Sequence[NDArray[np.uint8]]) -> None:
        assert self._kv is not None, "prepare() comes first"
        for block_id, page in zip(block_ids, pages, strict=True):
            self._kv.load(block_id, page)

    def close(self) -> None:
        if self.ranks is not None:
            self.ranks.close()
        self._model = None
        self._draft_model = None
        self._heads = None
        self._draft_head = None
        self._memory = None
        self.media = None
        self._kv = None
        self._states = None
        self._team = None


def _rows_step(tokens: NDArray[np.int32]) -> BackendStep:
    """Of rows by themselves, in which nothing attends."""
    count = len(tokens)
    nothing = np.zeros(count, np.int32)
    return BackendStep(
        token_ids=tokens,
        positions=nothing,
        slots=nothing[None],
        seq_starts=np.arange(count + 1, dtype=np.int32),
        seq_lens=np.ones(count, np.int32),
        rows=nothing,
        block_tables=np.zeros((1, 1, 1), np.int32),
        logit_rows=nothing[:0],
        copies=np.zeros((0, 3), np.int32),
    )
