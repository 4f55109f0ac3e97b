"""Ranks that share each layer: an answer's bits are those of one process, whatever their number."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.engine.backends.ranks import FORMATS, ThreadRanks, alone, check_as_alone, mixed_steps
from tests.engine.models.recurrent import RECURRENT
from tests.engine.models.streams import STREAMS
from tests.engine.models.tiny import FAMILIES, tiny_model

if TYPE_CHECKING:
    from typing import Any


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in (*RECURRENT, *STREAMS)])
def test_two_ranks_give_the_bits_of_one_process(name: str) -> None:
    model = tiny_model(name)
    ranks = ThreadRanks(model, 2, num_threads=2)
    logits = mixed_steps(ranks)
    np.testing.assert_array_equal(logits, mixed_steps(alone(model)))
    ranks.close()


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize(
    "options",
    [*FORMATS, {"kv_cache_dtype": "int8"}],
    ids=lambda options: " ".join(map(str, options.values())),
)
@pytest.mark.parametrize("name", ["qwen3", "mixtral"])
def test_sizes_and_formats(name: str, options: dict[str, Any], size: int) -> None:
    model = tiny_model(name)
    check_as_alone(ThreadRanks(model, size, num_threads=size, **options), model, **options)


def test_threads_within_ranks() -> None:
    model = tiny_model("gemma2")
    check_as_alone(ThreadRanks(model, 2, num_threads=4), model)
