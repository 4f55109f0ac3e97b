"""The CPU backend: a model recorded once, fused and planned, then one call into csrc a step."""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np

from octavo_engine import _native
from octavo_engine.backends.adapters import match_sites, stored_rows
from octavo_engine.backends.alignment import aligned_attention
from octavo_engine.backends.backend import draft_limits
from octavo_engine.backends.draft_part import forward_later, layout_with
from octavo_engine.backends.native.audio import NativeAudio, feature_shape, slot_bytes
from octavo_engine.backends.native.compiled import compile_forward
from octavo_engine.backends.native.draft_head import NativeDraftHead
from octavo_engine.backends.native.emit import CachePlaces
from octavo_engine.backends.native.expert_balance import slot_ranges
from octavo_engine.backends.native.expert_balancer import ExpertBalancer
from octavo_engine.backends.native.facts import timed
from octavo_engine.backends.native.heads import NativeHeadSet
from octavo_engine.backends.native.kv_format import (
    check_kv_format,
    make_kv_cache,
    settle_kv_format,
)
from octavo_engine.backends.native.loader import NativeLoader
from octavo_engine.backends.native.lockstep import Lockstep
from octavo_engine.backends.native.media import NativeMediaEncoder
from octavo_engine.backends.native.placement import make_team
from octavo_engine.backends.native.recorder import record
from octavo_engine.backends.native.shard import Shard, own_cache, own_layout, split
from octavo_engine.backends.native.stages import layer_names, plan_cut
from octavo_engine.backends.sampled import sample_rows
from octavo_engine.caches import KVSpec
from octavo_engine.config import MAX_SPECULATION
from octavo_engine.errors import ConfigError, ModelError
from octavo_engine.models.registry import build_model
from octavo_engine.ops import HIDDEN, cross_queries

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from numpy.typing import NDArray

    from octavo_engine.backends.adapters import AdapterLimits
    from octavo_engine.backends.backend import BackendLimits, BackendStep
    from octavo_engine.backends.draft_part import DraftHeadPart, DraftPart
    from octavo_engine.backends.head_files import HeadsPart
    from octavo_engine.backends.media import MediaEncoder
    from octavo_engine.backends.native.emit import CompiledProgram
    from octavo_engine.backends.native.graph import Dtype, Graph, Value
    from octavo_engine.backends.native.recorder import Recorder
    from octavo_engine.backends.native.shard import RankPlace
    from octavo_engine.backends.native.stages import StageCut, StagePlace
    from octavo_engine.caches import CacheLayout
    from octavo_engine.config import EplbConfig, KVCacheDType, Quantization
    from octavo_engine.errors import WorkerLost
    from octavo_engine.models.config import ModelConfig
    from octavo_engine.models.vision_config import MediaConfig
    from octavo_engine.ops import EncoderDecoder, Model
    from octavo_engine.profile import Laps
    from octavo_engine.sampling.batch import Sampled, SamplingBatch
    from octavo_engine.weights.adapter import AdapterFiles
    from octavo_engine.weights.checkpoint import Checkpoint

HEAD_DIM_MULTIPLE = 16  # the kernels' panel width


class _Loaded(NamedTuple):
    """What `close` lets go of: threads and weights."""

    team: _native.Team
    model: Model
    draft_model: Model | None
    heads: NativeHeadSet | None
    draft_head: NativeDraftHead | None

    @property
    def kept(self) -> tuple[str, ...]:
        """What is read of a step beside its logits."""
        if self.draft_head is not None:
            return self.draft_head.part.config.kept_names
        return () if self.heads is None else (HIDDEN,)


def _load_draft(draft: DraftPart, team: _native.Team, dtype: Dtype, max_model_len: int) -> Model:
    loader = NativeLoader(draft.checkpoint, team, dtype, quantization=draft.quantization)
    model = build_model(draft.config, loader, max_model_len)
    loader.finish()
    return model


