"""The backend for NVIDIA and AMD GPUs: weights, KV cache and sampling all on the device.

A step is packed into one pinned buffer and sent by one copy; the operations run without waiting for
the host; the sampled tokens come back by one copy, and stay on the device for a step that is
launched before they have arrived. On a device that is none of these (`cpu`, for tests) the same
code runs without graphs.
"""

from __future__ import annotations

import logging
from contextlib import nullcontext
from typing import TYPE_CHECKING, NamedTuple, Self, TypeAlias

import numpy as np
import torch

from octavo_engine.backends.backend import draft_limits
from octavo_engine.backends.native.shard import Shard, own_cache, own_layout
from octavo_engine.backends.torch import memory
from octavo_engine.backends.torch.attention_kinds import walks_few
from octavo_engine.backends.torch.block_copies import (
    SlotCopies,
    count_slots,
    load_now,
    save_now,
)
from octavo_engine.backends.torch.build_digest import digest_build
from octavo_engine.backends.torch.capture import CudaRecorder
from octavo_engine.backends.torch.compiling import (
    CompileHooks,
    WarmUpStep,
    adapted_steps,
    compiling_side_by_side,
    step_of,
    warm_up_steps,
)
from octavo_engine.backends.torch.cuda_loader import CudaLoader
from octavo_engine.backends.torch.cuda_ops import Context, CudaOps, formed
from octavo_engine.backends.torch.cuda_recurrent_ops import CudaRecurrentOps
from octavo_engine.backends.torch.device_adapters import DeviceAdapters
from octavo_engine.backends.torch.device_drafts import DeviceDrafts
from octavo_engine.backends.torch.device_kv import DeviceKV, device_layout
from octavo_engine.backends.torch.device_sampler import is_plain, sample
from octavo_engine.backends.torch.device_states import DeviceStates
from octavo_engine.backends.torch.device_step import (
    StepBuffer,
    StepSizes,
    cut_tiles,
    cut_walks,
    is_decode,
)
from octavo_engine.backends.torch.drafting import DraftsOnDevice
from octavo_engine.backends.torch.few_steps import FewSteps, plan_few
from octavo_engine.backends.torch.graphs import (
    MIXED_TOKENS,
    Buckets,
    GraphCache,
    choose_bucket,
    mixed_sizes,
    plan_buckets,
)
from octavo_engine.backends.torch.kv_format import settle_kv_format
from octavo_engine.backends.torch.landing import Landing, marks_of
from octavo_engine.backends.torch.packed import Format
from octavo_engine.backends.torch.parking import Parking
from octavo_engine.backends.torch.programs import MAIN, Program
from octavo_engine.backends.torch.rank_group import RankGroup
from octavo_engine.backends.torch.ropes import DeviceRopeTables
from octavo_engine.backends.torch.token_counts import TokenCounts
from octavo_engine.backends.torch.upload import Uploader
from octavo_engine.caches import one_group
from octavo_engine.errors import ConfigError
from octavo_engine.models.registry import build_model
from octavo_engine.sampling.batch import SamplingBatch
from octavo_engine.sampling.rows import new_table

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence
    from contextlib import AbstractContextManager

    from numpy.typing import NDArray
    from torch import Tensor

    from octavo_engine.backends.adapters import AdapterLimits, AdapterSite
    from octavo_engine.backends.backend import BackendLimits, BackendStep, CompileListener
    from octavo_engine.backends.draft_sources import DraftSources
    from octavo_engine.backends.native.shard import RankPlace
    from octavo_engine.backends.torch.adapter_tiles import AdapterTiles
    from octavo_engine.backends.torch.cuda_settings import CudaSettings
    from octavo_engine.backends.torch.device_adapters import HostAdapter
    from octavo_engine.backends.torch.device_step import DeviceStep, StepTiles
    from octavo_engine.backends.torch.graphs import GraphRecorder
    from octavo_engine.backends.torch.kernels import Kernels
    from octavo_engine.backends.torch.landing import Landed
    from octavo_engine.caches import CacheLayout
    from octavo_engine.models.config import ModelConfig
    from octavo_engine.ops import Model
    from octavo_engine.sampling.batch import Sampled
    from octavo_engine.weights.adapter import AdapterFiles
    from octavo_engine.weights.checkpoint import Checkpoint

