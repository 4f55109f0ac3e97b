"""What drafts for a model on the same device: its weights, its layers' place in the cache, and its
programs, whose steps lie in the model's own buffer.

Passes follow one another without the host: each reads its token from the word that the one before
left it in, as a step that is launched ahead does. Hidden states stay on the device, too.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, cast

import torch

from octavo_engine.backends.backend import BackendLimits, draft_limits
from octavo_engine.backends.draft_part import LaterLayers
from octavo_engine.backends.head_files import build_heads
from octavo_engine.backends.torch import memory
from octavo_engine.backends.torch.cuda_loader import CudaLoader
from octavo_engine.backends.torch.cuda_ops import Context, CudaDraftOps, CudaOps
from octavo_engine.backends.torch.device_step import WalkCut
from octavo_engine.backends.torch.few_steps import FewSteps, plan_few
from octavo_engine.backends.torch.graphs import Buckets, GraphCache, decode_buckets
from octavo_engine.backends.torch.packed import Format
from octavo_engine.backends.torch.parking import Parking
from octavo_engine.backends.torch.programs import Program, StateRows
from octavo_engine.backends.torch.upload import Uploader
from octavo_engine.config import MAX_SPECULATION
from octavo_engine.models.draft_head import build_draft_head
from octavo_engine.models.mlp_speculator import MlpSpeculatorConfig
from octavo_engine.models.registry import build_model
from octavo_engine.ops import HIDDEN, STATE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from octavo_engine.backends.draft_sources import DraftSources
    from octavo_engine.backends.head_files import Heads
    from octavo_engine.backends.torch.cuda_settings import CudaSettings
    from octavo_engine.backends.torch.device_step import DeviceStep
    from octavo_engine.backends.torch.graphs import GraphRecorder
    from octavo_engine.caches import CacheSpec
    from octavo_engine.models.config import ModelConfig
    from octavo_engine.models.draft_head import DraftHead
    from octavo_engine.ops import DraftOps, Loader, Model, Ops, Value

    Drafting: TypeAlias = "Model | DraftHead | Heads"

PER_DOUBLING = 2  # sizes of a pass for one token of each sequence
MODEL, FIRST, NEXT = "model", "first", "next"  # programs; heads' have their numbers


class WarmProgram(NamedTuple):
    """A program, and the largest steps that it meets."""

    program: Program
    config: ModelConfig
    limits: BackendLimits
    provide: Callable[[int], None]  # the states of so many rows


class DeviceDrafts:
    """A draft model, a head with layers of its own, or heads without."""

    def __init__(
        self,
        config: ModelConfig,
        sources: DraftSources,
        model: Model,
        device: torch.device,
        settings: CudaSettings,
        max_model_len: int,
    ) -> None:
        """Loads the weights; `model` is what it drafts for."""
        assert sources.is_any, "nothing drafts"
        self._sources, self._config = sources, config
        self._first_layer = len(config.caches())
        self._device, self._dtype, self._max_model_len = device, settings.dtype, max_model_len
        self._shape = config
        self.keeps: tuple[str, ...] = ()  # what of the model's own steps it drafts from
        if sources.model is not None:
            self._shape = sources.model.config
        elif sources.head is not None:
            self._shape, self.keeps = sources.head.config.layers, sources.head.config.kept_names
        else:
            self.keeps = (HIDDEN,)
        self._kernels = settings.kernels_for(self._shape, device)
        self._token_ids = self._known_tokens()
        self._context: Context | None = None
        self._programs: dict[str | int, Program] = {}
        self._graphs: GraphCache[tuple[Tensor, Tensor]] | None = None
        self._kept: StateRows | None = None  # of the model's step
        self._given: dict[str | int, StateRows] = {}  # to each program
        self._left: StateRows | None = None  # by the program that ran last
        self._parking: Parking | None = None
        self._drafting: Drafting | None = None
        self._load(model)

    @property
    def has_model(self) -> bool:
        return self._sources.model is not None

    @property
    def has_head(self) -> bool:
        return self._sources.head is not None

    @property
    def num_heads(self) -> int:
        return 0 if self._sources.heads is None else self._sources.heads.num_heads

    @property
    def caches(self) -> tuple[CacheSpec, ...]:
        """What its layers remember, behind the model's."""
        return () if self.num_heads else tuple(self._shape.caches())

    def program(self, name: str | int) -> Program:
        return self._programs[name]

    def warm_programs(self, limits: BackendLimits) -> Iterator[WarmProgram]:
        """Passes for single tokens need no steps like prompts."""
        whole = draft_limits(limits)
        for name, program in self._programs.items():
            own = whole
            if name not in (MODEL, FIRST):
                seqs = MAX_SPECULATION if self.num_heads else limits.max_seqs
                seqs = min(seqs, limits.max_seqs)
                own = dataclasses.replace(whole, max_tokens=seqs, max_seqs=seqs, max_model_len=1)

            def provide(num_rows: int, name: str | int = name) -> None:
                self.give(name, None, num_rows)

            yield WarmProgram(program, self._shape, own, provide)

    def walks_beside(self, walks: WalkCut) -> WalkCut:
        """What suffices for its steps and for those of the model."""
        own = self._kernels.walks
        return WalkCut(max(walks.spare_parts, own.spare_parts), max(walks.num_heads, own.num_heads))

    @property
    def max_few(self) -> int:
        """Tokens of the largest pass over a few of each sequence."""
        return max((program.few.max_tokens for program in self._programs.values()), default=0)

    def needed_bytes(
        self, limits: BackendLimits, num_drafts: int, captured_tokens: int, *, use_graphs: bool
    ) -> int:
        """What its largest step, its graphs and hidden states take, beside weights and KV;
        `captured_tokens`: of the model's largest captured step."""
        own, shape, itemsize = self._own_limits(limits), self._shape, self._dtype.itemsize
        few = plan_few(own, self._kernels, num_drafts)
        workspace = self._kernels.workspace_bytes(own) + self._expanded_bytes
        workspace = max(workspace, self._kernels.few_bytes(few.max_tokens, few.width))
        needed = memory.step_bytes(self._wide(shape), own, itemsize) + workspace
        # States of a step's tokens, once as the model left them and once as they are taken; and
        # where graphs leave and find them.
        num_rows = 2 * limits.max_tokens + 3 * captured_tokens
        needed += num_rows * self._kept_columns * itemsize
        if use_graphs:
            needed += workspace + memory.graph_bytes(
                self._wide(shape), own, itemsize,
                num_graphs=self._num_graphs(own, few),
                max_tokens=few.max_tokens, max_logits=few.max_tokens,
            )  # fmt: skip
        return needed

    def prepare(
        self,
        limits: BackendLimits,
        num_drafts: int,
        captured_tokens: int,
        recorder: GraphRecorder[tuple[Tensor, Tensor]],
    ) -> None:
        """`captured_tokens`: of the model's largest captured step."""
        own = self._own_limits(limits)
        few = plan_few(own, self._kernels, num_drafts)
        buckets = _buckets(own)
        graphs = GraphCache(recorder, max_graphs=self._num_graphs(own, few))
        self._graphs = graphs
        few_rows = max(few.max_tokens, own.max_seqs)

        def add(name: str | int, forward: Callable[[DeviceStep], Tensor], few: FewSteps) -> None:
            self._programs[name] = Program(forward, self._kernels, buckets, few, graphs, name)

        if self.has_model:
            add(MODEL, self._model_logits, few)
        elif self.has_head:
            add(FIRST, lambda step: self._head_logits(step, is_first=True), few)
            add(NEXT, lambda step: self._head_logits(step, is_first=False), FewSteps())
            self._given = {
                FIRST: self._rows(few_rows, self._kept_columns),
                NEXT: self._rows(few_rows, self._state_columns),
            }
        else:
            for head in range(self.num_heads):
                self._add_head(add, head, own.max_seqs)
        if self.keeps:
            self._kept = self._rows(captured_tokens, self._kept_columns)
            self._left = self._rows(few_rows, self._state_columns)

    def _add_head(
        self,
        add: Callable[[str | int, Callable[[DeviceStep], Tensor], FewSteps], None],
        head: int,
        num_rows: int,
    ) -> None:
        add(head, lambda step: self._heads_logits(step, head), FewSteps())
        columns = self._state_columns if head else self._kept_columns
        self._given[head] = self._rows(num_rows, columns)

    def _rows(self, num_rows: int, columns: int) -> StateRows:
        return StateRows(num_rows, columns, self._dtype, self._device)

    def are_usual(self) -> bool:
        """As `LaunchesDrafts`."""
        return self._graphs is None or self._graphs.take_usual()

    # ── hidden states ──

    def begin_step(self) -> None:
        """A step of the model is about to be launched."""
        if self._kept is not None:
            self._kept.begin()

    def keep(self, ops: CudaOps, step: DeviceStep) -> None:
        """What the model's step, or the recording of it, leaves to draft from."""
        if self._kept is not None:
            found = [ops.kept(name).to(self._dtype) for name in self.keeps]
            rows = found[0] if len(found) == 1 else torch.cat(found, dim=1)
            self._kept.leave(rows, is_captured=step.host is None)

    def kept_rows(self, places: Tensor) -> Tensor:
        """Copies of what the last step left of some of its tokens, or rows of logits."""
        assert self._kept is not None, "no step was computed"
        return self._kept.last().index_select(0, places)

    def give(self, name: str | int, states: Tensor | None, num_rows: int) -> None:
        """What a program is to read next; None: anything."""
        if self._left is not None:
            self._left.begin()
        if (given := self._given.get(name)) is not None:
            given.give(given.anything(num_rows) if states is None else states)

    def left_rows(self, num_rows: int) -> Tensor:
        """A copy of what the last program left for the next."""
        assert self._left is not None, "no program ran"
        return self._left.last()[:num_rows].clone()

    @property
    def leaves_states(self) -> bool:
        """Heads of Medusa leave none: all draft from the model's."""
        heads = self._sources.heads
        return heads is None or isinstance(heads.config, MlpSpeculatorConfig)

    @property
    def _kept_columns(self) -> int:
        return len(self.keeps) * self._config.hidden_size

    @property
    def _state_columns(self) -> int:
        """Of what a program leaves for the next."""
        heads = self._sources.heads
        if heads is not None and isinstance(heads.config, MlpSpeculatorConfig):
            return heads.config.inner_size
        return self._shape.hidden_size

    # ── programs ──

    def _ops(self, step: DeviceStep, name: str | int) -> CudaDraftOps:
        assert self._context is not None and self._drafting is not None, "the weights sleep"
        given = self._given.get(name)
        states = None
        if given is not None:
            states = given.taken(len(step.token_ids), is_captured=step.host is None)
        return CudaDraftOps(step, self._context, states)

    def _model_logits(self, step: DeviceStep) -> Tensor:
        ops = cast("Ops", LaterLayers(cast("Ops", self._ops(step, MODEL)), self._first_layer))
        return self._spread(cast("Model", self._drafting).forward(ops))

    def _head_logits(self, step: DeviceStep, *, is_first: bool) -> Tensor:
        own = self._ops(step, FIRST if is_first else NEXT)
        ops = cast("DraftOps", LaterLayers(cast("Ops", own), self._first_layer))
        head = cast("DraftHead", self._drafting)
        logits = head.first(ops) if is_first else head.next(ops)
        self._leave(own, step)
        return self._spread(logits)

    def _heads_logits(self, step: DeviceStep, head: int) -> Tensor:
        ops = self._ops(step, head)
        logits = cast("Heads", self._drafting).forward(cast("DraftOps", ops), head)
        if self.leaves_states:
            self._leave(ops, step)
        return self._spread(logits)

    def _leave(self, ops: CudaOps, step: DeviceStep) -> None:
        assert self._left is not None
        rows = ops.kept(STATE).to(self._dtype)
        self._left.leave(rows, is_captured=step.host is None)

    def _spread(self, found: Value) -> Tensor:
        """Over the model's vocabulary; what is not known is not drafted."""
        assert isinstance(found, torch.Tensor)
        logits = found.float()
        if self._token_ids is None:
            return logits
        whole = logits.new_full((len(logits), self._config.vocab_size), -torch.inf)
        return whole.index_copy_(1, self._token_ids, logits)

    def _known_tokens(self) -> Tensor | None:
        part = self._sources.head or self._sources.heads
        if part is None or part.token_ids is None:
            return None
        return torch.from_numpy(part.token_ids).long().to(self._device)

    # ── memory and weights ──

    def _own_limits(self, limits: BackendLimits) -> BackendLimits:
        """Of its largest step."""
        if not self.num_heads:
            return draft_limits(limits)
        rows = min(MAX_SPECULATION, limits.max_seqs)
        return dataclasses.replace(limits, max_tokens=rows, max_seqs=rows, max_logit_rows=rows)

    def _wide(self, shape: ModelConfig) -> ModelConfig:
        """Its logits are of the model's vocabulary, whatever it knows of it."""
        return dataclasses.replace(shape, vocab_size=self._config.vocab_size)

    def _num_graphs(self, limits: BackendLimits, few: FewSteps) -> int:
        num_programs = max(1, self.num_heads, 2 * self.has_head)
        has_few = 0 if self.num_heads else len(few.buckets)
        return num_programs * _buckets(limits).total + has_few

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
            self._drafting = self._parking = None

    def restore_weights(self, model: Model) -> None:
        if self._parking is not None:
            self._parking.unpark()
        else:
            self._load(model)

    def forget_graphs(self) -> None:
        if self._graphs is not None:
            self._graphs.clear()

    def _load(self, model: Model) -> None:
        part = self._sources.model or self._sources.head or self._sources.heads
        assert part is not None
        packs = part.quantization != "none"
        formats = self._kernels.formats if packs else frozenset[Format]()
        with Uploader(self._device) as uploader:
            loader = CudaLoader(part.checkpoint, uploader, self._dtype, formats=formats)
            self._drafting = self._build(cast("Loader", loader), model)
            loader.finish()
        self._parking = Parking(loader.made)
        self._expanded_bytes = memory.expanded_bytes(loader.made, self._dtype.itemsize)

    def _build(self, loader: Loader, model: Model) -> Drafting:
        sources = self._sources
        if sources.model is not None:
            return build_model(sources.model.config, loader, self._max_model_len)
        if sources.head is not None:
            return build_draft_head(sources.head.config, loader, model, self._max_model_len)
        assert sources.heads is not None
        return build_heads(sources.heads, loader)


def _buckets(limits: BackendLimits) -> Buckets:
    """Passes for prompts are launched."""
    return Buckets(decode_buckets(limits.max_seqs, PER_DOUBLING), {})
