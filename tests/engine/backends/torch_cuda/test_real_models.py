"""Trained models on the device: SmolLM2's text and MiniLM's vectors are the CPU's.

`OCTAVO_MODELS` names a folder that holds SmolLM2's GGUF and all-MiniLM's files, at any depth;
without it they are those of `demo://`, where they are on this machine.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from octavo_engine.backends.pooling import make_step
from octavo_engine.backends.pooling_registry import _open, build_pooling_backend
from octavo_engine.backends.registry import build_backend
from octavo_engine.backends.torch.cuda_pooling import CudaPoolingBackend
from octavo_engine.config import EngineConfig
from octavo_engine.core import device_choice
from octavo_engine.core.offline.llm import LLM
from octavo_engine.errors import ModelError
from octavo_engine.models.config import ModelConfig
from octavo_engine.models.pooling_config import read_pooling
from octavo_engine.tokenization.load import load_tokenizer
from octavo_engine.weights.demo import locate_demo
from octavo_engine.weights.open import open_checkpoint
from octavo_engine.weights.source import resolve_model
from tests.engine.backends.driver import Driver, run_alone
from tests.engine.backends.test_smollm2 import PROMPT
from tests.engine.backends.torch_cuda.opening import open_cuda

if TYPE_CHECKING:
    from octavo_engine.backends.torch.cuda import CudaBackend

pytestmark = pytest.mark.slow

NUM_TOKENS = 24
TEXTS = [
    "A cat sat on the mat.",
    "Octopuses have eight arms, three hearts and blue blood.",
    "Paris is the capital of France. " * 12,
    "to",
    "Der Ozean bedeckt mehr als zwei Drittel der Erde.",
]


def find(demo: str, *patterns: str) -> str:
    """The file or folder of a model."""
    folder = os.environ.get("OCTAVO_MODELS")
    if folder is not None:
        for pattern in patterns:
            for path in sorted(Path(folder).rglob(pattern)):
                return str(path if path.suffix == ".gguf" else path.parent)
        pytest.skip(f"OCTAVO_MODELS={folder} holds no {' or '.join(patterns)}")
    try:
        return str(locate_demo(demo))
    except ModelError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def smollm2():
    return resolve_model(find("smollm2", "*[Ss]mol[Ll][Mm]2*.gguf"))


@pytest.fixture(scope="module")
def minilm():
    return resolve_model(find("minilm", "modules.json", "sentence_bert_config.json"))


@pytest.fixture(scope="module")
def answer(smollm2) -> list[int]:
    """Prompt and greedy answer, by the CPU in float32."""
    config = EngineConfig(device="cpu", dtype="float32", quantization="none", num_threads=2)
    return greedy(build_backend(config, smollm2))


def greedy(backend) -> list[int]:
    driver = Driver(backend)
    request = driver.add(0, list(PROMPT))
    logits = driver.step([(request, len(PROMPT))])[0]
    for _ in range(NUM_TOKENS):
        request.token_ids.append(int(np.argmax(logits[-1])))
        logits = driver.step([(request, 1)])[0]
    return request.token_ids


def on_device(files, device, **options) -> CudaBackend:
    config = ModelConfig.from_hf(files.config)
    return open_cuda(
        config, open_checkpoint(files), max_model_len=512, device=device.type, **options
    )


def test_auto_embeds_on_the_gpu_that_it_sees(request, minilm, monkeypatch, caplog):
    is_real = torch.cuda.is_available()
    if not is_real:
        request.getfixturevalue("pretended")
        monkeypatch.setattr(device_choice, "DRIVER_FILES", ("null",))
    config = EngineConfig(model=str(minilm.path), kernels="auto" if is_real else "plain")
    with LLM.from_config(config.replace(device="cpu", num_threads=1)) as llm:
        expected = [output.outputs.embedding for output in llm.embed(TEXTS)]
    with caplog.at_level("INFO"), LLM.from_config(config) as llm:
        assert llm.info.backend == f"cuda/float16/{'triton' if is_real else 'plain'}"
        found = [output.outputs.embedding for output in llm.embed(TEXTS)]
    assert [message for message in caplog.messages if "--device auto chose cuda" in message]
    for one, other in zip(found, expected, strict=True):
        assert one @ other > 0.9999


def test_greedy_tokens_are_the_cpus(device, smollm2, answer):
    kernels = "triton" if torch.cuda.is_available() else "plain"
    backend = on_device(smollm2, device, dtype=torch.float32, kernels=kernels, keep_quantized=False)
    assert len(set(answer[len(PROMPT) :])) > 5  # it speaks
    assert greedy(backend) == answer
    backend.close()


def test_as_it_is_served_the_device_would_say_the_same(device, smollm2, answer):
    """In 16 bits, with weights as the file has them: it reads the CPU's text, and where it would
    say something else, that is as likely to it but for its rounding."""
    backend = on_device(smollm2, device, dtype=torch.bfloat16, kernels="auto")
    logits = run_alone(backend, answer)[len(PROMPT) - 1 : -1]
    said = np.array(answer[len(PROMPT) :])
    behind = logits.max(-1) - logits[np.arange(len(said)), said]
    assert (behind == 0).mean() >= 0.9
    assert behind.max() < 0.05 * logits.std()
    backend.close()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_vectors_are_the_cpus(device, minilm, dtype):
    """float16 is what an encoder's float32 is kept in; see `build_pooling.pooling_dtype`."""
    pooling = read_pooling(minilm.config, minilm.path)
    assert pooling is not None
    settings = EngineConfig(model=str(minilm.path), device="cpu", num_threads=2)
    truth = build_pooling_backend(settings, pooling, minilm, max_model_len=256)
    found = CudaPoolingBackend(
        pooling, _open(settings, pooling, minilm), max_model_len=256, dtype=dtype,
        device=device.type, kernels="triton" if torch.cuda.is_available() else "plain",
    )  # fmt: skip
    tokenizer = load_tokenizer(minilm)
    step = make_step([(tokenizer.encode(text), ()) for text in TEXTS], is_last=False)
    for backend in (truth, found):
        backend.prepare(max_tokens=512, max_texts=8)
    expected = truth.pool(step)
    for _ in range(3):  # launched, captured, replayed
        rows = found.pool(step)
        cosines = (rows * expected).sum(1)
        cosines /= np.linalg.norm(rows, axis=1) * np.linalg.norm(expected, axis=1)
        assert cosines.min() > (0.9999 if dtype == torch.float16 else 0.999)
    found.close()
