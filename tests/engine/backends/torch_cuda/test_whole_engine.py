"""SmolLM2 behind scheduler and runner: the device backend says what the native one says."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from octavo_engine.config import EngineConfig, SchedulerConfig
from octavo_engine.core.build import build_engine
from octavo_engine.models.config import ModelConfig
from octavo_engine.state.request import EngineRequest
from octavo_engine.state.sampling_params import SamplingParams
from octavo_engine.weights.open import open_checkpoint
from octavo_engine.weights.source import resolve_model
from tests.engine.backends.test_smollm2 import PROMPT
from tests.engine.backends.torch_cuda.opening import open_cuda

if TYPE_CHECKING:
    from octavo_engine.backends.torch.cuda import CudaBackend

pytestmark = pytest.mark.slow

WISHES = {
    "greedy": SamplingParams(temperature=0, max_tokens=6),
    "drawn": SamplingParams(temperature=0.9, top_p=0.9, max_tokens=6, logprobs=2),
    "penalised": SamplingParams(temperature=1.0, repetition_penalty=1.2, top_k=40, max_tokens=6),
}


def generate(backend: CudaBackend | None) -> dict[str, list[int]]:
    """All requests in company, their prompts in chunks."""
    config = EngineConfig(
        device="cpu", dtype="float32", max_model_len=256, kv_cache_memory_bytes=64 << 20,
        scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64),
    )  # fmt: skip
    engine, _ = build_engine(config, backend=backend)
    for request_id, params in WISHES.items():
        engine.add(
            EngineRequest(request_id=request_id, prompt_token_ids=PROMPT, params=params, seed=7)
        )
    texts: dict[str, list[int]] = {request_id: [] for request_id in WISHES}
    while engine.has_work:
        for output in engine.step().outputs:
            texts[output.request_id] += output.token_ids
    return texts


def test_greedy_drawn_and_penalised_text_is_that_of_the_native_backend(device):
    files = resolve_model("demo://smollm2")
    backend = open_cuda(
        ModelConfig.from_hf(files.config), open_checkpoint(files), max_model_len=256,
        dtype=torch.float32, device=device.type, kernels="plain",
        keep_quantized=False,  # plain kernels would expand them anew in each product
    )  # fmt: skip
    texts = generate(backend)
    assert [len(text) for text in texts.values()] == [6, 6, 6]
    assert texts == generate(None)
