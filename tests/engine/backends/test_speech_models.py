"""Models that read audio: the reference against transformers, the native backend against it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from octavo_engine.backends.native.backend import NativeBackend
from octavo_engine.backends.torch.backend import TorchBackend
from octavo_engine.models.config import ModelConfig
from octavo_engine.speech.mel import feature_rows
from tests.engine.backends.driver import Driver, Request, random_tokens
from tests.engine.backends.tolerance import BF16_AGAINST_FLOAT32, FLOAT32, error
from tests.engine.models.tiny_speech import NUM_ROWS, VOCABULARY, random_frames, tiny_speech

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from octavo_engine.backends.backend import BackendStep
    from octavo_engine.backends.native.graph import Dtype

MAX_MODEL_LEN = 64
NUM_SLOTS = 4


class Listening:
    """A backend whose rows have audio: row r has that of slot `slots[r]`."""

    def __init__(self, backend: Any, slots: dict[int, int]) -> None:
        self._backend = backend
        self._slots = slots
        self.cache_layout = backend.cache_layout

    def prepare(self, limits: Any, num_blocks: int) -> None:
        self._backend.prepare(limits, num_blocks)
        self._backend.prepare_audio(NUM_SLOTS)

    def poison_blocks(self, block_ids: list[int]) -> None:
        self._backend.poison_blocks(block_ids)

    def logits(self, step: BackendStep) -> NDArray[np.float32]:
        step.audio_slots = np.array([self._slots[int(row)] for row in step.rows], np.int32)
        logits: NDArray[np.float32] = self._backend.logits(step)
        return logits


def native(dtype: Dtype, *, is_fused: bool = True) -> NativeBackend:
    tiny = tiny_speech()
    return NativeBackend(
        ModelConfig.from_hf(tiny.config), tiny.tensors, max_model_len=MAX_MODEL_LEN, dtype=dtype,
        num_threads=2, is_fused=is_fused,
    )  # fmt: skip


def reference() -> TorchBackend:
    tiny = tiny_speech()
    return TorchBackend(ModelConfig.from_hf(tiny.config), tiny.tensors, max_model_len=MAX_MODEL_LEN)


def alone(
    backend: Any, frames: NDArray[np.float32], token_ids: list[int], *, num_parts: int = 1
) -> NDArray[np.float32]:
    driver = Driver(Listening(backend, {0: 1}))
    for part in range(num_parts):
        backend.encode_audio(1, feature_rows(frames), part, num_parts)
    request = Request(0, token_ids)
    driver.step([(request, len(token_ids))])
    return np.stack(request.logits)


TOKENS = random_tokens(24, 5, VOCABULARY)
HEADS = ((0, 1), (1, 0), (1, 3))  # layers and heads


@pytest.mark.parametrize("make", [reference, lambda: native("f32")])
def test_attention_to_the_audio_is_that_of_transformers(make: Any) -> None:
    frames, backend = random_frames(1), make()
    backend.align_by(HEADS)
    logits = alone(backend, frames, TOKENS)
    np.testing.assert_array_equal(logits, alone(make(), frames, TOKENS))
    model = tiny_speech().model
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        output = model(
            input_features=torch.from_numpy(frames.T.copy())[None],
            decoder_input_ids=torch.tensor([TOKENS]), output_attentions=True,
        )  # fmt: skip
    rows = np.array([0, 3, 22], np.int32)
    found = backend.audio_attention(1, rows, NUM_ROWS)
    for index, (layer, head) in enumerate(HEADS):
        truth = output.cross_attentions[layer][0, head].numpy()[rows]
        np.testing.assert_allclose(found[:, index], truth, atol=2e-5)
    fewer = backend.audio_attention(1, rows, 20)  # of the rows that have sound
    own = found[:, :, :20]
    np.testing.assert_allclose(fewer, own / own.sum(-1, keepdims=True), atol=2e-5)


def test_the_reference_equals_transformers() -> None:
    frames = random_frames(1)
    ours = alone(reference(), frames, TOKENS)
    np.testing.assert_allclose(ours, tiny_speech().logits(frames, TOKENS), rtol=1e-4, atol=2e-4)


def test_another_window_gives_other_logits() -> None:
    one, other = (alone(native("f32"), random_frames(seed), TOKENS) for seed in (1, 2))
    assert error(one, other) > 0.1


@pytest.mark.parametrize("is_fused", [True, False])
def test_float32_equals_the_reference(is_fused: bool) -> None:
    frames = random_frames(1)
    ours = alone(native("f32", is_fused=is_fused), frames, TOKENS)
    np.testing.assert_allclose(ours, alone(reference(), frames, TOKENS), **FLOAT32)


def test_bf16_is_near_the_reference() -> None:
    frames = random_frames(1)
    ours = alone(native("bf16"), frames, TOKENS)
    assert error(ours, alone(reference(), frames, TOKENS)) < BF16_AGAINST_FLOAT32


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_an_encoder_in_parts_gives_the_same_bits(dtype: Dtype) -> None:
    frames = random_frames(1)
    whole = alone(native(dtype), frames, TOKENS)
    assert np.array_equal(whole, alone(native(dtype), frames, TOKENS, num_parts=7))


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_bits_do_not_depend_on_the_batch(dtype: Dtype) -> None:
    """Three requests with two windows, in chunks and together, and a slot filled meanwhile."""
    texts = [random_tokens(n, n, VOCABULARY) for n in (20, 24, 17)]
    windows = {0: 3, 1: 0, 2: 3}
    backend = native(dtype)
    driver = Driver(Listening(backend, windows))
    features = {slot: feature_rows(random_frames(slot)) for slot in (0, 3)}
    for slot, rows in features.items():
        backend.encode_audio(slot, rows, 0, 1)
    requests = [Request(row, tokens) for row, tokens in enumerate(texts)]
    driver.step([(requests[0], 13), (requests[1], 1)])
    backend.encode_audio(2, feature_rows(random_frames(9)), 0, 1)
    driver.step([(requests[1], 20), (requests[2], 16), (requests[0], 1)])
    driver.step([(requests[2], 1), (requests[1], 3), (requests[0], 6)])
    for request, tokens in zip(requests, texts, strict=True):
        expected = alone(native(dtype), random_frames(windows[request.row]), tokens)
        assert np.array_equal(np.stack(request.logits), expected)


def test_a_step_must_name_slots_that_exist() -> None:
    backend = native("f32")
    driver = Driver(Listening(backend, {0: NUM_SLOTS}))
    with pytest.raises(ValueError, match=r"cross_slots\[0\] is 4"):
        driver.step([(Request(0, TOKENS), 4)])
