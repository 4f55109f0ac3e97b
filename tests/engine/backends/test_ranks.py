"""Ranks that share each layer: an answer's bits are those of one process, whatever their number."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from octavo_engine.backends.native.backend import NativeBackend
from octavo_engine.models.config import ModelConfig
from tests.engine.backends.driver import Driver, random_tokens
from tests.engine.backends.ranks import MAX_MODEL_LEN, ThreadRanks
from tests.engine.models.recurrent import RECURRENT
from tests.engine.models.tiny import FAMILIES, tiny_model

if TYPE_CHECKING:
    from typing import Any

    from numpy.typing import NDArray

    from tests.engine.backends.driver import LogitsBackend
    from tests.engine.models.tiny import TinyModel


def alone(model: TinyModel, **options: Any) -> NativeBackend:
    return NativeBackend(
        ModelConfig.from_hf(model.config),
        model.checkpoint(),
        max_model_len=MAX_MODEL_LEN,
        num_threads=1,
        **options,
    )


def mixed_steps(backend: LogitsBackend) -> NDArray[np.float32]:
    """A prompt in one piece, one in chunks beside it, then single tokens of both, one more copy of
    a block."""
    driver = Driver(backend)
    first = driver.add(3, random_tokens(70, seed=1))
    second = driver.add(1, random_tokens(60, seed=2))
    driver.step([(first, 66)])
    driver.step([(second, 20), (first, 1)])
    driver.step([(first, 1), (second, 37)])
    driver.step([(second, 1), (first, 1)])
    third = driver.add(5, random_tokens(30, seed=1)[:24])
    third.blocks, third.num_computed = [first.blocks[0], driver.take_block()], 20
    driver.step([(second, 1), (third, 4)], copies=[(first.blocks[1], third.blocks[1], 4)])
    return np.concatenate([first.logits, second.logits, third.logits])


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in RECURRENT])
def test_two_ranks_give_the_bits_of_one_process(name: str) -> None:
    model = tiny_model(name)
    ranks = ThreadRanks(model, 2, num_threads=2)
    logits = mixed_steps(ranks)
    np.testing.assert_array_equal(logits, mixed_steps(alone(model)))
    ranks.close()


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "f32"},
        {"quantization": "int8"},
        {"quantization": "int4"},
        {"quantization": "int4", "activation_bits": 8},
        {"kv_cache_dtype": "int8"},
    ],
    ids=lambda options: " ".join(map(str, options.values())),
)
@pytest.mark.parametrize("name", ["qwen3", "mixtral"])
def test_sizes_and_formats(name: str, options: dict[str, Any], size: int) -> None:
    model = tiny_model(name)
    ranks = ThreadRanks(model, size, num_threads=size, **options)
    logits = mixed_steps(ranks)
    np.testing.assert_array_equal(logits, mixed_steps(alone(model, **options)))
    ranks.close()


def test_threads_within_ranks() -> None:
    model = tiny_model("gemma2")
    ranks = ThreadRanks(model, 2, num_threads=4)
    np.testing.assert_array_equal(mixed_steps(ranks), mixed_steps(alone(model)))
    ranks.close()
