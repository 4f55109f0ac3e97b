"""What drafts for a model on the same device: its weights, its layers' place in the cache, and its
programs, whose steps lie in the model's own buffer.

Passes follow one another without the host: each reads its token from the word that the one before
left it in, as a step that is launched ahead does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch

from octavo_engine.backends.backend import draft_limits
from octavo_engine.backends.draft_part import forward_later
from octavo_engine.backends.torch import memory
from octavo_engine.backends.torch.cuda_loader import CudaLoader
from octavo_engine.backends.torch.cuda_ops import Context, CudaOps
from octavo_engine.backends.torch.device_step import WalkCut
from octavo_engine.backends.torch.few_steps import plan_few
from octavo_engine.backends.torch.graphs import Buckets, GraphCache, decode_buckets
from octavo_engine.backends.torch.packed import Format
from octavo_engine.backends.torch.parking import Parking
from octavo_engine.backends.torch.programs import Program
from octavo_engine.backends.torch.upload import Uploader
from octavo_engine.models.registry import build_model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from octavo_engine.backends.backend import BackendLimits
    from octavo_engine.backends.draft_part import DraftSources
    from octavo_engine.backends.torch.device_step import DeviceStep
    from octavo_engine.backends.torch.graphs import GraphRecorder
    from octavo_engine.backends.torch.kernels import Kernels
    from octavo_engine.caches import CacheSpec
    from octavo_engine.models.config import ModelConfig
    from octavo_engine.ops import Model, Ops

PER_DOUBLING = 2  # sizes of a pass for one token of each sequence


class DeviceDrafts:
    """A draft model."""

    def __init__(
        self,
        config: ModelConfig,
        sources: DraftSources,
        model: Model,
        device: torch.device,
        dtype: torch.dtype,
        kernels_of: Callable[[ModelConfig], Kernels],
        max_model_len: int,
    ) -> None:
        """Loads the weights; `model` is what it drafts for."""
        assert sources.model is not None, "nothing drafts"
        self._part = sources.model
        self._first_layer = len(config.caches())
        self._device, self._dtype, self._max_model_len = device, dtype, max_model_len
        self._kernels = kernels_of(self._part.config)
        self._expanded_bytes = 0
        self._context: Context | None = None
        self._program: Program | None = None
        self._graphs: GraphCache[tuple[Tensor, Tensor]] | None = None
        self._parking: Parking | None = None
        self._model: Model | None = None
        self._load(model)

    @property
    def has_model(self) -> bool:
        return True

    @property
    def caches(self) -> tuple[CacheSpec, ...]:
        """What its layers remember, behind the model's."""
        return tuple(self._part.config.caches())

    @property
    def model_program(self) -> Program:
        assert self._program is not None, "prepare() comes first"
        return self._program

    def programs(self) -> Iterator[tuple[Program, ModelConfig]]:
        yield self.model_program, self._part.config

    def walks_beside(self, walks: WalkCut) -> WalkCut:
        """What suffices for its steps and for those of the model."""
        own = self._kernels.walks
        return WalkCut(max(walks.spare_parts, own.spare_parts), max(walks.num_heads, own.num_heads))

    def needed_bytes(self, limits: BackendLimits, num_drafts: int, *, use_graphs: bool) -> int:
        """What its largest step and its graphs take, beside weights and KV."""
        own, shape, itemsize = draft_limits(limits), self._part.config, self._dtype.itemsize
        few = plan_few(own, self._kernels, num_drafts)
        workspace = self._kernels.workspace_bytes(own) + self._expanded_bytes
        workspace = max(workspace, self._kernels.few_bytes(few.max_tokens, few.width))
        needed = memory.step_bytes(shape, own, itemsize) + workspace
        if use_graphs:
            needed += workspace + memory.graph_bytes(
                shape, own, itemsize,
                num_graphs=_buckets(own).total + len(few.buckets),
                max_tokens=few.max_tokens, max_logits=few.max_tokens,
            )  # fmt: skip
        return needed

    def prepare(
        self,
        limits: BackendLimits,
        num_drafts: int,
        recorder: GraphRecorder[tuple[Tensor, Tensor]],
    ) -> None:
        own = draft_limits(limits)
        few = plan_few(own, self._kernels, num_drafts)
        buckets = _buckets(own)
        max_graphs = buckets.total + len(few.buckets)
        self._graphs = GraphCache(recorder, max_graphs=max_graphs)
        self._program = Program(self._logits_of, self._kernels, buckets, few, self._graphs)

    def are_usual(self) -> bool:
        """As `LaunchesDrafts`."""
        return self._graphs is None or self._graphs.take_usual()

    def restore_kv(self, model: Context) -> None:
        self._context = Context(self._kernels, model.kv, model.ropes, self._dtype)

    def release_kv(self) -> None:
        self._context = None

    def release_weights(self, *, keep: bool) -> None:
        """Without `keep` their files are read again."""
        assert self._parking is not None
        if keep:
            self._parking.park()
        else:
            self._model = self._parking = None

    def restore_weights(self, model: Model) -> None:
        if self._parking is not None:
            self._parking.unpark()
        else:
            self._load(model)

    def forget_graphs(self) -> None:
        if self._graphs is not None:
            self._graphs.clear()

    def _load(self, model: Model) -> None:
        packs = self._part.quantization != "none"
        formats = self._kernels.formats if packs else frozenset[Format]()
        with Uploader(self._device) as uploader:
            loader = CudaLoader(self._part.checkpoint, uploader, self._dtype, formats=formats)
            self._model = build_model(self._part.config, loader, self._max_model_len)
            loader.finish()
        self._parking = Parking(loader.made)
        self._expanded_bytes = memory.expanded_bytes(loader.made, self._dtype.itemsize)

    def _logits_of(self, step: DeviceStep) -> Tensor:
        assert self._context is not None and self._model is not None, "the weights sleep"
        ops = cast("Ops", CudaOps(step, self._context))
        logits = forward_later(self._model, ops, self._first_layer)
        assert isinstance(logits, torch.Tensor)
        return logits.float()


def _buckets(limits: BackendLimits) -> Buckets:
    """Passes for prompts are launched."""
    return Buckets(decode_buckets(limits.max_seqs, PER_DOUBLING), {})
