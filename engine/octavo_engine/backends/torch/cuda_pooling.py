"""Models that pool, on a GPU: whole texts packed without padding, pooled on the device, one row for
each text copied back while the next step computes.

Weights are 16 bits wide. Small steps are graphs, by buckets of tokens and of texts; larger ones
compute longer than their launches take.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from octavo_engine.backends.backend import BackendLimits
from octavo_engine.backends.pooling import make_step
from octavo_engine.backends.torch import memory
from octavo_engine.backends.torch.capture import CudaRecorder
from octavo_engine.backends.torch.compiling import ROW_CLASSES, CompileHooks, compiling_side_by_side
from octavo_engine.backends.torch.cuda import open_device
from octavo_engine.backends.torch.cuda_loader import CudaLoader, DeviceLinear
from octavo_engine.backends.torch.graphs import GraphCache
from octavo_engine.backends.torch.kernels import choose_kernels
from octavo_engine.backends.torch.landing import marks_of
from octavo_engine.backends.torch.packed import Format
from octavo_engine.backends.torch.parking import Parking
from octavo_engine.backends.torch.ropes import DeviceRopeTables
from octavo_engine.backends.torch.text_kernels import PlainTextKernels, TritonTextKernels
from octavo_engine.backends.torch.text_ops import TextOps
from octavo_engine.backends.torch.text_step import (
    TextBuffer,
    TextSizes,
    bucket_of,
    most_captured,
    text_buckets,
    token_buckets,
)
from octavo_engine.backends.torch.upload import Uploader
from octavo_engine.errors import ConfigError, ModelError
from octavo_engine.models.config import ModelConfig
from octavo_engine.models.grouped_experts import ExpertChoice
from octavo_engine.models.pooled import PooledModel

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from octavo_engine.backends.backend import CompileListener
    from octavo_engine.backends.pooling import PoolingStep
    from octavo_engine.backends.torch.graphs import GraphRecorder
    from octavo_engine.backends.torch.landing import StreamMark
    from octavo_engine.backends.torch.text_kernels import TextKernels
    from octavo_engine.backends.torch.text_step import TextStep
    from octavo_engine.config import KernelChoice
    from octavo_engine.models.config import ExpertsConfig
    from octavo_engine.models.pooling_config import PoolingConfig
    from octavo_engine.ops import ExpertNames, ExpertSizes, Loader, Names, Sizes
    from octavo_engine.weights.checkpoint import Checkpoint

MAX_GRAPHS = 48


@dataclass(frozen=True, slots=True)
class TextShape:
    """The widths of a body, as `memory.StepShape` wants them."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    experts: ExpertsConfig | None
    recurrent: None = None  # `check_pooled` refuses states

    @classmethod
    def of(cls, config: PoolingConfig) -> TextShape:
        body = config.page
        kv_heads, experts = body.num_heads, None
        if isinstance(body, ModelConfig):
            kv_heads, experts = body.num_kv_heads, body.experts
        return cls(
            body.hidden_size, body.intermediate_size, body.num_heads, kv_heads, body.head_dim,
            body.vocab_size, experts,
        )  # fmt: skip


def check_pooled(config: PoolingConfig, kernels_name: str) -> None:
    """Raises ModelError where only the CPU computes a body."""
    body = config.page
    if not isinstance(body, ModelConfig):
        return
    what = None
    if body.latent is not None:
        what = "latent attention"
    elif body.recurrent is not None or body.streams is not None:
        what = "recurrent states, or a residual of several streams"
    elif body.family.has_sinks:
        what = "attention with sinks"
    elif body.temperature is not None or any(layer.is_chunked for layer in body.layers):
        what = "attention in chunks, or by temperatures"
    elif body.experts is not None and body.experts.routing != ExpertChoice():
        what = "experts that are chosen by groups or sigmoids"
    elif kernels_name != "plain" and body.block.qk_norm != "none" and body.block.qk_norm_after_rope:
        what = "queries and keys that are normed after their rope"
    if what is not None:
        raise ModelError(
            f"config.json: {body.architecture} needs {what}, which --device cuda does not compute "
            "for embeddings and scores; use --device cpu"
        )


