"""A real model's own words: SmolLM2 gives the same greedy text whoever computes it.

The native backend generates the text. Then each of the others reads it whole: where its most likely
token is the next one at every place, its greedy text is the same.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from octavo_engine.backends.dequantize import to_float32
from octavo_engine.backends.registry import build_backend
from octavo_engine.config import EngineConfig
from octavo_engine.weights.open import open_checkpoint
from octavo_engine.weights.source import resolve_model
from tests.engine.backends.driver import Driver, run_alone
from tests.engine.backends.tolerance import INTEGERS_AGAINST_FLOAT32, INTEGERS_WITH_8_BITS, error

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from octavo_engine.backends.backend import Backend
    from octavo_engine.config import DType, Quantization
    from octavo_engine.weights.source import ModelFiles

pytestmark = pytest.mark.slow

# "What is the capital of France?" in the model's chat template.
PROMPT = [1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411,
          407, 19712, 8182, 2, 198, 1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1,
          520, 9531, 198]  # fmt: skip
NUM_NEW_TOKENS = 16


@functools.cache
def files() -> ModelFiles:
    return resolve_model("demo://smollm2")


def native(
    dtype: DType, quantization: Quantization = "none", *, activation_bits: int = 16
) -> Backend:
    config = EngineConfig(
        device="cpu",
        dtype=dtype,
        quantization=quantization,
        activation_bits=activation_bits,
        num_threads=2,
    )
    return build_backend(config, files())


def greedy_text(dtype: DType, quantization: Quantization = "none") -> list[int]:
    """Prompt and answer."""
    backend = native(dtype, quantization)
    driver = Driver(backend)  # type: ignore[arg-type]  # both real backends show their logits
    request = driver.add(0, list(PROMPT))
    logits = driver.step([(request, len(PROMPT))])[0]
    for _ in range(NUM_NEW_TOKENS):
        request.token_ids.append(int(np.argmax(logits[-1])))
        logits = driver.step([(request, 1)])[0]
    return request.token_ids


def next_tokens(logits: NDArray[np.float32]) -> list[int]:
    """The greedy choices from the last token of the prompt on."""
    best: list[int] = logits[len(PROMPT) - 1 : -1].argmax(-1).tolist()
    return best


def reference_logits(token_ids: list[int], dtype: DType) -> NDArray[np.float32]:
    backend = build_backend(EngineConfig(device="torch", dtype=dtype), files())
    return run_alone(backend, token_ids)  # type: ignore[arg-type]  # as above


def transformers_logits(token_ids: list[int]) -> NDArray[np.float32]:
    import transformers

    config = files().config
    checkpoint = open_checkpoint(files())
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config))
    tensors = {
        name: torch.from_numpy(to_float32(checkpoint.read(name, tuple(tensor.shape))))
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"
    }
    model.load_state_dict(tensors, strict=False, assign=True)
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    with torch.inference_mode():
        logits: NDArray[np.float32] = model.eval()(torch.tensor([token_ids])).logits[0].numpy()
    return logits


def test_float32_reference_and_transformers_agree() -> None:
    text = greedy_text("float32")
    answer = text[len(PROMPT) :]
    assert len(set(answer)) > 5  # it speaks
    assert next_tokens(reference_logits(text, "float32")) == answer
    assert next_tokens(transformers_logits(text)) == answer


def test_bf16_agrees_with_the_reference_rounded_the_same_way() -> None:
    """Sums in another order move a logit by up to 0.4 here, and which of two nearly equal ones is
    larger depends on the machine: the two best first tokens are 0.001 apart on one of them."""
    text = greedy_text("bfloat16")
    answer = text[len(PROMPT) :]
    logits = reference_logits(text, "bfloat16")[len(PROMPT) - 1 : -1]
    behind = logits.max(-1) - logits[np.arange(len(answer)), answer]
    assert (behind < 0.25).all() and (behind > 0).sum() <= 1


def test_the_files_own_integers_say_what_its_numbers_say() -> None:
    """The same weights, kept as Q4_1 and Q8_0: what differs is how activations are rounded."""
    text = greedy_text("auto", "auto")
    answer = text[len(PROMPT) :]
    assert next_tokens(reference_logits(text, "float32")) == answer
    truth = run_alone(native("float32"), text)  # type: ignore[arg-type]  # as above
    kept = run_alone(native("auto", "auto"), text)  # type: ignore[arg-type]  # as above
    rounded = run_alone(native("bfloat16"), text)  # type: ignore[arg-type]  # as above
    assert error(kept, truth) < INTEGERS_AGAINST_FLOAT32
    in_8_bits = native("auto", "auto", activation_bits=8)
    coarse = run_alone(in_8_bits, text)  # type: ignore[arg-type]  # as above
    assert error(kept, truth) < error(coarse, truth) < INTEGERS_WITH_8_BITS
    assert error(kept, truth) < error(rounded, truth)  # 16-bit integers lose less than bf16