MAX_GRAPHS = 48

logger = logging.getLogger(__name__)


class Loaded(NamedTuple):
    """A model, and its weights as something that can be parked."""

    model: Model
    parking: Parking | None = None  # None: what comes from no file
    expanded_bytes: int = 0  # of the largest quantised weight, if a step expands it
    sites: Sequence[AdapterSite] = ()  # that adapters may add to


Load: TypeAlias = "Callable[[Callable[[int, int], None] | None], Loaded]"


class CudaBackend(DraftsOnDevice):
    """A model on one device.

    With `ranks` it is one of several, each with its part of the weights and of the KV heads on a
    device of its own; all must be prepared for the same, and compute the same steps together.
    """

    def __init__(
        self,
        config: ModelConfig,
        loaded: Loaded,
        device: torch.device,
        settings: CudaSettings,
        *,
        kernels: Kernels | None = None,
        load: Load | None = None,
        drafts: DeviceDrafts | None = None,
        ranks: RankGroup | None = None,
    ) -> None:
        """`kernels`: those of `settings`, if they are chosen already; `load` gives the weights
        once more; `drafts` proposes tokens, if the text does not."""
        self.config = config
        self.device = device
        self.ranks = ranks
        self._shard = Shard() if ranks is None else ranks.shard
        self._settings = settings
        self._dtype = settings.dtype
        self._kernels = kernels or settings.kernels_for(config, device, self._shard)
        self._num_drafts = settings.num_drafts if walks_few(config, settings.kv_cache_dtype) else 0
        self._drafts = drafts
        self.cache_layout = (  # as DeviceKV has it
            device_layout(config.caches(), has_one_table=self._kernels.has_one_table)
            if drafts is None
            else one_group([*config.caches(), *drafts.caches])
        )
        self._kv_format = settle_kv_format(
            settings.kv_cache_dtype, self._dtype, self.cache_layout,
            has_e4m3="fp8" in self._kernels.formats, reads_scales=self._kernels.reads_scales,
        )  # fmt: skip
        self._copies: SlotCopies | None = None
        is_capturable = device.type == "cuda" and self._kernels.can_capture
        is_capturable &= ranks is None or ranks.can_capture
        self._use_graphs = settings.use_graphs and is_capturable
        self._recorder: GraphRecorder[tuple[Tensor, Tensor]] = CudaRecorder(device)
        self._make_mark = marks_of(device)
        self._landing = Landing(device, lambda: self._make_mark())
        self._model: Model | None = loaded.model
        self._parking, self._load = loaded.parking, load
        self._expanded_bytes = loaded.expanded_bytes
        self._context: Context | None = None
        self._buffer: StepBuffer | None = None
        self._counts: TokenCounts | None = None
        self._adapters: DeviceAdapters | None = None
        self._graphs: GraphCache[tuple[Tensor, Tensor]] | None = None
        self._buckets = Buckets([], {})
        self._few = FewSteps()
        self._program: Program | None = None
        self._limits: BackendLimits | None = None
        self._num_blocks = 0
        self._is_awake = True
        self._hooks: CompileHooks | None = None
        self._kept: tuple[Tensor, Tensor] | None = None  # logits, and what was drawn of them

    @classmethod
    def open(
        cls,
        config: ModelConfig,
        checkpoint: Checkpoint,
        settings: CudaSettings,
        *,
        max_model_len: int,
        device: str = "cuda",
        keep_quantized: bool = True,
        adapters: AdapterLimits | None = None,
        drafts: DraftSources | None = None,
        progress: Callable[[int, int], None] | None = None,
        place: RankPlace | None = None,
        shares_device: bool = False,
    ) -> Self:
        """A model of files. Weights that they hold quantised stay so by default. Raises
        ConfigError and ModelError."""
        settled = open_device(device)
        ranks = None
        if place is not None:
            ranks = RankGroup(place, settled, shares_device=shares_device)
        kernels = settings.kernels_for(config, settled, Shard() if ranks is None else ranks.shard)
        formats = kernels.formats if keep_quantized else frozenset[Format]()

        def load(progress: Callable[[int, int], None] | None) -> Loaded:
            with Uploader(settled) as uploader:
                loader = CudaLoader(
                    checkpoint, uploader, settings.dtype, progress, formats=formats, ranks=ranks
                )
                model = build_model(config, loader, max_model_len)
                loader.finish()
            largest = memory.expanded_bytes(loader.made, settings.dtype.itemsize)
            return Loaded(model, Parking(loader.made), largest, loader.sites)

        loaded = load(progress)
        device_drafts = None
        if drafts is not None:
            device_drafts = DeviceDrafts(
                config, drafts, loaded.model, settled, settings, max_model_len
            )
        backend = cls(
            config, loaded, settled, settings,
            kernels=kernels, load=load, drafts=device_drafts, ranks=ranks,
        )  # fmt: skip
        if adapters is not None:
            backend.use_adapters(adapters, loaded.sites)
        return backend

    def use_adapters(self, limits: AdapterLimits, sites: Sequence[AdapterSite]) -> None:
        """Reserve memory for them. Before `prepare`. Raises ConfigError."""
        self._adapters = DeviceAdapters(
            self.config, sites, limits,
            device=self.device, dtype=self._dtype, batch_invariant=self._kernels.batch_invariant,
            make_mark=lambda: self._make_mark(),
        )  # fmt: skip

    @property
    def name(self) -> str:
        dtype = str(self._dtype).removeprefix("torch.")
        return f"{self._settings.label}/{dtype}/{self._kernels.name}"

    @property
    def isa(self) -> str:
        if self.device.type != "cuda":
            return self.device.type
        return torch.cuda.get_device_name(self.device)

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def launch_waits(self) -> bool:
        """Plain kernels look at sizes on the host, so a launch waits for the device."""
        return not self._kernels.can_capture

    @property
    def kv_bytes_per_block(self) -> int:
        """Of all ranks together."""
        return sum(self._block_bytes(shard) for shard in self._shard.all())

    def _block_bytes(self, shard: Shard) -> int:
        """Of one rank."""
        heads = self.config.num_heads
        return self.cache_layout.page_bytes(
            lambda spec: self._kv_format.bytes_of(own_cache(spec, heads, shard))
        )

    @property
    def _own_layout(self) -> CacheLayout:
        return own_layout(self.cache_layout, self.config.num_heads, self._shard)

    def kv_memory(self, limits: BackendLimits, fraction: float | None) -> int | None:
        """As the protocol says; of all ranks together, whose devices have as much free as this one.
        Raises ConfigError if nothing is left."""
        if self.device.type == "cuda":
            free = memory.device_memory(self.device).free_bytes
        elif self._settings.memory_of is None:  # a CPU in a test: its memory is the host's
            return None
        else:
            device = self._settings.memory_of()
            if device is None:  # then only --kv-cache-memory-bytes can say
                return 0
            free = device.free_bytes
        few = plan_few(limits, self._kernels, self._num_drafts)
        workspace = self._kernels.workspace_bytes(limits) + self._expanded_bytes
        workspace = max(workspace, self._kernels.few_bytes(few.max_tokens, few.width))
        needed = memory.step_bytes(self.config, limits, self._dtype.itemsize) + workspace
        needed += memory.count_bytes(self.config, limits)
        if self._adapters is not None:  # the adapters themselves have theirs already
            needed += self._adapters.workspace_bytes(limits)
        if self._settings.has_tiers and self.kv_bytes_per_block:
            needed += count_slots(limits, self.kv_bytes_per_block) * self.kv_bytes_per_block
        if self._use_graphs:
            # Graphs have memory of their own.
            needed += workspace + memory.graph_bytes(
                self.config, limits, self._dtype.itemsize,
                num_graphs=self._graph_kinds
                * (self._plan_buckets(limits).total + len(few.buckets)),
                max_tokens=max(MIXED_TOKENS[-1], few.max_tokens), max_logits=few.max_tokens,
            )  # fmt: skip
        if self._drafts is not None:
            needed += self._drafts.needed_bytes(
                limits, self._num_drafts, _captured_tokens(limits, few), use_graphs=self._use_graphs
            )
        if self.ranks is not None:
            itemsize, size = self._dtype.itemsize, self._shard.size
            needed += memory.gather_bytes(self.config, limits, itemsize, size)
        if self.ranks is not None and self.ranks.shares_device:
            needed *= self._shard.size
        budget = memory.kv_budget(free, needed, fraction=fraction or memory.DEVICE_FRACTION)
        if self.ranks is None or self.ranks.shares_device:
            return budget
        # As many blocks as fit where a block is largest.
        largest = max(self._block_bytes(shard) for shard in self._shard.all())
        return budget // largest * self.kv_bytes_per_block

    def prepare(self, limits: BackendLimits, num_blocks: int) -> None:
        if self.ranks is not None:
            self.ranks.connect()
        self._limits, self._num_blocks = limits, num_blocks
        self._few = plan_few(limits, self._kernels, self._num_drafts)
        largest, walks, num_few = limits, self._kernels.walks, self._few.max_tokens
        if self._drafts is not None:
            captured = _captured_tokens(limits, self._few)
            self._drafts.prepare(limits, self._num_drafts, captured, self._recorder)
            largest, walks = draft_limits(limits), self._drafts.walks_beside(walks)
            num_few = max(num_few, self._drafts.max_few)
        self._buffer = StepBuffer(
            largest, self.device, lambda: self._make_mark(), walks,
            None if self._adapters is None else self._adapters.cut, num_few,
            has_states=bool(self.cache_layout.states), num_groups=len(self.cache_layout.groups),
        )  # fmt: skip
        if self._adapters is not None:
            self._adapters.prepare(limits)
        self._counts = TokenCounts(limits.max_seqs, self.config.vocab_size, self.device)
        self._buckets = self._plan_buckets(limits)
        max_graphs = self._graph_kinds * (MAX_GRAPHS + len(self._few.buckets))
        self._graphs = GraphCache(self._recorder, max_graphs=max_graphs)
        self._program = Program(
            self._logits_of, self._kernels, self._buckets, self._few, self._graphs
        )
        if self.device.type == "cuda":
            cache_bytes = num_blocks * self._block_bytes(self._shard)
            cache_bytes += limits.num_state_slots * self.cache_layout.state_bytes
            memory.require(self.device, cache_bytes)
        self.restore_kv()
        if self._use_graphs:
            num_rows = max(limits.max_seqs, num_few)
            self._kept = (
                torch.empty((num_rows, self.config.vocab_size), device=self.device),
                torch.empty((2, num_rows), dtype=torch.int32, device=self.device),
            )

    def warm_up(self, listener: CompileListener) -> None:
        """As `executor.WarmsUp`. Plain kernels are compiled already."""
        if not self._kernels.can_capture:
            return
        with nullcontext() if self.ranks is None else self.ranks.patient():
            if self.device.type == "cuda" and self.ranks is None:
                with compiling_side_by_side() as is_possible:
                    if is_possible:
                        self._launch_warm_up()
            self._launch_warm_up()
            if self.device.type == "cuda":
                with self._waiting():
                    torch.cuda.synchronize(self.device)
        if self._hooks is None:
            self._hooks = CompileHooks(listener)

    def _launch_warm_up(self) -> None:
        assert self._limits is not None and self._program is not None, "prepare() comes first"
        self._warm(self._program, self.config, self._limits)
        if self._adapters is not None:
            with self._adapters.without_ranks():
                for shape in adapted_steps(self._limits):
                    self._launch_shape(self._program, self._limits, shape)
        if self._drafts is not None:
            for each in self._drafts.warm_programs(self._limits):
                self._warm(each.program, each.config, each.limits, each.provide)

    def _warm(
        self,
        program: Program,
        config: ModelConfig,
        limits: BackendLimits,
        provide: Callable[[int], None] = lambda _: None,
    ) -> None:
        """Steps that meet each variant of a program's kernels."""
        kernels, experts = program.kernels, config.experts
        wide = 0 if experts is None else kernels.wide_tokens(experts)
        few = program.few.width
        for shape in warm_up_steps(limits, wide, kernels.long_tokens, few_tokens=few):
            provide(shape.num_seqs * shape.num_tokens)
            self._launch_shape(program, limits, shape)

    def _launch_shape(self, program: Program, limits: BackendLimits, shape: WarmUpStep) -> None:
        longest = limits.max_model_len if shape.is_long else shape.num_tokens
        step = step_of(shape, len(self.cache_layout.groups))
        with torch.inference_mode():
            self._launch_all(
                program, step, _greedy(shape.num_seqs), max_seq_len=longest, draws=True
            )

    def execute(self, step: BackendStep, sampling: SamplingBatch) -> Sampled:
        landed = self.launch(step, sampling)
        with self._waiting():
            return landed.wait()

    def _waiting(self) -> AbstractContextManager[None]:
        """While the host waits for the device. Raises GatherFailed where other ranks are absent."""
        return nullcontext() if self.ranks is None else self.ranks.waiting()

    def follow(self, step: BackendStep) -> None:
        """As `RankBackend`: nobody reads the logits here."""
        assert self._context is not None and self._program is not None, "prepare() comes first"
        assert self.ranks is not None, "one alone follows nobody"
        with torch.inference_mode():
            self._copy(self._context, step)
            self._compute(self._program, step, _greedy(len(step.logit_rows)), draws=False)
            mark = self._make_mark()
        with self._waiting():
            mark.wait()

    def launch(self, step: BackendStep, sampling: SamplingBatch) -> Landed:
        assert self._context is not None and self._program is not None, "prepare() comes first"
        with torch.inference_mode():
            self._copy(self._context, step)
            if self._drafts is not None:
                self._drafts.begin_step()
            return self._launch(self._program, step, sampling)

    def _launch(self, program: Program, step: BackendStep, sampling: SamplingBatch) -> Landed:
        assert self._buffer is not None
        is_simple = not len(step.logit_rows) or is_plain(sampling)
        logits, found, sizes = self._compute(program, step, sampling, draws=is_simple)
        scores = None
        if not is_simple:
            params = self._buffer.draw_params(sizes).first(len(logits))
            assert self._counts is not None
            found, scores = sample(logits, sampling, params, program.kernels.draw, self._counts)
        return self._landing.begin(found, scores)

    @property
    def step_was_usual(self) -> bool:
        """As `PreparesSteps`."""
        return self._graphs is None or self._graphs.take_usual()

    def logits(self, step: BackendStep) -> NDArray[np.float32]:
        """Compute the step; the logits of the wanted rows, [S, vocabulary], for tests."""
        assert self._context is not None and self._program is not None, "prepare() comes first"
        with torch.inference_mode():
            self._copy(self._context, step)
            greedy = _greedy(len(step.logit_rows))
            logits, _, _ = self._compute(self._program, step, greedy, draws=False)
            values: NDArray[np.float32] = logits.cpu().numpy()
            return values

    def device_is_lost(self) -> bool:
        """After an illegal access, say, all calls fail that CUDA gets from this process."""
        if self.device.type != "cuda":
            return False
        try:
            torch.cuda.synchronize(self.device)
        except RuntimeError:
            return True
        return False

    def pack_adapter(self, files: AdapterFiles) -> HostAdapter:
        assert self._adapters is not None, "made without room for adapters"
        return self._adapters.pack(files)

    def expect_adapter(self, packed: HostAdapter) -> None:
        assert self._adapters is not None, "made without room for adapters"
        self._adapters.expect(packed)

    def set_adapter(self, slot: int, packed: HostAdapter | None) -> None:
        assert self._adapters is not None, "made without room for adapters"
        self._adapters.place(slot, packed)

    def poison_blocks(self, block_ids: list[int]) -> None:
        assert self._context is not None, "prepare() comes first"
        self._context.kv.poison(block_ids)

    def poison_states(self, slots: list[int]) -> None:
        assert self._context is not None and self._context.states is not None
        self._context.states.poison(slots)

    def open_copies(
        self, *, host_bytes: int, is_stored: bool, woken: Callable[[], None]
    ) -> SlotCopies:
        assert self._limits is not None, "prepare() comes first"
        page_bytes = self.kv_bytes_per_block
        self._copies = SlotCopies(
            self._kernels, self.device, self._kv,
            num_slots=count_slots(self._limits, page_bytes), page_bytes=page_bytes,
            host_bytes=host_bytes, is_stored=is_stored, woken=woken,
        )  # fmt: skip
        return self._copies

    def save_blocks(self, block_ids: Sequence[int]) -> list[NDArray[np.uint8]]:
        return save_now(self._kv(), self._kernels, block_ids, self.device)

    def load_blocks(self, block_ids: Sequence[int], pages: Sequence[NDArray[np.uint8]]) -> None:
        load_now(self._kv(), self._kernels, block_ids, pages, self.device)

    def save_states(self, slot: int) -> NDArray[np.uint8]:
        assert self._context is not None and self._context.states is not None
        with torch.inference_mode():
            return self._context.states.save(slot)

    def load_states(self, slot: int, page: NDArray[np.uint8]) -> None:
        assert self._context is not None and self._context.states is not None
        with torch.inference_mode():
            self._context.states.load(slot, page)

    def build_digest(self) -> bytes:
        return digest_build(self.isa, self._kernels)

    def release_kv(self) -> None:
        """As `executor.ReleasesKV`. Graphs know addresses of what goes, so they go too."""
        if self._copies is not None:
            self._copies.release()
        self._context = None
        if self._drafts is not None:
            self._drafts.release_kv()
        if self._counts is not None:
            self._counts.forget()
        self._forget_graphs()

    def restore_kv(self) -> None:
        if self._context is not None:
            return
        limits = self._limits
        assert limits is not None, "prepare() comes first"
        kv = DeviceKV(
            self._own_layout, num_blocks=self._num_blocks, dtype=self._kv_format.dtype,
            device=self.device, has_scales=self._kv_format.has_scales,
        )  # fmt: skip
        ropes = DeviceRopeTables(limits.max_model_len, self.device)
        states = None
        if self.cache_layout.states:
            states = DeviceStates(self.cache_layout, limits.num_state_slots, self.device)
        self._context = Context(
            self._kernels, kv, ropes, self._dtype, self._adapters, states, self.ranks
        )
        if self._drafts is not None:
            self._drafts.restore_kv(self._context)
        if self._copies is not None:
            self._copies.restore()

    def release_weights(self, *, keep: bool) -> None:
        """As `executor.ReleasesWeights`. Weights that came from no file are kept in any case."""
        if self._parking is None or not self._is_awake:
            return
        self._is_awake = False
        if self._adapters is not None:
            self._adapters.release()
        if keep or self._load is None:
            self._parking.park()
        else:
            self._model = self._parking = None
        if self._drafts is not None:
            self._drafts.release_weights(keep=keep or self._load is None)
        self._forget_graphs()

    def restore_weights(self) -> None:
        if self._is_awake:
            return
        if self._parking is not None:
            self._parking.unpark()
        elif self._load is not None:
            self._model, self._parking, *_ = self._load(None)
        if self._drafts is not None:
            assert self._model is not None
            self._drafts.restore_weights(self._model)
        if self._adapters is not None:
            self._adapters.restore()
        self._is_awake = True

    def close(self) -> None:
        if self.ranks is not None:
            self.ranks.close()
        if self._hooks is not None:
            self._hooks.remove()
            self._hooks = None
        self._forget_graphs()
        if self._adapters is not None:
            self._adapters.close()
            self._adapters = None
        self._graphs = self._context = self._buffer = self._model = self._kept = None
        self._counts = self._program = self._drafts = None
        self._parking = self._load = None
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    @property
    def _graph_kinds(self) -> int:
        """Of each bucket: with adapters and without."""
        return 1 if self._adapters is None else 2

    def _copy(self, context: Context, step: BackendStep) -> None:
        """What the step says is copied before it."""
        context.kv.copy(step.copies)
        if context.states is not None and step.states is not None:
            context.states.copy(step.states.copies)

    def _kv(self) -> DeviceKV:
        assert self._context is not None, "prepare() comes first"
        return self._context.kv

    def _plan_buckets(self, limits: BackendLimits) -> Buckets:
        return plan_buckets(limits, MAX_GRAPHS, has_mixed=self._kernels.can_capture_prompts)

    def _forget_graphs(self) -> None:
        if self._graphs is not None:
            self._graphs.clear()
        if self._drafts is not None:
            self._drafts.forget_graphs()
        if isinstance(self._recorder, CudaRecorder):
            self._recorder.reset()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _compute(
        self, program: Program, step: BackendStep, sampling: SamplingBatch, *, draws: bool
    ) -> tuple[Tensor, Tensor, StepSizes]:
        """Logits, what was drawn of them as they are, and how the step was laid out. Without
        `draws` nobody wants to know; only a graph does it all the same."""
        assert self._buffer is not None and self._limits is not None
        buffer, is_decode_step = self._buffer, is_decode(step)
        num_rows = len(step.logit_rows)
        is_few = not is_decode_step and program.few.holds(step)
        bucket = self._bucket(program, step, is_decode=is_decode_step, is_few=is_few)
        if bucket is None:
            longest = int(step.seq_lens.max(initial=0))
            return self._launch_all(program, step, sampling, max_seq_len=longest, draws=draws)
        # A graph must serve every length that is still to come.
        longest = self._limits.max_model_len
        sizes, adapters = self._cut_adapters(step, bucket)
        width = program.few.width if is_few and program.few.is_walked else 0

        def work() -> tuple[Tensor, Tensor]:
            view = buffer.step(
                sizes, is_decode=is_decode_step, max_seq_len=longest, host=None, width=width
            )
            return self._keep(program, view, sizes)

        tiles = self._cut(program, step, sizes, is_walked=is_decode_step or width > 0)
        buffer.send(
            buffer.fill(step, sampling, tiles, sizes, draws_later=not draws, adapters=adapters)
        )
        # Sizes alone do not tell the kinds apart.
        key: Hashable = sizes.seqs if is_decode_step else sizes
        if adapters is not None:
            key = (is_decode_step, sizes)
        if is_few or program.name != MAIN:
            key = program.name, is_few, key
        logits, found = program.graphs.run(key, work)
        return logits[:num_rows], found[:, :num_rows], sizes

    def _launch_all(
        self,
        program: Program,
        step: BackendStep,
        sampling: SamplingBatch,
        *,
        max_seq_len: int,
        draws: bool,
    ) -> tuple[Tensor, Tensor, StepSizes]:
        """The step as it is, operation by operation."""
        assert self._buffer is not None
        is_decode_step, width = is_decode(step), 0
        if not is_decode_step and program.few.is_walked and program.few.holds(step):
            width = program.few.width
        tiles = self._cut(program, step, None, is_walked=is_decode_step or width > 0)
        sizes = StepSizes(
            len(step.token_ids), len(step.seq_lens), len(step.logit_rows), len(tiles.seqs)
        )
        sizes, adapters = self._cut_adapters(step, sizes)
        fill = self._buffer.fill(
            step, sampling, tiles, sizes, draws_later=not draws, adapters=adapters
        )
        self._buffer.send(fill)
        view = self._buffer.step(
            sizes, is_decode=is_decode_step, max_seq_len=max_seq_len, host=step, width=width
        )
        return *self._forward(program, view, sizes, draws=draws), sizes

    def _cut_adapters(
        self, step: BackendStep, sizes: StepSizes
    ) -> tuple[StepSizes, AdapterTiles | None]:
        """Sizes with room for the step's adapters, and their tiles; None if it has none."""
        return (sizes, None) if self._adapters is None else self._adapters.cut_step(step, sizes)

    def _cut(
        self, program: Program, step: BackendStep, sizes: StepSizes | None, *, is_walked: bool
    ) -> StepTiles:
        """Attention's programs, of padding up to `sizes` too."""
        if is_walked:
            return cut_walks(step.seq_lens, program.kernels.walks.spare_parts)
        starts = step.seq_starts if sizes is None else np.append(step.seq_starts, sizes.tokens)
        return cut_tiles(starts, program.kernels.tokens_per_tile)

    def _bucket(
        self, program: Program, step: BackendStep, *, is_decode: bool, is_few: bool
    ) -> StepSizes | None:
        """What the step is padded to, so that a graph may hold it; None: it is launched as is."""
        kernels = program.kernels
        if not self._use_graphs:
            return None
        if is_decode:
            bucket = choose_bucket(program.buckets.decode, len(step.logit_rows))
            spare = kernels.walks.spare_parts
            return None if bucket is None else StepSizes.of_decode(bucket, spare)
        if is_few:
            return program.few.sizes(step, kernels)
        if not kernels.can_capture_prompts or not len(step.logit_rows):
            return None
        return mixed_sizes(step, program.buckets, tokens_per_tile=kernels.tokens_per_tile)

    def _keep(self, program: Program, step: DeviceStep, sizes: StepSizes) -> tuple[Tensor, Tensor]:
        """Results in memory that all graphs share; their own is for what is gone after a step."""
        assert self._kept is not None
        logits, found = self._forward(program, step, sizes, draws=True)
        num_rows = len(logits)
        return self._kept[0][:num_rows].copy_(logits), self._kept[1][:, :num_rows].copy_(found)

    def _forward(
        self, program: Program, step: DeviceStep, sizes: StepSizes, *, draws: bool
    ) -> tuple[Tensor, Tensor]:
        """Logits, and what is drawn of them; the draw keeps the tokens for the step behind."""
        assert self._buffer is not None
        logits = program.forward(step)
        if not draws:
            return logits, logits.new_empty((2, len(logits)), dtype=torch.int32)
        params = self._buffer.draw_params(sizes, with_step=True)
        return logits, program.kernels.draw(logits, params)

    def _logits_of(self, step: DeviceStep) -> Tensor:
        """The model's."""
        assert self._context is not None
        assert self._model is not None, "the weights sleep"
        has_states = self._context.states is not None
        ops = (CudaRecurrentOps if has_states else CudaOps)(step, self._context)
        if self._drafts is not None:
            ops.wanted = self._drafts.keeps
        logits = formed(self._model.forward(ops))
        if self._drafts is not None:
            self._drafts.keep(ops, step)
        return logits.float()


def _captured_tokens(limits: BackendLimits, few: FewSteps) -> int:
    """The most that a captured step of the model has."""
    return max(limits.max_seqs, few.max_tokens, min(MIXED_TOKENS[-1], limits.max_tokens))


def _greedy(num_rows: int) -> SamplingBatch:
    """Rows that all take the likeliest token."""
    zeros = np.zeros(num_rows, np.int32)
    return SamplingBatch(new_table(1), zeros, zeros, zeros - 1, np.zeros((1, 1), np.int32))


def open_device(name: str) -> torch.device:
    """The device by torch's name. Raises ConfigError if it is not there."""
    device = torch.device(name)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ConfigError(
                "--device cuda needs a GPU that torch can use, and it sees none: check nvidia-smi, "
                "and that torch was installed with CUDA (torch.version.cuda is "
                f"{torch.version.cuda})"
            )
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
        # Sums of bf16 and float16 products stay in float32 where cuBLAS splits them, too.
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    return device