class WideLoader(CudaLoader):
    """Layers behind the pooling give float32, as a head does: of scores all bits are wanted."""

    wide: frozenset[str] = frozenset()

    def linear(
        self, names: Names, in_features: int, out_features: Sizes, *, bias: bool = False
    ) -> DeviceLinear:
        made = super().linear(names, in_features, out_features, bias=bias)
        if not isinstance(names, str) or names not in self.wide:
            return made
        return DeviceLinear(made.weight, made.bias, is_head=True)


class LandingRows:
    """Rows that are on their way to the host, or there."""

    def __init__(self, host: Tensor, mark: StreamMark, num_rows: int) -> None:
        self._host, self._mark, self._num_rows = host, mark, num_rows

    def wait(self) -> NDArray[np.float32]:
        self._mark.wait()
        rows: NDArray[np.float32] = self._host[: self._num_rows].numpy()
        return rows


class CudaPoolingBackend:
    """A model that pools, on one device."""

    _parking: Parking | None
    _load: Callable[[Callable[[int, int], None] | None], None] | None

    def __init__(
        self,
        config: PoolingConfig,
        checkpoint: Checkpoint,
        *,
        max_model_len: int,
        dtype: torch.dtype = torch.float16,
        device: str = "cuda",
        kernels: KernelChoice = "auto",
        use_graphs: bool = True,
        batch_invariant: bool = False,
        keep_quantized: bool = True,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        settled = open_device(device)
        self._start(config, settled, dtype, max_model_len, kernels, batch_invariant=batch_invariant)
        formats = self._kernels.formats if keep_quantized else frozenset[Format]()

        def load(progress: Callable[[int, int], None] | None) -> None:
            with Uploader(settled) as uploader:
                loader = WideLoader(checkpoint, uploader, dtype, progress, formats=formats)
                if not config.is_sparse:  # whose rows are as long as the vocabulary
                    loader.wide = frozenset(layer.name for layer in config.dense)
                self._take(PooledModel(config, loader, max_model_len), loader.made)
                loader.finish()
                self._parking = Parking(loader.made)

        self._load = load
        load(progress)
        self._use_graphs = use_graphs and self._can_capture

    @classmethod
    def of_loader(
        cls,
        config: PoolingConfig,
        loader: Loader,
        *,
        max_model_len: int,
        dtype: torch.dtype,
        device: torch.device,
        kernels: KernelChoice = "auto",
        use_graphs: bool = True,
    ) -> CudaPoolingBackend:
        """Weights that come from no file; for measuring."""
        backend = cls.__new__(cls)
        backend._start(config, device, dtype, max_model_len, kernels, batch_invariant=False)
        backend._load = None
        linears = NotingLoader(loader)
        backend._take(PooledModel(config, linears, max_model_len), linears.made)
        backend._use_graphs = use_graphs and backend._can_capture
        return backend

    def _start(
        self,
        config: PoolingConfig,
        device: torch.device,
        dtype: torch.dtype,
        max_model_len: int,
        choice: KernelChoice,
        *,
        batch_invariant: bool,
    ) -> None:
        self.config, self.device = config, device
        self._dtype, self._max_model_len = dtype, max_model_len
        self._shape = TextShape.of(config)
        self._kernels = choose_kernels(
            device, dtype, self._shape, choice=choice, batch_invariant=batch_invariant
        )
        check_pooled(config, self._kernels.name)
        self._text_kernels: TextKernels = PlainTextKernels()
        if self._kernels.name != "plain":
            self._text_kernels = TritonTextKernels(self._shape, dtype, max_text_len=max_model_len)
        body = config.page
        self._keeps_sums = isinstance(body, ModelConfig) or body.family == "modernbert"
        self._recorder: GraphRecorder[tuple[Tensor, Tensor]] = CudaRecorder(device)
        self._make_mark = marks_of(device)
        self._graphs: GraphCache[tuple[Tensor, Tensor]] | None = None
        self._buffer: TextBuffer | None = None
        self._kept: Tensor | None = None  # the results of graphs
        self._hooks: CompileHooks | None = None
        self._parking = None
        self._tokens: list[int] = []  # buckets
        self._texts: list[int] = []
        self._max_tokens = 0
        self._max_texts = 0
        self._is_awake = True
        self._use_graphs = False
        self._ropes = DeviceRopeTables(max_model_len, device)

    def _take(self, model: PooledModel, made: list[object]) -> None:
        """A model, and what it is made of."""
        self._model: PooledModel | None = model
        linears = [each for each in made if isinstance(each, DeviceLinear) and not each.is_head]
        num_values = sum(math.prod(each.weight.shape) for each in linears)
        self._layer_weights = num_values // self.config.page.num_layers
        self._expanded_bytes = memory.expanded_bytes(made, self._dtype.itemsize)

    @property
    def _can_capture(self) -> bool:
        return self.device.type == "cuda" and self._kernels.can_capture

    @property
    def name(self) -> str:
        dtype = str(self._dtype).removeprefix("torch.")
        return f"cuda/{dtype}/{self._kernels.name}"

    def prepare(self, *, max_tokens: int, max_texts: int) -> None:
        """Raises ConfigError where the largest step does not fit beside the weights."""
        max_texts = min(max_texts, max_tokens)
        self._max_tokens, self._max_texts = max_tokens, max_texts
        self._forget_graphs()
        if self._use_graphs:
            most = most_captured(layer_weights=self._layer_weights, max_tokens=max_tokens)
            self._tokens, self._texts = token_buckets(most), text_buckets(max_texts)
        if self.device.type == "cuda":
            self._require(self.needed_bytes())
        self._buffer = TextBuffer(
            max_tokens=max_tokens, max_texts=max_texts,
            tokens_per_tile=self._text_kernels.tokens_per_tile, device=self.device,
            make_mark=lambda: self._make_mark(),
        )  # fmt: skip
        self._graphs = GraphCache(self._recorder, max_graphs=MAX_GRAPHS)
        if self._tokens:
            self._kept = torch.empty((max_texts, self._num_columns), device=self.device)

    def needed_bytes(self) -> int:
        """The most that steps take beside the weights: the largest one's values, and what graphs
        keep."""
        needed = self._step_bytes(self._max_tokens) + self._expanded_bytes
        if self._tokens:
            num_graphs = min(MAX_GRAPHS, len(self._tokens) * len(self._texts))
            needed += self._step_bytes(self._tokens[-1]) + num_graphs * memory.GRAPH_BYTES
            needed += self._max_texts * self._num_columns * 4
        return needed

    def _step_bytes(self, num_tokens: int) -> int:
        limits = BackendLimits(
            max_tokens=num_tokens, max_seqs=1, max_logit_rows=0, max_model_len=self._max_model_len
        )
        itemsize = self._dtype.itemsize
        widest = max(
            self._shape.hidden_size, *(layer.out_features for layer in self.config.dense), 0
        )
        # Results for each token: as computed, after an activation, and in float32.
        results = num_tokens * widest * (2 * itemsize + 4)
        return memory.step_bytes(self._shape, limits, itemsize) + results

    @property
    def _num_columns(self) -> int:
        """Of a row for a text."""
        return self.config.num_columns

    def _require(self, needed: int) -> None:
        free = memory.device_memory(self.device).free_bytes
        if needed + memory.SPARE_BYTES > free:
            raise ConfigError(
                f"{free / 2**30:.2f} GiB of device memory are free after loading, and steps of "
                f"{self._max_tokens} tokens need {(needed + memory.SPARE_BYTES) / 2**30:.2f} GiB; "
                "lower --max-num-batched-tokens or --max-model-len, or free memory on the device"
            )

    def warm_up(self, listener: CompileListener) -> None:
        """As `executor.WarmsUp`."""
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
        """A step for each way in which products are cut, of one text and of as many as tokens."""
        per_token = any(task.startswith("token_") for task in self.config.tasks)
        for count in (1, *(rows + 1 for rows in ROW_CLASSES)):
            if count > self._max_tokens:
                break
            num_texts = min(count, self._max_texts)
            rest = count - (num_texts - 1)
            is_long = rest > self._max_model_len
            lengths = [1] * count if is_long else [1] * (num_texts - 1) + [rest]
            if len(lengths) > self._max_texts:
                break
            step = make_step([([0] * length, ()) for length in lengths], is_last=False)
            with torch.inference_mode():
                self._launch_all(step, None, is_per_token=False)
                if per_token:
                    self._launch_all(step, None, is_per_token=True)

    def pool(self, step: PoolingStep) -> NDArray[np.float32]:
        return self.launch(step, is_per_token=False).wait()

    def token_rows(self, step: PoolingStep) -> NDArray[np.float32]:
        return self.launch(step, is_per_token=True).wait()

    def launch(self, step: PoolingStep, *, is_per_token: bool) -> LandingRows:
        """As `LaunchesTexts`."""
        bucket = None
        if self._tokens and not is_per_token:
            bucket = bucket_of(
                step, self._tokens, self._texts,
                tokens_per_tile=self._text_kernels.tokens_per_tile,
            )  # fmt: skip
        num_rows = len(step.token_ids) if is_per_token else len(step.pooled_rows)
        with torch.inference_mode():
            rows = self._launch_all(step, bucket, is_per_token=is_per_token)[:num_rows]
            host = torch.empty(
                rows.shape, dtype=torch.float32, pin_memory=self.device.type == "cuda"
            )
            # Behind the step, and before whatever writes to the same memory next.
            host.copy_(rows, non_blocking=True)
            return LandingRows(host, self._make_mark(), num_rows)

    def _launch_all(
        self, step: PoolingStep, bucket: TextSizes | None, *, is_per_token: bool
    ) -> Tensor:
        assert self._buffer is not None and self._graphs is not None, "prepare() comes first"
        sizes = self._buffer.fill(step, bucket)
        seen = self._buffer.step(sizes, step if bucket is None else None)
        if bucket is None:
            return self._forward(seen, is_per_token=is_per_token).float()

        def work() -> tuple[Tensor, Tensor]:
            """Results in memory that all graphs share; `CudaRecorder` has pairs of them."""
            assert self._kept is not None
            rows = self._forward(seen, is_per_token=False)
            kept = self._kept[: len(rows)].copy_(rows)
            return kept, kept

        return self._graphs.run(bucket, work)[0]

    def _forward(self, step: TextStep, *, is_per_token: bool) -> Tensor:
        assert self._model is not None and self._is_awake, "the backend sleeps, or was closed"
        ops = TextOps(
            step, self._kernels, self._text_kernels, self._ropes, self._dtype,
            keeps_sums=self._keeps_sums,
        )  # fmt: skip
        model = self._model
        rows = model.forward_tokens(ops) if is_per_token else model.forward(ops)
        # A sum that nothing norms, such as the residual of a body without a last norm.
        formed = rows if isinstance(rows, torch.Tensor) else rows.form()
        assert isinstance(formed, torch.Tensor)
        return formed

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
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def restore_weights(self) -> None:
        if self._is_awake:
            return
        if self._parking is not None:
            self._parking.unpark()
        elif self._load is not None:
            self._load(None)
        self._is_awake = True

    def close(self) -> None:
        if self._hooks is not None:
            self._hooks.remove()
            self._hooks = None
        self._forget_graphs()
        self._graphs = self._buffer = self._kept = None
        self._model = self._parking = self._load = None
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _forget_graphs(self) -> None:
        if self._graphs is not None:
            self._graphs.clear()
        if isinstance(self._recorder, CudaRecorder):
            self._recorder.reset()


class NotingLoader:
    """A loader that keeps account of what it hands out, for those that do not."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader
        self.made: list[object] = []

    def embedding(self, name: str, rows: int, columns: int) -> object:
        return self._loader.embedding(name, rows, columns)

    def linear(
        self, names: Names, in_features: int, out_features: Sizes, *, bias: bool = False
    ) -> object:
        made = self._loader.linear(names, in_features, out_features, bias=bias)
        self.made.append(made)
        return made

    def experts(
        self, names: ExpertNames, in_features: int, out_features: ExpertSizes, *, bias: bool = False
    ) -> object:
        return self._loader.experts(names, in_features, out_features, bias=bias)

    def tied(self, embedding: object) -> object:
        return self._loader.tied(embedding)

    def vector(self, name: str, size: int, *, offset: float = 0.0) -> object:
        return self._loader.vector(name, size, offset=offset)
