"""The backend for NVIDIA and AMD GPUs: weights, KV cache and sampling all on the device.

A step is packed into one pinned buffer and sent by one copy; the operations run without waiting for
the host; the sampled tokens come back by one copy, and stay on the device for a step that is
launched before they have arrived. On a device that is none of these (`cpu`, for tests) the same
code runs without graphs.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np
import torch

from octavo_engine.backends.torch import memory
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
    compiling_side_by_side,
    step_of,
    warm_up_steps,
)
from octavo_engine.backends.torch.cuda_loader import CudaLoader
from octavo_engine.backends.torch.cuda_ops import Context, CudaOps
from octavo_engine.backends.torch.device_kv import DeviceKV
from octavo_engine.backends.torch.device_sampler import is_plain, sample
from octavo_engine.backends.torch.device_step import (
    StepBuffer,
    StepSizes,
    cut_tiles,
    cut_walks,
    is_decode,
)
from octavo_engine.backends.torch.graphs import (
    MIXED_TOKENS,
    Buckets,
    GraphCache,
    choose_bucket,
    mixed_sizes,
    plan_buckets,
)
from octavo_engine.backends.torch.kernels import choose_kernels
from octavo_engine.backends.torch.kv_format import settle_kv_format
from octavo_engine.backends.torch.landing import Landing, marks_of
from octavo_engine.backends.torch.packed import Format
from octavo_engine.backends.torch.parking import Parking
from octavo_engine.backends.torch.ropes import DeviceRopeTables
from octavo_engine.backends.torch.token_counts import TokenCounts
from octavo_engine.backends.torch.upload import Uploader
from octavo_engine.caches import one_group
from octavo_engine.errors import ConfigError, ModelError
from octavo_engine.models.grouped_experts import ExpertChoice
from octavo_engine.models.registry import build_model
from octavo_engine.sampling.batch import SamplingBatch
from octavo_engine.sampling.rows import new_table

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from octavo_engine.backends.backend import BackendLimits, BackendStep, CompileListener
    from octavo_engine.backends.torch.device_step import DeviceStep, StepTiles
    from octavo_engine.backends.torch.graphs import GraphRecorder
    from octavo_engine.backends.torch.kernels import Kernels
    from octavo_engine.backends.torch.landing import Landed
    from octavo_engine.backends.torch.memory import DeviceMemory
    from octavo_engine.config import AttentionBackend, KernelChoice, KVCacheDType
    from octavo_engine.models.config import ModelConfig
    from octavo_engine.ops import Model
    from octavo_engine.sampling.batch import Sampled
    from octavo_engine.weights.checkpoint import Checkpoint

MAX_GRAPHS = 48

logger = logging.getLogger(__name__)


class Loaded(NamedTuple):
    """A model, and its weights as something that can be parked."""

    model: Model
    parking: Parking
    expanded_bytes: int  # of the largest quantised weight, if a step expands it


Load: TypeAlias = "Callable[[Callable[[int, int], None] | None], Loaded]"


def _check_kernels(config: ModelConfig, kernels: Kernels) -> None:
    """Raises ModelError where only plain torch and the CPU compute a model's attention."""
    block = config.block
    refused = None
    if config.latent is not None:
        refused = "latent attention"
    elif config.experts is not None and config.experts.routing != ExpertChoice():
        refused = "experts that are chosen by groups or sigmoids"
    elif config.family.has_sinks:
        refused = "attention with sinks"
    if refused is not None:
        raise ModelError(
            f"config.json: {config.architecture} needs {refused}, which this device does not "
            "compute; use --device cpu, or --model-impl transformers"
        )
    what = None
    if block.positions == "alibi":
        what = "attention with linear biases"
    elif block.qk_norm != "none" and block.qk_norm_after_rope:
        what = "queries and keys that are normed after their rope"
    if what is not None and kernels.name != "plain":
        raise ModelError(
            f"config.json: {config.architecture} needs {what}, which the {kernels.name} kernels do "
            "not compute; --device cpu does, and so does --kernels plain"
        )