def _load_drafts(
    team: _native.Team,
    model: Model,
    dtype: Dtype,
    max_model_len: int,
    draft: DraftPart | None,
    heads: HeadsPart | None,
    draft_head: DraftHeadPart | None,
) -> _Loaded:
    """The model with what drafts for it."""
    return _Loaded(
        team,
        model,
        draft and _load_draft(draft, team, dtype, max_model_len),
        heads and NativeHeadSet(heads, team, dtype),
        draft_head and NativeDraftHead(draft_head, model, team, dtype, max_model_len),
    )


def _check_head_dims(layout: CacheLayout) -> None:
    for spec in layout.specs:
        if isinstance(spec, KVSpec) and spec.head_dim % HEAD_DIM_MULTIPLE:
            raise ModelError(
                f"config.json: head_dim must be a multiple of {HEAD_DIM_MULTIPLE} on this "
                f"device; got {spec.head_dim}; --device torch takes it"
            )


def record_whole(
    config: ModelConfig,
    checkpoint: Checkpoint,
    team: _native.Team,
    dtype: Dtype,
    max_model_len: int,
) -> Graph:
    """The model written down over absent matrices, kept behind each layer."""
    loader = NativeLoader(checkpoint, team, dtype, only=())
    model = build_model(config, loader, max_model_len)
    loader.finish()
    return record(model.forward, layer_names(config.num_layers))


def _plan_cut(
    config: ModelConfig,
    checkpoint: Checkpoint,
    team: _native.Team,
    dtype: Dtype,
    max_model_len: int,
    stage: StagePlace | None,
) -> StageCut | None:
    """From the model written down without its matrices; None of one that is whole."""
    if stage is None:
        return None
    graph = record_whole(config, checkpoint, team, dtype, max_model_len)
    return plan_cut(graph, stage, num_layers=config.num_layers, what=config.architecture)


def _ranks_at(place: RankPlace, team: _native.Team) -> _native.Ranks:
    return _native.Ranks(*place.shard, team.num_threads, place.file, place.patience_s)


def _adapter_slots(limits: AdapterLimits | None, dtype: Dtype) -> _native.AdapterSlots | None:
    return limits and _native.AdapterSlots(limits.num_slots, limits.max_rank, dtype)


def _expert_shard(shard: Shard, peers: RankPlace | None, *, spreads: bool) -> Shard | None:
    """Whose experts a process has as a whole; None: its part of all, or all."""
    if peers is not None:
        return peers.shard
    return shard if spreads and shard.size > 1 else None


