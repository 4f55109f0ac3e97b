"""Ranks of the torch backends: what one process computes, whatever their number."""

from __future__ import annotations

import numpy as np
import pytest

from tests.engine.backends.ranks import mixed_steps
from tests.engine.backends.torch_ranks import TorchThreadRanks, reference
from tests.engine.models.tiny import tiny_model

# Biases, norms of heads and of rows, soft caps and windows, tied heads, tables of positions.
FAMILIES = ("llama", "qwen2", "qwen3", "gemma2", "gemma3", "olmo2", "gpt2", "phi3")


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_ranks_of_the_reference(family: str, size: int) -> None:
    model = tiny_model(family)
    alone = mixed_steps(reference(model))
    ranks = TorchThreadRanks(size, lambda place: reference(model, place))
    found = mixed_steps(ranks)
    ranks.close()
    # The last digits of torch's products depend on how many outputs a matrix has, and on where it
    # lies in memory.
    np.testing.assert_allclose(found, alone, rtol=0, atol=1e-5)
    np.testing.assert_array_equal(found.argmax(-1), alone.argmax(-1))
