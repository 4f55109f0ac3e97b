"""The transformers backend: any decoder that transformers loads, over our paged KV cache."""

from __future__ import annotations

import inspect
import logging
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from octavo_engine.backends.sampled import sample_rows
from octavo_engine.backends.torch.fallback.attention import PagedAttention
from octavo_engine.backends.torch.fallback.layers import answered_by
from octavo_engine.backends.torch.fallback.model import DTYPES, load_model, probe_layers
from octavo_engine.backends.torch.fallback.self_check import check_against_eager
from octavo_engine.backends.torch.reference import PagedKV, block_values
from octavo_engine.caches import KVSpec, group_layers

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from numpy.typing import NDArray

    from octavo_engine import _native
    from octavo_engine.backends.backend import BackendLimits, BackendStep
    from octavo_engine.config import EngineConfig
    from octavo_engine.sampling.batch import Sampled, SamplingBatch

logger = logging.getLogger(__name__)

_DEVICE_FRACTION = 0.85  # of what is free after loading: the steps' own values lie beside it


class TransformersBackend:
    """The model as transformers wrote it; a step is one forward pass over all its tokens."""

    def __init__(
        self,
        config: EngineConfig,
        folder: Path,
        model: Mapping[str, Any],
        *,
        device: str = "cpu",
    ) -> None:
        """`model` is the config.json. Raises ModelError for what cannot be served, and where the
        self-check fails."""
        self._device = torch.device(device)
        self._num_threads = config.num_threads
        self._model: Any = load_model(
            config, folder, model, dtype=DTYPES.get(config.dtype), device=self._device
        )
        self._layers = probe_layers(self._model)
        self._takes_rows = (
            "logits_to_keep" in inspect.signature(type(self._model).forward).parameters
        )
        self.cache_layout = group_layers(
            [
                KVSpec(call.num_kv_heads, max(call.key_dim, call.value_dim), call.window)
                for call in self._layers
            ]
        )
        self._vocab_size = int(self._model.get_output_embeddings().weight.shape[0])
        self._kv: PagedKV | None = None
        self._team: _native.Team | None = None
        check_against_eager(self, self._model)
        logger.warning(
            "%s has no page here and is computed by transformers: the bits of an answer are not "
            "promised to be the same in every batch", type(self._model).__name__,
        )  # fmt: skip

    @property
    def name(self) -> str:
        dtype = str(self._model.dtype).removeprefix("torch.")
        return f"transformers/{self._device.type}/{dtype}"

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def kv_bytes_per_block(self) -> int:
        itemsize = self._model.dtype.itemsize
        return self.cache_layout.page_bytes(lambda spec: block_values(spec) * itemsize)

    def kv_memory(self, limits: BackendLimits, fraction: float | None) -> int | None:
        if self._device.type == "cpu":
            return None
        free, _ = torch.cuda.mem_get_info(self._device)
        return int(free * (fraction or _DEVICE_FRACTION))

    def prepare(self, limits: BackendLimits, num_blocks: int) -> None:
        with self._device:
            self._kv = PagedKV(self.cache_layout, num_blocks, self._model.dtype)

    def execute(self, step: BackendStep, sampling: SamplingBatch) -> Sampled:
        from octavo_engine import _native

        if self._team is None:
            self._team = _native.Team(self._num_threads or _native.available_cores())
        return sample_rows(self._team, self.logits(step), sampling)

    def logits(self, step: BackendStep) -> NDArray[np.float32]:
        """Compute the step; the logits of the wanted rows, [S, vocabulary]."""
        assert self._kv is not None, "prepare() comes first"
        with torch.inference_mode():
            for source, target, num_tokens in step.copies.tolist():
                self._kv.copy(source, target, num_tokens)
            calls = PagedAttention(step, self._kv, self._layers)
            rows = torch.from_numpy(step.logit_rows).long().to(self._device)
            with answered_by(calls):
                output = self._model(
                    input_ids=self._put(step.token_ids)[None],
                    position_ids=self._put(step.positions)[None],
                    use_cache=False,
                    **({"logits_to_keep": rows} if self._takes_rows else {}),
                )
            assert calls.is_done, "each pass makes the same calls"
            logits = output.logits[0] if self._takes_rows else output.logits[0, rows]
            return np.ascontiguousarray(logits.float().cpu().numpy())

    def _put(self, array: NDArray[np.int32]) -> torch.Tensor:
        return torch.from_numpy(array).long().to(self._device)

    def poison_blocks(self, block_ids: list[int]) -> None:
        assert self._kv is not None, "prepare() comes first"
        self._kv.poison(block_ids)

    def close(self) -> None:
        self._model = None
        self._kv = None
        self._team = None