class NativeBackend:
    """Packed weights, KV cache and program in csrc.

    With a `place` it is one of several ranks, each with its part of the weights and of the KV
    heads, and with `spreads_experts` some of the experts; all must be prepared for the same, and
    compute the same steps together. With `peers` it is one of several cores with requests of their
    own, which have some of the experts each. With `eplb` these move between steps, so that all
    have about as much to do. With a `stage` it has some layers and their caches;
    what it computes of a step is the next stage's input.
    """

    laps: Laps | None = None  # while steps are recorded
    _audio: NativeAudio | None = None
    _lockstep: Lockstep | None = None  # with peers
    _balancer: ExpertBalancer | None = None  # with `eplb`
    _compiled: CompiledProgram | None = None
    _compiled_draft: CompiledProgram | None = None
    _kv: _native.KVCache | None = None
    _states: _native.StateCache | None = None
    _aligned_heads: tuple[tuple[int, int], ...] = ()

    _adapter_bytes = 0  # of the last one that was packed

    def __init__(
        self,
        config: ModelConfig,
        checkpoint: Checkpoint,
        *,
        max_model_len: int,
        dtype: Dtype = "bf16",
        quantization: Quantization = "auto",
        activation_bits: int = 16,
        kv_cache_dtype: KVCacheDType = "auto",
        num_threads: int | None = None,
        isa: str = "",
        is_fused: bool = True,
        joins_phases: bool = True,
        adapters: AdapterLimits | None = None,
        progress: Callable[[int, int], None] | None = None,
        place: RankPlace | None = None,
        spreads_experts: bool = False,
        peers: RankPlace | None = None,
        eplb: EplbConfig | None = None,
        stage: StagePlace | None = None,
        draft: DraftPart | None = None,
        heads: HeadsPart | None = None,
        draft_head: DraftHeadPart | None = None,
    ) -> None:
        self.cache_layout = layout_with(config, draft, draft_head)
        _check_head_dims(self.cache_layout)
        self.config, self.dtype = config, dtype
        self.kv_format = settle_kv_format(kv_cache_dtype, dtype)
        check_kv_format(self.cache_layout, self.kv_format)
        self._is_fused, self._joins_phases = is_fused, joins_phases  # tests compare all four
        self._activation_bits = activation_bits
        shard = Shard() if place is None else place.shard
        self._shard = shard
        self._expert_shard = _expert_shard(shard, peers, spreads=spreads_experts)
        assert place is None or stage is None, "layers are shared or spread, not both"
        rank, num_ranks = shard if stage is None else stage.on_host
        team = make_team(num_threads, isa, rank=rank, num_ranks=num_ranks)
        self.isa = team.isa
        assert place is None or is_fused, "a rank has the halves of a gated layer together"
        self.ranks = None if place is None else _ranks_at(place, team)
        self._peers = None if peers is None else _ranks_at(peers, team)
        self._eplb = None if self._expert_shard is None else eplb
        self._adapters = _adapter_slots(adapters, dtype)
        self._cut = _plan_cut(config, checkpoint, team, dtype, max_model_len, stage)
        loader = NativeLoader(
            checkpoint,
            team,
            dtype,
            progress,
            quantization=quantization,
            shard=shard,
            expert_shard=self._expert_shard,
            redundant_experts=0 if self._eplb is None else self._eplb.num_redundant_experts,
            adapters=self._adapters,
            only=None if self._cut is None else self._cut.names,
        )
        model = build_model(config, loader, max_model_len)
        loader.finish()
        if activation_bits == 8:
            loader.check_integers()
        self._sites = loader.sites
        self._expert_layers = loader.expert_layers
        self._loaded: _Loaded | None = _load_drafts(
            team, model, dtype, max_model_len, draft, heads, draft_head
        )
        self.media: MediaEncoder | None = None
        self._num_blocks = self._num_slots = 0

    @property
    def name(self) -> str:
        return f"native/{self.isa}"

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def kv_bytes_per_block(self) -> int:
        """Of all ranks or stages of a host together; of the largest stage where each has a host."""
        layouts = [self.cache_layout]
        if self._cut is not None:
            bounds = self._cut.bounds
            layouts = [self._layout_of(range(*pair)) for pair in pairwise(bounds)]
        combine = max if self._cut is not None and self._cut.place.has_host else sum
        return combine(
            layout.page_bytes(
                lambda spec: sum(
                    self.kv_format.bytes_of(own_cache(spec, self.config.num_heads, shard))
                    for shard in self._shard.all()
                )
            )
            for layout in layouts
        )

    def kv_memory(self, limits: BackendLimits, fraction: float | None) -> int | None:
        return None

    @property
    def has_draft(self) -> bool:
        return self._in_memory.draft_model is not None

    def prepare(self, limits: BackendLimits, num_blocks: int) -> None:
        _, model, draft_model, heads, draft_head = self._in_memory
        try:
            keep: Collection[str] = self._in_memory.kept
            if self._aligned_heads:
                keep = sorted({cross_queries(layer) for layer, _ in self._aligned_heads})
            cut = None
            if self._cut is not None:
                keep, cut = layer_names(self.config.num_layers), self._cut.apply
            self._compiled = self._compile(model.forward, limits, keep, cut, self._peers)
            if heads is not None:
                heads.prepare(
                    min(limits.max_seqs, MAX_SPECULATION),
                    is_fused=self._is_fused,
                    activation_bits=self._activation_bits,
                )
            if draft_model is not None:
                first_layer = len(self.config.caches())
                self._compiled_draft = self._compile(
                    lambda ops: forward_later(draft_model, ops, first_layer), draft_limits(limits)
                )
            if draft_head is not None:
                first = draft_limits(limits)
                others = dataclasses.replace(first, max_tokens=limits.max_seqs)
                draft_head.prepare(self._compile, first, others)
            self._num_blocks, self._num_slots = num_blocks, limits.num_state_slots
            self.restore_kv()
        except MemoryError as error:
            kv_bytes = num_blocks * self.kv_bytes_per_block
            raise ConfigError(
                f"no memory for a KV cache of {kv_bytes} bytes and steps of "
                f"{limits.max_tokens} tokens; lower --kv-cache-memory-bytes or "
                "--max-num-batched-tokens"
            ) from error
        program = self._compiled.program
        if self._eplb is not None and self._expert_shard is not None:
            self._balancer = ExpertBalancer(self._eplb, program, self._expert_shard)
        if self._peers is not None:
            self._lockstep = Lockstep(self._peers, self._run_empty)
            self._lockstep.start()

    def _run_empty(self) -> None:
        assert self._compiled is not None, "prepare() comes first"
        self._compiled.program.run_empty()
        if self._balancer is not None:
            self._balancer.after_step()

    def watch_workers(self, when_lost: Callable[[WorkerLost], None]) -> None:
        if self._lockstep is not None:
            self._lockstep.watch(when_lost)

    def _compile(
        self,
        forward: Callable[[Recorder], Value],
        limits: BackendLimits,
        keep: Collection[str] = (),
        cut: Callable[[Graph], Graph] | None = None,
        peers: _native.Ranks | None = None,
    ) -> CompiledProgram:
        own = self.own_layout
        nowhere = [-1] * self._first_cache
        return compile_forward(
            forward,
            self._in_memory.team,
            limits,
            places=CachePlaces(
                [*nowhere, *(place.group for place in own.places())], [*nowhere, *own.ordinals()]
            ),
            is_fused=self._is_fused,
            joins_phases=self._joins_phases,
            activation_bits=self._activation_bits,
            ranks=self.ranks,
            peers=peers,
            keep=keep,
            cut=cut,
        )

    def _layout_of(self, layers: range) -> CacheLayout:
        first, end = (self.config.cache_index(layer) for layer in (layers.start, layers.stop))
        return self.cache_layout.part(range(first, end))

    @property
    def own_layout(self) -> CacheLayout:
        """What the layers of this process remember."""
        return self.cache_layout if self._cut is None else self._layout_of(self._cut.layers)

    @property
    def has_states(self) -> bool:
        return bool(self.own_layout.states)

    @property
    def _first_cache(self) -> int:
        """Which of the model's caches is the first of this process."""
        return 0 if self._cut is None else self.config.cache_index(self._cut.layers.start)

    def load_media(self, config: MediaConfig, checkpoint: Checkpoint) -> None:
        self.media = NativeMediaEncoder(
            config, checkpoint, self._in_memory.team, self.dtype, is_fused=self._is_fused
        )

    def execute(self, step: BackendStep, sampling: SamplingBatch) -> Sampled:
        logits = self.logits(step)
        if self.laps is not None:
            self.laps.mark("forward")
            if sampling.masks is not None:
                sampling.masks.take()  # it keeps them
                self.laps.mark("mask")
        return sample_rows(self._in_memory.team, logits, sampling)

    def follow(self, step: BackendStep) -> NDArray[np.float32]:
        """As `RankBackend`."""
        return self.logits(step)

    def logits(self, step: BackendStep) -> NDArray[np.float32]:
        """Compute the step; a view of its logits, [S, vocabulary], valid until the next one. Of a
        stage before the last: of the rows behind its layers, [T, hidden]."""
        assert self._compiled is not None and self._kv is not None, "prepare() comes first"
        if len(step.copies):
            self._kv.copy(step.copies)
        states = None if self._states is None else step.states
        if self._states is not None and states is not None and len(states.copies):
            self._states.copy(states.copies)
        if not len(step.token_ids):
            return np.empty((0, self.vocab_size), np.float32)
        program, logits, ops, *_ = self._compiled
        times = None if self.laps is None else np.empty(len(ops) + 1, np.int64)
        with nullcontext() if self._lockstep is None else self._lockstep.step():
            program.run(
                self._kv,
                *step.native_arrays,
                op_times=times,
                adapters=step.adapters,
                cross=None if self._audio is None else self._audio.cache,
                cross_slots=step.audio_slots,
                states=self._states,
                state_slots=None if states is None else states.slots,
                state_saves=None if states is None else states.saves,
                input_rows=step.input_rows,
                inputs=step.inputs,
                seen_to=step.seen_to,
                rope_positions=step.rope_positions,
            )
            if self._balancer is not None:
                self._balancer.after_step()
        if self.laps is not None and times is not None:
            self.laps.inside += timed(ops, times, len(step.token_ids), len(step.logit_rows))
        is_last = self._cut is None or self._cut.place.is_last
        return program.read(logits, len(step.logit_rows if is_last else step.token_ids))

    def expert_rank_tokens(self) -> list[int]:
        """How many rows the experts of each rank have computed so far, as every rank counts them;
        of `peers` only this one's, whose figures are added up. Empty where none has experts of its
        own."""
        if self._compiled is None or self._expert_shard is None:
            return []
        counts = np.array(self._compiled.program.slot_tokens()).sum(axis=0)
        rank, size = self._expert_shard
        return [
            int(counts[own.start : own.stop].sum()) if self._peers is None or number == rank else 0
            for number, own in enumerate(slot_ranges(len(counts), size))
        ]

    def expert_layer_tokens(self) -> list[list[int]]:
        """Of each layer, for how many rows each of its experts was chosen so far; of `peers` only
        the experts that were its own at first. Empty of layers, and of models, that have none."""
        if self._compiled is None:
            return []
        mixtures = self._compiled.program.expert_tokens()
        if self._peers is not None and self._expert_shard is not None:
            first, end = split(len(mixtures[0]), self._expert_shard)
            mixtures = [[n if first <= e < end else 0 for e, n in enumerate(m)] for m in mixtures]
        by_layer = dict(zip(self._expert_layers, mixtures, strict=True))
        return [by_layer.get(layer, []) for layer in range(max(by_layer, default=-1) + 1)]

    def draft(self, step: BackendStep, sampling: SamplingBatch) -> Sampled:
        assert self._compiled_draft is not None and self._kv is not None, "made without a draft"
        program, logits, *_ = self._compiled_draft
        program.run(self._kv, *step.native_arrays)
        rows = program.read(logits, len(step.logit_rows))
        return sample_rows(self._in_memory.team, rows, sampling)

    @property
    def has_draft_head(self) -> bool:
        return self._in_memory.draft_head is not None

    def token_states(self, tokens: NDArray[np.int32]) -> NDArray[np.float32]:
        assert self._compiled is not None, "prepare() comes first"
        program, kept = self._compiled.program, self._compiled.kept
        count = int(tokens.max(initial=-1)) + 1
        found = [program.read(kept[name], count)[tokens] for name in self._in_memory.kept]
        return found[0] if len(found) == 1 else np.concatenate(found, axis=1)

    def draft_from(
        self,
        step: BackendStep,
        states: NDArray[np.float32],
        sampling: SamplingBatch,
        *,
        is_first: bool,
    ) -> tuple[Sampled, NDArray[np.float32]]:
        team, head = self._in_memory.team, self._in_memory.draft_head
        assert head is not None and self._kv is not None, "made without a head"
        logits, own = head.run(self._kv, step, states, is_first=is_first)
        return sample_rows(team, logits, sampling), own

    @property
    def num_heads(self) -> int:
        heads = self._in_memory.heads
        return 0 if heads is None else heads.part.num_heads

    def hidden_rows(self, logit_rows: NDArray[np.int32]) -> NDArray[np.float32]:
        assert self._compiled is not None, "prepare() comes first"
        program, kept = self._compiled.program, self._compiled.kept
        return program.read(kept[HIDDEN], int(logit_rows.max(initial=-1)) + 1)[logit_rows]

    def draft_head(
        self,
        head: int,
        states: NDArray[np.float32],
        tokens: NDArray[np.int32],
        sampling: SamplingBatch,
    ) -> tuple[Sampled, NDArray[np.float32]]:
        team, heads = self._in_memory.team, self._in_memory.heads
        assert heads is not None, "made without heads"
        logits, following = heads.logits(head, states, tokens)
        return sample_rows(team, logits, sampling), following

    def pack_adapter(self, files: AdapterFiles) -> _native.PackedAdapter:
        assert self._adapters is not None, "made without adapters"
        added = match_sites(files, self.config, self._sites)
        parts = [
            (
                site,
                [(one.part, stored_rows(one.down), stored_rows(one.up), one.scale) for one in own],
            )
            for site, own in added.items()
        ]
        packed = _native.PackedAdapter(self._adapters, parts)
        self._adapter_bytes = packed.nbytes
        return packed

    def prepare_adapter(self) -> None:
        assert self._adapters is not None, "made without adapters"
        self._adapters.prepare_spare(self._adapter_bytes)

    def set_adapter(self, slot: int, packed: _native.PackedAdapter | None) -> None:
        assert self._adapters is not None, "made without adapters"
        self._adapters.set(slot, packed)

    @property
    def feature_shape(self) -> tuple[int, int] | None:
        return feature_shape(self.config)

    @property
    def audio_slot_bytes(self) -> int:
        return slot_bytes(self.config, self.kv_format)

    def prepare_audio(self, num_slots: int) -> None:
        memory = self._in_memory
        self._audio = NativeAudio(
            self.config,
            cast("EncoderDecoder", memory.model),
            memory.team,
            num_slots,
            self.kv_format,
            is_fused=self._is_fused,
            activation_bits=self._activation_bits,
        )

    def encode_audio(
        self, slot: int, features: NDArray[np.float32], part: int, num_parts: int
    ) -> None:
        assert self._audio is not None, "prepare_audio() comes first"
        self._audio.encode(slot, features, part, num_parts)

    def align_by(self, heads: Sequence[tuple[int, int]]) -> None:
        self._aligned_heads = tuple(heads)

    def audio_attention(
        self, slot: int, tokens: NDArray[np.int32], num_rows: int
    ) -> NDArray[np.float32]:
        assert self._audio is not None and self._compiled is not None, "prepare() comes first"
        audio, (program, kept) = self._audio, (self._compiled.program, self._compiled.kept)
        count = int(tokens.max(initial=-1)) + 1

        def queries(layer: int) -> NDArray[np.float32]:
            return program.read(kept[cross_queries(layer)], count)[tokens]

        return aligned_attention(
            self._aligned_heads, queries, lambda layer: audio.keys(slot, layer, num_rows),
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
        pages = list(np.empty((len(block_ids), self._kv.bytes_per_block), np.uint8))
        for block_id, page in zip(block_ids, pages, strict=True):
            self._kv.save(block_id, page)
        return pages

    def load_blocks(self, block_ids: Sequence[int], pages: Sequence[NDArray[np.uint8]]) -> None:
        assert self._kv is not None, "prepare() comes first"
        for block_id, page in zip(block_ids, pages, strict=True):
            self._kv.load(block_id, page)

    def save_states(self, slot: int) -> NDArray[np.uint8]:
        assert self._states is not None, "prepare() comes first"
        page = np.empty(self._states.bytes_per_slot, np.uint8)
        self._states.save(slot, page)
        return page

    def load_states(self, slot: int, page: NDArray[np.uint8]) -> None:
        assert self._states is not None, "prepare() comes first"
        self._states.load(slot, page)

    def release_kv(self) -> None:
        self._kv = None
        self._states = None
        if self._audio is not None:
            self._audio.release()

    def restore_kv(self) -> None:
        if self._audio is not None:
            self._audio.restore()
        if self._kv is None:
            self._kv = self._make_kv(self._num_blocks)
            if states := self.own_layout.states:
                values = [spec.num_values for spec in states]
                self._states = _native.StateCache(self._num_slots, values)

    def close(self) -> None:
        if self._lockstep is not None:
            self._lockstep.close()
        self._compiled = None
        self._compiled_draft = None
        self._audio = None
        self.media = None
        self._kv = None
        self._states = None
        self._loaded = None

    @property
    def _in_memory(self) -> _Loaded:
        assert self._loaded is not None, "the backend was closed"
        return self._loaded

    def _make_kv(self, num_blocks: int) -> _native.KVCache:
        layout = own_layout(self.own_layout, self.config.num_heads, self._shard)
        kv = make_kv_cache(layout, num_blocks, self.kv_format)
        assert not layout.paged() or kv.bytes_per_block == layout.page_bytes(
            self.kv_format.bytes_of
        )
        return kv
