"""Row by row kernels against their plain twins."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from octavo_engine.backends.torch.plain import PlainKernels
from octavo_engine.backends.torch.triton import rows

PLAIN = PlainKernels()
FULL: dict[str, Any] = {"rtol": 1.3e-6, "atol": 1e-5}
HALF: dict[str, Any] = {"rtol": 2e-3, "atol": 2e-3}


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("columns", [64, 72, 300])
def test_norms_alone_and_with_the_sum_before(columns, device):
    x, y = random(5, columns).to(device), random(5, columns, seed=1).half().to(device)
    weight = (random(columns, seed=2) + 1).to(device)
    for dtype, tolerance in ((torch.float32, FULL), (torch.float16, HALF)):
        torch.testing.assert_close(
            rows.rms_norm(x, weight, 1e-5, dtype),
            PLAIN.rms_norm(x, weight, 1e-5, dtype),
            **tolerance,
        )
        total, normed = rows.add_rms_norm(x, y, 0.22, weight, 1e-5, dtype)
        plain_total, plain_normed = PLAIN.add_rms_norm(x, y, 0.22, weight, 1e-5, dtype)
        assert total.dtype == torch.float32
        torch.testing.assert_close(total, plain_total)
        torch.testing.assert_close(normed, plain_normed, **tolerance)


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu"])
def test_gated_units(activation, device):
    x = (random(3, 2 * 1100) * 4).to(device)
    torch.testing.assert_close(rows.glu(x, activation), PLAIN.glu(x, activation))
    x = x.half()
    torch.testing.assert_close(rows.glu(x, activation), PLAIN.glu(x, activation), **HALF)


def test_extreme_values_do_not_overflow(device):
    x = torch.tensor([[-200.0, 200.0, 0.0, 2.0, 3.0, 4.0]]).to(device)
    for activation in ("silu", "gelu", "gelu_tanh"):
        assert rows.glu(x, activation).cpu().tolist()[0] == pytest.approx([0.0, 600.0, 0.0])


def test_no_rows_at_all(device):
    empty, weight = torch.empty((0, 8), device=device), torch.ones(8, device=device)
    assert rows.rms_norm(empty, weight, 1e-6, torch.float32).shape == (0, 8)
    assert rows.glu(empty, "silu").shape == (0, 4)
