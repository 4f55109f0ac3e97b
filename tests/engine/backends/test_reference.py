"""The torch reference against transformers: each family, however cut and whatever its company."""

from __future__ import annotations

import numpy as np
import pytest

from octavo_engine.backends.torch.backend import TorchBackend
from octavo_engine.models.config import ModelConfig
from tests.engine.backends.driver import Driver, random_tokens, run_alone
from tests.engine.backends.tolerance import FLOAT32
from tests.engine.models.tiny import FAMILIES, TinyModel, make_model, tiny_model

MAX_MODEL_LEN = 128


def reference(model: TinyModel, max_model_len: int = MAX_MODEL_LEN) -> TorchBackend:
    config = ModelConfig.from_hf(model.config)
    return TorchBackend(config, model.checkpoint(), max_model_len=max_model_len)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_ragged_batch_of_prompts_equals_transformers(name: str) -> None:
    model = tiny_model(name)
    driver = Driver(reference(model))
    requests = [driver.add(i, random_tokens(n, seed=i)) for i, n in enumerate((100, 70, 77))]
    parts = driver.step([(request, len(request.token_ids)) for request in requests])
    for request, logits in zip(requests, parts, strict=True):
        truth = model.logits(request.token_ids)
        assert np.abs(truth).max() > 0.5
        np.testing.assert_allclose(logits, truth, **FLOAT32)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_chunks_and_single_tokens_equal_transformers_on_the_whole(name: str) -> None:
    model = tiny_model(name)
    token_ids = random_tokens(90, seed=5)
    logits = run_alone(reference(model), token_ids, chunks=[7, 16, 25, 1, 1, 30, 1, 1])
    np.testing.assert_allclose(logits, model.logits(token_ids), **FLOAT32)


def test_a_dynamic_rope_is_that_of_the_longest_sequence() -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    model = make_model("dynamic", "Llama", {"rope_parameters": rope, "max_position_embeddings": 64})
    token_ids = random_tokens(MAX_MODEL_LEN)
    logits = run_alone(reference(model), token_ids, chunks=[100])
    np.testing.assert_allclose(logits, model.logits(token_ids), **FLOAT32)


def test_longrope_is_short_where_no_sequence_gets_long() -> None:
    model = tiny_model("phi3-longrope")
    token_ids = random_tokens(32)
    logits = run_alone(reference(model, max_model_len=32), token_ids)
    np.testing.assert_allclose(logits, model.logits(token_ids), **FLOAT32)
    long = run_alone(reference(model, max_model_len=33), token_ids)
    assert not np.allclose(long, logits, rtol=1e-2, atol=1e-2)


def test_copied_and_shared_blocks_are_read_like_own_ones() -> None:
    model = tiny_model("llama")
    driver = Driver(reference(model))
    first = driver.add(0, random_tokens(40))
    driver.step([(first, 40)])
    second = driver.add(1, [*first.token_ids[:38], 9, 8, 7], prefix=first)
    assert second.num_computed == 32
    copy = driver.take_block()
    second.blocks.append(copy)
    second.num_computed = 38  # six tokens of the third block come from a copy of it
    driver.step([(second, 3)], copies=[(first.blocks[2], copy, 6)])
    np.testing.assert_allclose(second.logits, model.logits(second.token_ids)[38:], **FLOAT32)


def test_a_poisoned_block_is_seen() -> None:
    """The poison of the other tests would show if freed memory were read."""
    driver = Driver(reference(tiny_model("llama")))
    request = driver.add(0, random_tokens(20))
    driver.step([(request, 19)])
    driver.poison(request.blocks[:1])
    assert np.isnan(driver.step([(request, 1)])[0]).all()