class CudaBackend:
    """A model on one device."""

    def __init__(
        self,
        config: ModelConfig,
        checkpoint: Checkpoint,
        *,
        max_model_len: int,
        dtype: torch.dtype = torch.bfloat16,
        device: str = "cuda",
        kernels: KernelChoice = "auto",
        attention: AttentionBackend = "auto",
        use_graphs: bool = True,
        batch_invariant: bool = False,
        keep_quantized: bool = True,
        label: str = "cuda",
        memory_of: Callable[[], DeviceMemory | None] | None = None,
        kv_cache_dtype: KVCacheDType = "auto",
        has_tiers: bool = False,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Weights that the file holds quantised stay so by default. `memory_of` is how
        much memory a device has that is neither a GPU nor the host. `has_tiers`: copies of KV
        blocks need memory too."""
        settled = open_device(device)
        chosen = choose_kernels(
            settled, dtype, config,
            choice=kernels, attention=attention, batch_invariant=batch_invariant,
        )  # fmt: skip
        _check_kernels(config, chosen)
        formats = chosen.formats if keep_quantized else frozenset[Format]()

        def load(progress: Callable[[int, int], None] | None) -> Loaded:
            with Uploader(settled) as uploader:
                loader = CudaLoader(checkpoint, uploader, dtype, progress, formats=formats)
                model = build_model(config, loader, max_model_len)
                loader.finish()
            largest = memory.expanded_bytes(loader.made, dtype.itemsize)
            return Loaded(model, Parking(loader.made), largest)

        loaded = load(progress)
        self._init(
            config, loaded.model, settled, dtype, chosen,
            use_graphs=use_graphs, label=label, memory_of=memory_of,
            parking=loaded.parking, load=load, expanded_bytes=loaded.expanded_bytes,
            kv_cache_dtype=kv_cache_dtype, has_tiers=has_tiers,
        )  # fmt: skip

    @classmethod
    def of_model(
        cls,
        config: ModelConfig,
        model: Model,
        *,
        dtype: torch.dtype,
        device: torch.device,
        kernels: KernelChoice = "auto",
        attention: AttentionBackend = "auto",
        use_graphs: bool = True,
        batch_invariant: bool = False,
        kv_cache_dtype: KVCacheDType = "auto",
    ) -> CudaBackend:
        """A model whose weights are on the device already; for measuring without files."""
        backend = cls.__new__(cls)
        chosen = choose_kernels(
            device, dtype, config,
            choice=kernels, attention=attention, batch_invariant=batch_invariant,
        )  # fmt: skip
        _check_kernels(config, chosen)
        backend._init(
            config, model, device, dtype, chosen,
            use_graphs=use_graphs, kv_cache_dtype=kv_cache_dtype,
        )  # fmt: skip
        return backend

    def _init(
        self,
        config: ModelConfig,
        model: Model,
        device: torch.device,
        dtype: torch.dtype,
        kernels: Kernels,
        *,
        use_graphs: bool,
        label: str = "cuda",
        memory_of: Callable[[], DeviceMemory | None] | None = None,
        parking: Parking | None = None,
        load: Load | None = None,
        expanded_bytes: int = 0,
        kv_cache_dtype: KVCacheDType = "auto",
        has_tiers: bool = False,
    ) -> None:
        self.config = config
        self.cache_layout = one_group(config.caches())  # as DeviceKV has it
        self.device = device
        self._label = label
        self._memory_of = memory_of
        self._model: Model | None = model
        self._dtype = dtype
        self._kernels = kernels
        self._kv_format = settle_kv_format(
            kv_cache_dtype, dtype, self.cache_layout,
            has_e4m3="fp8" in kernels.formats, reads_scales=kernels.reads_scales,
        )  # fmt: skip
        self._has_tiers = has_tiers
        self._copies: SlotCopies | None = None
        self._use_graphs = use_graphs and device.type == "cuda" and self._kernels.can_capture
        self._recorder: GraphRecorder[tuple[Tensor, Tensor]] = CudaRecorder(device)
        self._make_mark = marks_of(device)
        self._landing = Landing(device, lambda: self._make_mark())
        self._parking, self._load = parking, load
        self._expanded_bytes = expanded_bytes
        self._context: Context | None = None
        self._buffer: StepBuffer | None = None
        self._counts: TokenCounts | None = None
        self._graphs: GraphCache[tuple[Tensor, Tensor]] | None = None
        self._buckets = Buckets([], {})
        self._limits: BackendLimits | None = None
        self._num_blocks = 0
        self._is_awake = True
        self._hooks: CompileHooks | None = None
        self._kept: tuple[Tensor, Tensor] | None = None  # logits, and what was drawn of them

    @property
    def name(self) -> str:
        dtype = str(self._dtype).removeprefix("torch.")
        return f"{self._label}/{dtype}/{self._kernels.name}"

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
        return self.cache_layout.page_bytes(self._kv_format.bytes_of)

    def kv_memory(self, limits: BackendLimits, fraction: float | None) -> int | None:
        """As the protocol says. Raises ConfigError if nothing is left."""
        if self.device.type == "cuda":
            free = memory.device_memory(self.device).free_bytes
        elif self._memory_of is None:  # a CPU in a test: its memory is the host's
            return None
        else:
            device = self._memory_of()
            if device is None:  # then only --kv-cache-memory-bytes can say
                return 0
            free = device.free_bytes
        workspace = self._kernels.workspace_bytes(limits) + self._expanded_bytes
        needed = memory.step_bytes(self.config, limits, self._dtype.itemsize) + workspace
        needed += memory.count_bytes(self.config, limits)
        if self._has_tiers:
            needed += count_slots(limits, self.kv_bytes_per_block) * self.kv_bytes_per_block
        if self._use_graphs:
            # Graphs have memory of their own.
            needed += workspace + memory.graph_bytes(
                self.config, limits, self._dtype.itemsize,
                num_graphs=self._plan_buckets(limits).total, max_tokens=MIXED_TOKENS[-1],
            )  # fmt: skip
        return memory.kv_budget(free, needed, fraction=fraction or memory.DEVICE_FRACTION)

    def prepare(self, limits: BackendLimits, num_blocks: int) -> None:
        self._limits, self._num_blocks = limits, num_blocks
        self._buffer = StepBuffer(
            limits, self.device, lambda: self._make_mark(), self._kernels.walks
        )
        self._counts = TokenCounts(limits.max_seqs, self.config.vocab_size, self.device)
        self._buckets = self._plan_buckets(limits)
        self._graphs = GraphCache(self._recorder, max_graphs=MAX_GRAPHS)
        if self.device.type == "cuda":
            memory.require(self.device, num_blocks * self.kv_bytes_per_block)
        self.restore_kv()
        if self._use_graphs:
            rows = (limits.max_seqs, self.config.vocab_size)
            self._kept = (
                torch.empty(rows, device=self.device),
                torch.empty((2, limits.max_seqs), dtype=torch.int32, device=self.device),
            )

    def warm_up(self, listener: CompileListener) -> None:
        """As `executor.WarmsUp`. Plain kernels are compiled already."""
        if not self._kernels.can_capture:
            return
        if self.device.type == "cuda":
            with compiling_side_by_side() as is_possible:
                if is_possible:
                    self._launch_warm_up()
        self._launch_warm_up()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        if self._hooks is None:
            self._hooks = CompileHooks(listener)

    def _launch_warm_up(self) -> None:
        assert self._limits is not None, "prepare() comes first"
        experts = self.config.experts
        wide = 0 if experts is None else self._kernels.wide_tokens(experts)
        for shape in warm_up_steps(self._limits, expert_tokens=wide):
            longest = self._limits.max_model_len if shape.is_long else shape.num_tokens
            with torch.inference_mode():
                self._launch_all(
                    step_of(shape), _greedy(shape.num_seqs), max_seq_len=longest, draws=True
                )

    def execute(self, step: BackendStep, sampling: SamplingBatch) -> Sampled:
        return self.launch(step, sampling).wait()

    def launch(self, step: BackendStep, sampling: SamplingBatch) -> Landed:
        assert self._context is not None and self._buffer is not None, "prepare() comes first"
        with torch.inference_mode():
            self._context.kv.copy(step.copies)
            is_simple = not len(step.logit_rows) or is_plain(sampling)
            logits, found, sizes = self._compute(step, sampling, draws=is_simple)
            scores = None
            if not is_simple:
                params = self._buffer.draw_params(sizes).first(len(logits))
                assert self._counts is not None
                found, scores = sample(logits, sampling, params, self._kernels.draw, self._counts)
            return self._landing.begin(found, scores)

    def logits(self, step: BackendStep) -> NDArray[np.float32]:
        """Compute the step; the logits of the wanted rows, [S, vocabulary], for tests."""
        assert self._context is not None, "prepare() comes first"
        with torch.inference_mode():
            self._context.kv.copy(step.copies)
            logits, _, _ = self._compute(step, _greedy(len(step.logit_rows)), draws=False)
            values: NDArray[np.float32] = logits.cpu().numpy()
            return values

    def poison_blocks(self, block_ids: list[int]) -> None:
        assert self._context is not None, "prepare() comes first"
        self._context.kv.poison(block_ids)

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

    def build_digest(self) -> bytes:
        return digest_build(self.isa, self._kernels)

    def release_kv(self) -> None:
        """As `executor.ReleasesKV`. Graphs know addresses of what goes, so they go too."""
        if self._copies is not None:
            self._copies.release()
        self._context = None
        if self._counts is not None:
            self._counts.forget()
        self._forget_graphs()

    def restore_kv(self) -> None:
        if self._context is not None:
            return
        limits = self._limits
        assert limits is not None, "prepare() comes first"
        kv = DeviceKV(
            self.cache_layout, num_blocks=self._num_blocks, dtype=self._kv_format.dtype,
            device=self.device, has_scales=self._kv_format.has_scales,
        )  # fmt: skip
        ropes = DeviceRopeTables(limits.max_model_len, self.device)
        self._context = Context(self._kernels, kv, ropes, self._dtype)
        if self._copies is not None:
            self._copies.restore()

    def release_weights(self, *, keep: bool) -> None:
        """As `executor.ReleasesWeights`. Weights that came from no file are kept in any case."""
        if self._parking is None or not self._is_awake:
            return
        self._is_awake = False
        if keep or self._load is None:
            self._parking.park()
        else:
            self._model = self._parking = None
        self._forget_graphs()

    def restore_weights(self) -> None:
        if self._is_awake:
            return
        if self._parking is not None:
            self._parking.unpark()
        elif self._load is not None:
            self._model, self._parking, _ = self._load(None)
        self._is_awake = True

    def close(self) -> None:
        if self._hooks is not None:
            self._hooks.remove()
            self._hooks = None
        self._forget_graphs()
        self._graphs = self._context = self._buffer = self._model = self._kept = None
        self._counts = None
        self._parking = self._load = None
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _kv(self) -> DeviceKV:
        assert self._context is not None, "prepare() comes first"
        return self._context.kv

    def _plan_buckets(self, limits: BackendLimits) -> Buckets:
        return plan_buckets(limits, MAX_GRAPHS, has_mixed=self._kernels.can_capture_prompts)

    def _forget_graphs(self) -> None:
        if self._graphs is not None:
            self._graphs.clear()
        if isinstance(self._recorder, CudaRecorder):
            self._recorder.reset()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _compute(
        self, step: BackendStep, sampling: SamplingBatch, *, draws: bool
    ) -> tuple[Tensor, Tensor, StepSizes]:
        """Logits, what was drawn of them as they are, and how the step was laid out. Without
        `draws` nobody wants to know; only a graph does it all the same."""
        assert self._buffer is not None and self._graphs is not None and self._limits is not None
        buffer, is_decode_step = self._buffer, is_decode(step)
        num_rows = len(step.logit_rows)
        sizes = self._bucket(step, is_decode=is_decode_step)
        if sizes is None:
            longest = int(step.seq_lens.max(initial=0))
            return self._launch_all(step, sampling, max_seq_len=longest, draws=draws)
        # A graph must serve every length that is still to come.
        longest = self._limits.max_model_len

        def work() -> tuple[Tensor, Tensor]:
            view = buffer.step(sizes, is_decode=is_decode_step, max_seq_len=longest, host=None)
            return self._keep(view, sizes)

        tiles = self._cut(step, sizes, is_decode=is_decode_step)
        buffer.send(buffer.fill(step, sampling, tiles, sizes, draws_later=not draws))
        # Sizes alone do not tell the two kinds apart.
        logits, found = self._graphs.run(sizes.seqs if is_decode_step else sizes, work)
        return logits[:num_rows], found[:, :num_rows], sizes

    def _launch_all(
        self, step: BackendStep, sampling: SamplingBatch, *, max_seq_len: int, draws: bool
    ) -> tuple[Tensor, Tensor, StepSizes]:
        """The step as it is, operation by operation."""
        assert self._buffer is not None
        is_decode_step = is_decode(step)
        tiles = self._cut(step, None, is_decode=is_decode_step)
        sizes = StepSizes(
            len(step.token_ids), len(step.seq_lens), len(step.logit_rows), len(tiles.seqs)
        )
        fill = self._buffer.fill(step, sampling, tiles, sizes, draws_later=not draws)
        self._buffer.send(fill)
        view = self._buffer.step(
            sizes, is_decode=is_decode_step, max_seq_len=max_seq_len, host=step
        )
        return *self._forward(view, sizes, draws=draws), sizes

    def _cut(self, step: BackendStep, sizes: StepSizes | None, *, is_decode: bool) -> StepTiles:
        """Attention's programs, of padding up to `sizes` too."""
        if is_decode:
            return cut_walks(step.seq_lens, self._kernels.walks.spare_parts)
        starts = step.seq_starts if sizes is None else np.append(step.seq_starts, sizes.tokens)
        return cut_tiles(starts, self._kernels.tokens_per_tile)

    def _bucket(self, step: BackendStep, *, is_decode: bool) -> StepSizes | None:
        """What the step is padded to, so that a graph may hold it; None: it is launched as is."""
        if not self._use_graphs:
            return None
        if is_decode:
            bucket = choose_bucket(self._buckets.decode, len(step.logit_rows))
            spare = self._kernels.walks.spare_parts
            return None if bucket is None else StepSizes.of_decode(bucket, spare)
        if not self._kernels.can_capture_prompts or not len(step.logit_rows):
            return None
        return mixed_sizes(step, self._buckets, tokens_per_tile=self._kernels.tokens_per_tile)

    def _keep(self, step: DeviceStep, sizes: StepSizes) -> tuple[Tensor, Tensor]:
        """Results in memory that all graphs share; their own is for what is gone after a step."""
        assert self._kept is not None
        logits, found = self._forward(step, sizes, draws=True)
        num_rows = len(logits)
        return self._kept[0][:num_rows].copy_(logits), self._kept[1][:, :num_rows].copy_(found)

    def _forward(self, step: DeviceStep, sizes: StepSizes, *, draws: bool) -> tuple[Tensor, Tensor]:
        """Logits, and what is drawn of them; the draw keeps the tokens for the step behind."""
        assert self._context is not None and self._buffer is not None
        assert self._model is not None, "the weights sleep"
        ops = CudaOps(step, self._context)
        logits = self._model.forward(ops)
        assert isinstance(logits, torch.Tensor)
        logits = logits.float()
        if not draws:
            return logits, logits.new_empty((2, len(logits)), dtype=torch.int32)
        params = self._buffer.draw_params(sizes, with_step=True)
        return logits, self._kernels.draw(logits, params)


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
