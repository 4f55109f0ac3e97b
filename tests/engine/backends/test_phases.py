"""Workers that wait for each other only where they must: how often, and with the same bits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from octavo_engine.backends.native.backend import NativeBackend
from octavo_engine.models.config import ModelConfig
from tests.engine.backends.driver import Driver, random_tokens
from tests.engine.backends.test_adapters import LIMITS, AdaptedDriver, place
from tests.engine.backends.test_rank_adapters import write_adapters
from tests.engine.models.tiny import TinyModel, tiny_model

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

# Tokens of the three requests in each step: a prompt of many rows, then few: one token of each,
# of one alone, two and three of one as speculation has them; and four, which are many again.
STEPS = [(20, 37, 9), (1, 1, 1), (1, 0, 0), (0, 2, 1), (3, 0, 0), (0, 0, 1), (2, 1, 1), (0, 3, 0)]


def native(model: TinyModel, *, num_threads: int = 2, **options: Any) -> NativeBackend:
    return NativeBackend(
        ModelConfig.from_hf(model.config),
        model.checkpoint(),
        max_model_len=160,
        num_threads=num_threads,
        **options,
    )


def decode(backend: NativeBackend, driver: Driver | None = None) -> NDArray[np.float32]:
    driver = driver or Driver(backend)
    requests = [driver.add(row, random_tokens(60, seed=row)) for row in range(3)]
    for counts in STEPS:
        driver.step([(r, n) for r, n in zip(requests, counts, strict=True) if n > 0])
    return np.concatenate([np.array(request.logits) for request in requests])


def barriers_of_a_step(model: TinyModel, **options: Any) -> int:
    """Of one token, which the workers of a team of two compute."""
    backend = native(model, **options)
    driver = Driver(backend)
    request = driver.add(0, random_tokens(20))
    driver.step([(request, 10)])
    team = backend._in_memory.team
    before = team.num_barriers
    driver.step([(request, 1)])
    return team.num_barriers - before


@pytest.mark.parametrize(
    ("name", "options", "plain", "joined"),
    [
        ("llama", {}, 8, 5),
        ("llama", {"quantization": "int4"}, 8, 5),
        ("qwen3", {}, 8, 5),
        ("mixtral", {}, 14, 8),
        ("mixtral", {"quantization": "int4"}, 13, 8),
    ],
)
def test_barriers_of_a_layer(name: str, options: Any, plain: int, joined: int) -> None:
    def of_a_layer(*, is_joined: bool) -> int:
        counts = [
            barriers_of_a_step(
                tiny_model(name, num_hidden_layers=layers), joins_phases=is_joined, **options
            )
            for layers in (2, 3)
        ]
        return counts[1] - counts[0]

    assert (of_a_layer(is_joined=False), of_a_layer(is_joined=True)) == (plain, joined)


FORMS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("llama", {}, {}),
    ("llama", {}, {"dtype": "f32"}),
    ("llama", {}, {"quantization": "int8"}),
    ("llama", {}, {"quantization": "int4", "activation_bits": 8}),
    ("llama", {}, {"kv_cache_dtype": "int8"}),
    ("llama", {"num_attention_heads": 5, "num_key_value_heads": 5, "hidden_size": 80}, {}),
    (
        "llama",
        {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 144},
        {"quantization": "int4"},
    ),
    ("llama-tied-biased", {}, {}),
    ("mistral", {}, {}),
    ("qwen3", {}, {"kv_cache_dtype": "fp8"}),
    ("olmo2", {}, {}),
    ("gemma3", {}, {}),
    ("gpt2", {}, {}),
    ("falcon-new", {}, {"quantization": "int8"}),
    ("mpt-clipped-six-heads", {}, {}),
    ("mixtral", {}, {}),
    ("mixtral", {}, {"quantization": "int4"}),
    ("qwen2-moe", {}, {"quantization": "int8"}),
    ("qwen3-moe", {}, {"dtype": "f32"}),
]


@pytest.mark.parametrize(("name", "changes", "options"), FORMS)
def test_bits_are_those_of_a_plain_program(
    name: str, changes: dict[str, Any], options: dict[str, Any]
) -> None:
    model = tiny_model(name, **changes)
    plain = decode(native(model, num_threads=1, joins_phases=False, **options))
    assert np.isfinite(plain).all()
    for num_threads in (1, 2, 3, 5, 8):
        joined = decode(native(model, num_threads=num_threads, **options))
        np.testing.assert_array_equal(joined, plain, f"{num_threads} threads")
    unfused = decode(native(model, is_fused=False, **options))  # more instructions of rows
    np.testing.assert_array_equal(unfused, plain)


@pytest.mark.parametrize("quantization", ["none", "int8"])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_bits_of_rows_with_adapters(name: str, quantization: str, tmp_path: Path) -> None:
    """Of two requests, and none of the third."""

    def adapted(**options: Any) -> NDArray[np.float32]:
        backend = native(tiny_model(name), adapters=LIMITS, quantization=quantization, **options)
        driver = AdaptedDriver(backend)
        for slot, folder in enumerate(write_adapters(backend, tmp_path)):
            place(backend, slot, folder)
        driver.slots = {0: 0, 1: 2}
        return decode(backend, driver)

    plain = adapted(num_threads=1, joins_phases=False)
    assert np.any(plain != decode(native(tiny_model(name), quantization=quantization)))
    for num_threads in (2, 3, 8):
        joined = adapted(num_threads=num_threads)
        np.testing.assert_array_equal(joined, plain, f"{num_threads} threads")
