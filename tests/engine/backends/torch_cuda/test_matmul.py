"""The product that is the same for a row in any company."""

from __future__ import annotations

import pytest
import torch

from octavo_engine.backends.torch.triton.matmul import matmul


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("with_bias", [False, True])
def test_any_shape_equals_torch(with_bias, device):
    x, weight = random(70, 100).to(device), random(130, 100, seed=1).to(device)
    bias = random(130, seed=2).to(device) if with_bias else None
    expected = torch.nn.functional.linear(x, weight, bias)
    torch.testing.assert_close(
        matmul(x, weight, bias, torch.float32), expected, rtol=2e-5, atol=2e-5
    )
    half_bias = None if bias is None else bias.half()
    found = matmul(x.half(), weight.half(), half_bias, torch.float32)
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=5e-2)


@pytest.mark.usefixtures("row_by_row")
def test_a_row_has_the_same_bits_in_any_company(device):
    x, weight = random(70, 96).to(device), random(40, 96, seed=1).to(device)
    together = matmul(x, weight, None, torch.float32)
    for rows in (slice(0, 1), slice(65, 70), slice(13, 60)):
        alone = matmul(x[rows].contiguous(), weight, None, torch.float32)
        assert torch.equal(alone, together[rows])


def test_no_rows(device):
    empty, weight = torch.empty((0, 8), device=device), torch.ones((4, 8), device=device)
    assert matmul(empty, weight, None, torch.float32).shape == (0, 4)
