"""The torch backend: a model executed at once, operation by operation."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from octavo_engine.backends.adapters import match_sites
from octavo_engine.backends.sampled import sample_rows
from octavo_engine.backends.torch.loader import TorchLoader
from octavo_engine.backends.torch.precision import Precision
from octavo_engine.backends.torch.reference import PagedKV, ReferenceOps, TorchPart
from octavo_engine.caches import group_layers
from octavo_engine.config import BLOCK_SIZE
from octavo_engine.models.registry import build_model

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from octavo_engine import _native
    from octavo_engine.backends.adapters import AdapterLimits, AdapterSite, SitePart
    from octavo_engine.backends.backend import BackendLimits, BackendStep
    from octavo_engine.backends.torch.reference import TorchAdapter
    from octavo_engine.models.config import ModelConfig
    from octavo_engine.ops import Model
    from octavo_engine.sampling.batch import Sampled, SamplingBatch
    from octavo_engine.weights.adapter import AdapterFiles
    from octavo_engine.weights.checkpoint import Checkpoint


class TorchBackend:
    """Weights and KV cache as torch tensors."""

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
    ) -> None:
        self.config = config
        self.cache_layout = group_layers(config.caches())
        self.precision = precision or Precision()
        self._num_threads = num_threads
        loader = TorchLoader(checkpoint, self.precision, progress)
        self._model: Model | None = build_model(config, loader, max_model_len)
        loader.finish()
        self._sites = loader.sites
        self._adapters: dict[int, TorchAdapter] = {}  # by slot
        self._kv: PagedKV | None = None
        self._team: _native.Team | None = None

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
        itemsize = self.precision.dtype.itemsize
        return self.cache_layout.page_bytes(
            lambda spec: 2 * BLOCK_SIZE * spec.num_kv_heads * spec.head_dim * itemsize
        )

    def kv_memory(self, limits: BackendLimits, fraction: float | None) -> int | None:
        return None

    def prepare(self, limits: BackendLimits, num_blocks: int) -> None:
        self._kv = PagedKV(self.cache_layout, num_blocks, self.precision.dtype)

    def execute(self, step: BackendStep, sampling: SamplingBatch) -> Sampled:
        from octavo_engine import _native

        if self._team is None:
            self._team = _native.Team(self._num_threads or _native.available_cores())
        return sample_rows(self._team, self.logits(step), sampling)

    def logits(self, step: BackendStep) -> NDArray[np.float32]:
        """Compute the step; the logits of the wanted rows, [S, vocabulary]."""
        assert self._model is not None and self._kv is not None, "prepare() comes first"
        with torch.inference_mode():
            for source, target, num_tokens in step.copies.tolist():
                self._kv.copy(source, target, num_tokens)
            ops = ReferenceOps(step, self._kv, self.precision, self._adapters)
            logits = self._model.forward(ops)
            return np.ascontiguousarray(logits.float().numpy())

    def pack_adapter(self, files: AdapterFiles) -> TorchAdapter:
        return {
            number: [self._part(self._sites[number], part) for part in parts]
            for number, parts in match_sites(files, self._sites).items()
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

    def poison_blocks(self, block_ids: list[int]) -> None:
        assert self._kv is not None, "prepare() comes first"
        self._kv.poison(block_ids)

    def save_blocks(self, block_ids: Sequence[int]) -> list[NDArray[np.uint8]]:
        assert self._kv is not None, "prepare() comes first"
        return [self._kv.save(block_id) for block_id in block_ids]

    def load_blocks(self, block_ids: Sequence[int], pages: Sequence[NDArray[np.uint8]]) -> None:
        assert self._kv is not None, "prepare() comes first"
        for block_id, page in zip(block_ids, pages, strict=True):
            self._kv.load(block_id, page)

    def close(self) -> None:
        self._model = None
        self._kv = None
        self._team = None
