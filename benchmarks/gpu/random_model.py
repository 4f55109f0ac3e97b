"""Models of random weights made on the device, and steps over them: no files, no server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from benchmarks.gpu.products import random_weight
from octavo_engine.backends.adapters import AdapterSite, is_adaptable
from octavo_engine.backends.backend import BackendLimits, BackendStep
from octavo_engine.backends.torch.cuda import CudaBackend, Loaded
from octavo_engine.backends.torch.cuda_loader import DeviceLinear
from octavo_engine.backends.torch.cuda_settings import CudaSettings
from octavo_engine.config import BLOCK_SIZE
from octavo_engine.models.config import ModelConfig
from octavo_engine.models.registry import build_model
from octavo_engine.sampling.batch import SamplingBatch
from octavo_engine.sampling.rows import new_table

if TYPE_CHECKING:
    from torch import Tensor

    from octavo_engine.backends.torch.packed import GroupedWeight, ScaledWeight
    from octavo_engine.ops import ExpertNames, ExpertSizes, Names, Sizes

LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
SHORT_BLOCKS = 24  # blocks of each row but the first: 384 tokens
TINY: dict[str, Any] = LLAMA_8B | {
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}


class RandomLoader:
    """Answers to Loader with normal numbers; keeps the linear layers to time them alone.

    Values are drawn on the host where `is_portable`, so that two devices get the same. `kind`: of
    `products.KINDS`, what the layers' weights are stored as; the head's are as they are.
    """

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        *,
        seed: int = 0,
        is_portable: bool = False,
        kind: str = "bf16",
    ) -> None:
        self._device, self._dtype, self._kind = device, dtype, kind
        source = torch.device("cpu") if is_portable else device
        self._generator = torch.Generator(source).manual_seed(seed)
        self._source = source
        self.linears: list[DeviceLinear] = []
        self.sites: list[AdapterSite] = []  # of the adapters

    def embedding(self, name: str, rows: int, columns: int) -> Tensor:
        return self._matrix(rows, columns)

    def linear(
        self, names: Names, in_features: int, out_features: Sizes, *, bias: bool = False
    ) -> DeviceLinear:
        sizes = [out_features] if isinstance(out_features, int) else list(out_features)
        names = [names] if isinstance(names, str) else list(names)
        site = -1
        if is_adaptable(names):
            site = len(self.sites)
            self.sites.append(AdapterSite(tuple(names), tuple(sizes), in_features))
        weight: Tensor | GroupedWeight | ScaledWeight
        if site < 0 or self._kind == "bf16":
            weight = self._matrix(sum(sizes), in_features)
        else:
            weight = random_weight(self._kind, sum(sizes), in_features, self._device)
        own_bias = None
        if bias:
            own_bias = torch.zeros(sum(sizes), dtype=self._dtype, device=self._device)
        made = DeviceLinear(weight, own_bias, is_head=names == ["lm_head"], site=site)
        self.linears.append(made)
        return made

    def experts(
        self, names: ExpertNames, in_features: int, out_features: ExpertSizes, *, bias: bool = False
    ) -> Tensor:
        return self._matrix(len(names) * sum(out_features), in_features).view(
            len(names), -1, in_features
        )

    def tied(self, embedding: Tensor) -> DeviceLinear:
        made = DeviceLinear(embedding, is_head=True)
        self.linears.append(made)
        return made

    def vector(self, name: str, size: int, *, offset: float = 0.0) -> Tensor:
        return torch.ones(size, device=self._device)

    def _matrix(self, rows: int, columns: int) -> Tensor:
        values = torch.empty((rows, columns), dtype=torch.bfloat16, device=self._source)
        values.normal_(0, columns**-0.5, generator=self._generator)
        return values.to(self._device, self._dtype)


@dataclass
class Bench:
    """A prepared backend whose first row may grow to full length, the others to SHORT_BLOCKS."""

    backend: CudaBackend
    limits: BackendLimits
    linears: list[DeviceLinear]
    sites: list[AdapterSite]
    tables: np.ndarray[Any, np.dtype[np.int32]]
    num_blocks: int

    @classmethod
    def make(
        cls,
        config: dict[str, Any],
        limits: BackendLimits,
        *,
        device: str = "cuda",
        dtype: torch.dtype = torch.bfloat16,
        is_portable: bool = False,
        kind: str = "bf16",
        **options: Any,
    ) -> Bench:
        model_config = ModelConfig.from_hf(config)
        loader = RandomLoader(torch.device(device), dtype, is_portable=is_portable, kind=kind)
        model = build_model(model_config, loader, limits.max_model_len)
        settings = CudaSettings(dtype=dtype, **options)
        backend = CudaBackend(model_config, Loaded(model), torch.device(device), settings)
        width = limits.max_model_len // BLOCK_SIZE
        short = min(SHORT_BLOCKS, width)
        num_blocks = width + (limits.max_seqs - 1) * short
        blocks = np.arange(num_blocks, dtype=np.int32)
        np.random.default_rng(0).shuffle(blocks)  # as in a server that has run for a while
        tables = np.zeros((limits.max_seqs, width), np.int32)
        tables[0] = blocks[:width]
        tables[1:, :short] = blocks[width:].reshape(-1, short)
        backend.prepare(limits, num_blocks)
        return cls(backend, limits, loader.linears, loader.sites, tables, num_blocks)

    def step(
        self, starts: list[int], counts: list[int], token_ids: list[int] | None = None
    ) -> BackendStep:
        """Rows 0, 1, … each compute so many tokens from there on; the last one's logits."""
        rows = np.arange(len(starts), dtype=np.int32)
        seq_starts = np.cumsum([0, *counts]).astype(np.int32)
        owners = np.repeat(rows, counts)
        first = np.repeat(np.array(starts) - seq_starts[:-1], counts)
        positions = (np.arange(seq_starts[-1]) + first).astype(np.int32)
        slots = self.tables[owners, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
        ids = positions * 31 % 1000 if token_ids is None else np.array(token_ids)
        return BackendStep(
            token_ids=ids.astype(np.int32),
            positions=positions,
            slots=slots.astype(np.int32)[None],
            seq_starts=seq_starts,
            seq_lens=np.array(starts, np.int32) + np.array(counts, np.int32),
            rows=rows,
            block_tables=self.tables[None],
            logit_rows=(seq_starts[1:] - 1).astype(np.int32),
            copies=np.zeros((0, 3), np.int32),
            table_versions=np.zeros(len(self.tables), np.int64),  # nobody writes to them
        )

    def sampling(self, step: BackendStep, **fields: Any) -> SamplingBatch:
        """What each row of logits wants; greedy unless `fields` of the table say otherwise."""
        table = new_table(self.limits.max_seqs)
        for name, value in fields.items():
            table[name] = value
        num_rows = len(step.logit_rows)
        return SamplingBatch(
            table=table,
            rows=step.rows,
            positions=step.seq_lens,
            targets=np.full(num_rows, -1, np.int32),
            history=np.zeros((self.limits.max_seqs, 1), np.int32),
        )

    def fill(self, num_seqs: int, num_tokens: int) -> None:
        """Compute prompts, so that the cache holds what attention will read."""
        for row in range(num_seqs):
            done = 0
            while done < num_tokens:
                count = min(self.limits.max_tokens, num_tokens - done)
                step = self.step([done], [count])
                step.rows[:] = row
                owner = self.tables[row]
                blocks, offsets = np.divmod(step.positions, BLOCK_SIZE)
                step.slots[:] = owner[blocks] * BLOCK_SIZE + offsets
                self.backend.execute(step, self.sampling(step))
                done += count
